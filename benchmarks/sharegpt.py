"""ShareGPT files as vLLM's serving benchmark reads them, whole or cut off mid-record."""

import hashlib
import json
from pathlib import Path
from typing import Any, Final

_RECORD_ENDS: Final = ("\n  },\n", "},\n", "},")


def conversations(text: str) -> list[dict[str, Any]]:
    """The records of a ShareGPT file; of one that was cut off, those that are whole.

    Args:
        text: a JSON list of objects with `conversations`.

    Raises:
        ValueError: neither JSON nor a list that was cut off between its records.
    """
    try:
        found = json.loads(text)
    except ValueError:
        found = json.loads(_closed(text))
    if not isinstance(found, list):
        raise ValueError("a ShareGPT file is a JSON list of conversations")
    return [
        record
        for record in found
        if len(record.get("conversations") or ()) >= 2 and _has_text(record)
    ]


def _has_text(record: dict[str, Any]) -> bool:
    return all(turn.get("value") for turn in record["conversations"][:2])


def _closed(text: str) -> str:
    """The text up to its last whole record, and the list's end."""
    for end in _RECORD_ENDS:
        if (at := text.rfind(end)) >= 0:
            return text[: at + end.index("}") + 1] + "]"
    raise ValueError("not a ShareGPT file: no record in it ends")


def write_subset(source: Path, target: Path, keep: int) -> dict[str, Any]:
    """Repair a ShareGPT file and keep its first conversations, two turns of each.

    Args:
        source: the file.
        target: the file to write.
        keep: conversations to keep.

    Returns:
        What to note of it: name, conversations kept, SHA-256 of the file written.

    Raises:
        ValueError: see `conversations`.
    """
    found = conversations(source.read_text(encoding="utf-8"))[:keep]
    short = [
        {"id": record.get("id"), "conversations": record["conversations"][:2]}
        for record in found
    ]
    content = json.dumps(short).encode()
    target.write_bytes(content)
    return {
        "file": source.name,
        "conversations": len(short),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
