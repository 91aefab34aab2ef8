.DEFAULT_GOAL := help
.PHONY: help setup demo test check fix clean

ARGS ?=

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

setup: ## .venv with an engine, eyesplice and the tools (instant when it is there)
	@scripts/setup

demo: setup ## steer a small real model, on this machine's GPU or CPU
	@.venv/bin/eyesplice demo $(ARGS)

test: setup ## scripts/check, then every test
	@scripts/check
	@scripts/test $(ARGS)

check: setup ## format, lint, types and the direction of imports
	@scripts/check

fix: setup ## repair what a tool can repair
	@scripts/fix

clean: ## remove .venv, caches and build output
	rm -rf .venv build dist *.egg-info .cache .mypy_cache .pytest_cache .ruff_cache \
		.import_linter_cache .hypothesis
	find eyesplice ops fx_passes integration tests benchmarks -name __pycache__ \
		-type d -prune -exec rm -rf {} +
