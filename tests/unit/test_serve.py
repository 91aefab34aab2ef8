import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eyesplice import SpecError
from eyesplice.integration.cli import serve
from eyesplice.integration.cli.main import app
from eyesplice.integration.cli.serve import own_part, server_command


def additional(command):
    return json.loads(command[command.index("--additional-config") + 1])


def test_the_server_is_switched_on_and_keeps_other_options():
    command = server_command("m", {"vectors": "/v"}, ["--port", "1", "--seed=2"])
    assert command[1:3] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert command[3:5] == ["--model", "m"]
    assert additional(command) == {"eyesplice": {"vectors": "/v"}}
    assert command[-3:] == ["--port", "1", "--seed=2"]


@pytest.mark.parametrize("joined", [True, False])
def test_a_given_configuration_is_kept(joined):
    text = '{"eyesplice": {"max_entries": 4}, "other": 1}'
    option = (
        [f"--additional-config={text}"] if joined else ["--additional-config", text]
    )
    command = server_command("m", {}, [*option, "--port", "1"])
    assert additional(command) == {"eyesplice": {"max_entries": 4}, "other": 1}
    assert sum("additional" in part for part in command) == 1
    assert command[-2:] == ["--port", "1"]


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"eyesplice": 1}'])
def test_a_malformed_configuration_is_refused(text):
    with pytest.raises(SpecError, match="--additional-config"):
        server_command("m", {"vectors": "v"}, ["--additional-config", text])


def test_the_options_of_the_command_become_keys_and_win(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    own = own_part([Path("guarded"), Path("/b")], Path("v"), ["guarded"])
    assert own == {
        "apps": [str(tmp_path / "guarded"), "/b"],
        "vectors": str(tmp_path / "v"),
        "default": ["guarded"],
    }
    assert own_part((), None, ()) == {}
    assert own_part((), None, (), ["mine"]) == {"op_modules": ["mine"]}
    text = '{"eyesplice": {"apps": ["/c"], "max_entries": 4}}'
    command = server_command("m", own, ["--additional-config", text])
    assert additional(command) == {"eyesplice": {"max_entries": 4, **own}}


def test_the_command_hands_everything_on(monkeypatch):
    ran = []
    monkeypatch.setattr(serve, "require_engine", lambda: None)
    monkeypatch.setattr(serve.os, "execv", lambda _, command: ran.append(command))
    options = ["--app", "/a", "--app", "/b", "--default", "b", "--port", "1"]
    result = CliRunner().invoke(app, ["serve", "m", *options])
    assert result.exit_code == 0, result.output
    assert additional(ran[0]) == {"eyesplice": {"apps": ["/a", "/b"], "default": ["b"]}}
    assert ran[0][-2:] == ["--port", "1"]
