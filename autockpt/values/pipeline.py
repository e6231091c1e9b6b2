"""A pipeline schedule: for each rank, the order in which it runs its chunks.

An order is a value.  The orders of the two schedules that are loops in torch's source are written
down here; all others are read from torch's schedule objects.  (torch's own table of 1F1B gives its
last rank the micro-batches 1 to m, and is not what its loop runs.)
"""

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from autockpt.values.errors import ConfigError

Kind = Literal["F", "B", "I", "W"]
"""Forward, full backward, its part for the inputs, its part for the weights."""
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_NOT_COMPUTE = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


@dataclass(frozen=True, slots=True)
class Action:
    """One chunk: a stage's forward or backward of one micro-batch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[Action, ...]
"""The chunks that one rank runs in an iteration, first to last."""


def parse_order(texts: Iterable[str]) -> Order:
    """The compute actions among torch's, as it writes them: 0F3, 2SEND_F1, (0F4;3B0)OVERLAP_F_B.

    Communication is left out, and overlapped pairs run one after the other, as torch runs them.
    Raises ConfigError for anything else.
    """
    order: list[Action] = []
    for text in texts:
        for part in text.strip("(").partition(")")[0].split(";"):
            found = _ACTION.fullmatch(part)
            if found:
                stage, kind, microbatch = found.groups()
                order.append(Action(int(stage), kind, int(microbatch)))  # type: ignore[arg-type]
            elif not _NOT_COMPUTE.fullmatch(part):
                raise ConfigError(
                    f"pipeline order: unknown action {text!r}; expected [stage][F|B|I|W][micro-"
                    "batch]; this torch writes its schedules otherwise, windows are not predicted"
                )
    return tuple(order)


def gpipe_orders(ranks: int, microbatches: int) -> tuple[Order, ...]:
    """All forwards, then all backwards, both in the order of the micro-batches."""
    return tuple(
        tuple(Action(rank, kind, i) for kind in ("F", "B") for i in range(microbatches))
        for rank in range(ranks)
    )


def one_f_one_b_orders(ranks: int, microbatches: int) -> tuple[Order, ...]:
    """p - r forwards on rank r, then a backward and a forward in turn, then the other backwards."""
    orders = []
    for rank in range(ranks):
        ahead = min(microbatches, ranks - rank)
        order = [Action(rank, "F", i) for i in range(ahead)]
        for i in range(microbatches):
            order.append(Action(rank, "B", i))
            if ahead + i < microbatches:
                order.append(Action(rank, "F", ahead + i))
        orders.append(tuple(order))
    return tuple(orders)


def order_digest(marks: Iterable[object]) -> str:
    """Digest of the chunks that one rank runs in an iteration, in their order."""
    return hashlib.sha256(" ".join(map(str, marks)).encode()).hexdigest()[:16]
