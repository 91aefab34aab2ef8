"""Published methods as apps: one module each, to fit on activations and to deploy.

A module's `fit` takes activations that eyesplice captured, plain tensors of one row per
sample, and its `app` makes the `eyesplice.App` of what was fitted. `template` gives the
same app as YAML, for tensors that come from elsewhere.
"""

from pathlib import Path
from typing import Final

from eyesplice._errors import SpecError

PACKS: Final = ("arditi", "cast", "kts", "orgad", "sake", "seal", "steermoe")
"""The modules of this package that hold a method."""


def template(pack: str) -> str:
    """The text of a pack's `app.yaml`, to save beside `tensors.safetensors`.

    Args:
        pack: one of `PACKS`.

    Raises:
        SpecError: no such pack.
    """
    if pack not in PACKS:
        raise SpecError("pack", pack, ", ".join(PACKS), "name one of these")
    file = Path(__file__).parent / "templates" / f"{pack}.yaml"
    return file.read_text(encoding="utf-8")
