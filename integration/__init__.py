"""Everything that touches vLLM: the plugin, its hooks, buffers, requests and commands."""

if __name__ != "eyesplice.integration":
    raise ImportError(f"import eyesplice.integration, not {__name__}")
