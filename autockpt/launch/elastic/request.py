"""The order to a launcher, and how its job ended."""

from dataclasses import dataclass
from typing import Literal

from autockpt.launch.script import Script
from autockpt.run_directory import RunDirectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The command to start."""

    run: RunDirectory
    script: Script
    mode: Literal["run", "profile"]
    nproc_per_node: str = "1"
    nnodes: str = "1"
    node_rank: int = 0
    rdzv_backend: str = "c10d"
    rdzv_endpoint: str = ""
    rdzv_id: str = ""
    rdzv_conf: str = ""
    local_addr: str | None = None
    max_restarts: int | None = None
    resume_from: str | None = None
    fresh: bool = False
    profile_in_place: bool = True
    standby: Literal["on", "off"] | None = None
    """Whether ranks of the next incarnation are parked, as the policy says; None: auto."""
    caches: Literal["on", "off"] | None = None
    """Whether compiled code lies in the run directory, as the policy says; None: auto."""
    faulty_node: Literal["name", "leave"] | None = None
    """What becomes of a node that begins too many failures, as the policy says; None: auto."""
    notice_s: float | None = None
    """How long before an end it is announced, as the policy says, seconds; None: it does not."""

    @property
    def single_node(self) -> bool:
        """Whether no other node takes part."""
        return self.nnodes in ("1", "1:1")


@dataclass(slots=True, kw_only=True)
class Limit:
    """The end of the command that was announced: by then the process is gone."""

    by_s: float
    """CLOCK_MONOTONIC."""
    exit_code: int
    """The code of the process where it is ended then: as far as it is known so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the job ended."""

    state: Literal["finished", "failed", "interrupted"]
    exit_code: int
    restarts: int
    reason: str = ""
    joined: bool = True
    """This node took part; a spare that was not needed did not."""
    error: str = ""
    """The exception that ended the rank that failed first; "": another end."""
    over: bool = False
    """The training ended well, and the script failed behind it."""
    limit: Limit | None = None
    """Of the command, where an end was announced."""
    keeper_by_s: float | None = None
    """CLOCK_MONOTONIC by which the keeper of this node is to be done."""
