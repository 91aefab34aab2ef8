"""What a step's copy gave is void once it is released, here as on a GPU."""

import pytest


@pytest.fixture(autouse=True)
def released_copies_are_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyesplice.integration.copies import StepCopy

    release = StepCopy.release

    def poisoned(copy: StepCopy) -> None:
        copy._words.numpy().fill(-77_777)
        release(copy)

    monkeypatch.setattr(StepCopy, "release", poisoned)
