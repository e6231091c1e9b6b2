"""The session of a profile stands in for the one that checkpoints."""

import inspect

import pytest

from autockpt.profiling.pass_through import PassThroughSession
from autockpt.session import Session

PUBLIC = [name for name in dir(Session) if not name.startswith("_")]


@pytest.mark.parametrize("name", PUBLIC)
def test_it_has_every_public_name_of_a_session(name: str) -> None:
    """A property or a function with the same arguments, so that no script fails for it."""
    real, stand_in = (inspect.getattr_static(one, name) for one in (Session, PassThroughSession))
    assert type(stand_in) is type(real)
    if inspect.isfunction(real):
        ours = inspect.signature(real).parameters.values()
        theirs = inspect.signature(stand_in).parameters.values()
        assert [(p.name, p.kind) for p in theirs] == [(p.name, p.kind) for p in ours]


def test_nothing_of_it_waits() -> None:
    """Not even a script that asks for slots before it goes on."""
    ckpt = PassThroughSession(None, None)
    ckpt.save()
    assert (ckpt.ready, ckpt.keeper_pid, ckpt.fence_stall_s) == (True, None, 0.0)
    assert ckpt.wait_durable(60.0) == 0.0
    ckpt.close()
