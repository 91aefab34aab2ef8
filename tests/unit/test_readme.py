"""What README shows runs as it stands there."""

import json
import re
from pathlib import Path

import torch

import eyesplice

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_app_and_what_a_request_changes_of_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(code, {"w": torch.ones(16), "v": torch.ones(16)})
    app = eyesplice.load_app(tmp_path / "guarded")
    assert [one["name"] for one in app.functions] == ["negative", "steer"]
    assert app.functions[1]["gate"] == "negative >= 0"
    (override,) = re.findall(r"`(\{\"apps\".*?\})`", README)
    functions = json.loads(override)["apps"][app.name]["functions"]
    assert set(functions) <= {one["name"] for one in app.functions}
