"""The faults that a drill can cause: the action on a process, and the sequel that it has to have.

Each is done from outside, by means that any user has: signals and resource limits of processes of
the same user.  Nothing in the job knows that it is drilled.
"""

from dataclasses import dataclass
from typing import Literal

Name = Literal["rank", "keeper", "node", "end", "stuck", "disk-full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    name: Name
    done: str
    """The action, in words."""
    follows: str
    """The sequel, in words."""
    needs_durable: bool = False
    """Whether a checkpoint on disk has to be there before it makes sense."""
    loses_memory: bool = False
    """Whether the memory tier of the node goes with it."""


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            name="rank",
            done="one rank is killed (SIGKILL)",
            follows="the ranks start again from the newest checkpoint in memory",
        ),
        Fault(
            name="keeper",
            done="the keeper is killed (SIGKILL)",
            follows="training goes on, and a new keeper holds its next checkpoint",
            needs_durable=True,
            loses_memory=True,
        ),
        Fault(
            name="node",
            done="launcher, ranks and keeper are killed (SIGKILL), and the job is started again",
            follows="the job goes on from the newest durable checkpoint",
            needs_durable=True,
            loses_memory=True,
        ),
        Fault(
            name="end",
            done="the launcher is told to end (SIGTERM), and the job is started again",
            follows="the job goes on from the step at which it ended",
            needs_durable=True,
            loses_memory=True,
        ),
        Fault(
            name="stuck",
            done="one rank is stopped (SIGSTOP), and goes on when it was named",
            follows="the rank is named, and an incident written down",
        ),
        Fault(
            name="disk-full",
            done="for a while the keeper may write no large file (RLIMIT_FSIZE)",
            follows="training goes on, the failure is told, the next checkpoint is durable again",
            needs_durable=True,
        ),
    )
}
"""By name, in the order in which they are drilled."""
