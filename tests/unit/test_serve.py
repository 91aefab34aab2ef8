import json
from pathlib import Path

import pytest

from eyesplice import SpecError
from eyesplice.integration.cli.serve import server_command


def additional(command):
    return json.loads(command[command.index("--additional-config") + 1])


def test_the_server_is_switched_on_and_keeps_other_options():
    command = server_command("m", Path("/v"), ["--port", "1", "--seed=2"])
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
    command = server_command("m", None, [*option, "--port", "1"])
    assert additional(command) == {"eyesplice": {"max_entries": 4}, "other": 1}
    assert sum("additional" in part for part in command) == 1
    assert command[-2:] == ["--port", "1"]


@pytest.mark.parametrize("text", ["", "[]", "nonsense", '{"eyesplice": 1}'])
def test_a_malformed_configuration_is_refused(text):
    with pytest.raises(SpecError, match="--additional-config"):
        server_command("m", Path("v"), ["--additional-config", text])
