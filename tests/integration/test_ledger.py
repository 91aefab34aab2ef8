"""Every private name of vLLM that eyesplice uses is there in the installed version."""

import pytest

from eyesplice.integration import ledger
from eyesplice.integration.private_name import LedgerError, PrivateName


@pytest.mark.parametrize(
    "name", ledger.ALL, ids=lambda name: f"{name.module}.{name.path}"
)
def test_the_installed_vllm_has_the_name(name: PrivateName):
    assert name.get() is not None


def test_a_name_that_is_gone_says_what_to_do():
    gone = PrivateName(
        "vllm.config", "NoSuch.thing", why="a", versions="b", when_gone="look elsewhere"
    )
    with pytest.raises(LedgerError, match=r"NoSuch\.thing.*look elsewhere"):
        gone.get()


def test_the_ledger_lists_each_name_once():
    assert len({(n.module, n.path) for n in ledger.ALL}) == len(ledger.ALL) >= 13
