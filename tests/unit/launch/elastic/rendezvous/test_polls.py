"""torchelastic's rendezvous of a small job does not wait, and logs without reading sources."""

import inspect
import sys
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from autockpt.launch.elastic.rendezvous.polls import quick_rendezvous


def test_functions_have_the_same_names_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found in the frame: to read the sources of a stack takes longer than the rendezvous."""
    module: Any = dynamic_rendezvous
    theirs = module.get_method_name

    def record() -> str:
        return str(module.get_method_name())

    def next_rendezvous() -> str:
        return record()

    expected = next_rendezvous()
    with quick_rendezvous(1):
        monkeypatch.setattr(inspect, "stack", lambda: pytest.fail("the sources are read"))
        assert next_rendezvous() == expected == "next_rendezvous"
        assert module.get_method_name(depth=sys.getrecursionlimit()) == "no_method_name"
    assert module.get_method_name is theirs


def test_a_wait_is_as_long_as_the_job_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most torchelastic's own; a random one at the first start stays."""
    module: Any = dynamic_rendezvous
    waits: list[Any] = []
    monkeypatch.setattr(module, "_delay", waits.append)
    for nodes in (1, 4, 10_000):
        with quick_rendezvous(nodes):
            module._delay(1)
            module._delay((0, 0.3))
    assert waits == [0.01, (0, 0.3), 0.04, (0, 0.3), 1, (0, 0.3)]
