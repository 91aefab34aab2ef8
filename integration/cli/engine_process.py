"""An engine's process: reads a job on stdin, writes what it found to a file.

    python -m eyesplice.integration.cli.engine_process RESULT.json < JOB.json

Without vectors, a generate job imports nothing of eyesplice that touches vLLM.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from eyesplice.integration.cli.jobs import InspectJob, from_json


def main(result: Path) -> int:
    """Do the job on stdin; returns the exit status."""
    job = from_json(sys.stdin.read())
    found: dict[str, Any] = {}
    try:
        if isinstance(job, InspectJob):
            from eyesplice.integration.cli.inspect_engine import inspect_model

            inspect_model(job, found)
        else:
            from eyesplice.integration.cli.generate_engine import generate

            generate(job, found)
        status = 0
    except Exception as error:
        from eyesplice.integration.cli.engine_options import in_one_line

        found["error"] = in_one_line(error)
        status = 1
        import traceback

        traceback.print_exc()
    result.write_text(json.dumps(found))
    return status


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # The result is written: nothing that an engine does at exit is worth the wait.
    os._exit(code)
