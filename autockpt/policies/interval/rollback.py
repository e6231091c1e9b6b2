"""When a training should go back to its last good checkpoint, and how often: pure.

A loss that is NaN or infinite is a spike.  So is a loss above the median of the newest ones by
`SPREADS` times their spread.  After `MOST` rollbacks from one place the training goes on.

Each loss is judged before a checkpoint of it is made, so the newest checkpoint is from before the
spike.  That needs a threshold far beyond the noise of a training.
"""

import math
import statistics
from collections import deque
from collections.abc import Sequence

from autockpt.values.failure import RollbackRecord

WINDOW = 64
"""Newest losses that a loss is compared with."""
LEAST = 16
"""Losses before any is judged."""
SPREADS = 20.0
"""Times the spread (1.4826 x median absolute deviation) that a loss must be above the median."""
LEAST_SPREAD = 0.02
"""Spread at least, as a part of the median: a flat loss is no reason to go back for its noise."""
MOST = 3
"""Rollbacks to one place, or from it, without a good checkpoint beyond."""
_NORMAL = 1.4826


class LossWatch:
    """The newest losses of a training."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def observe(self, loss: float) -> str:
        """Why to go back, "" if nothing is wrong with this loss."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        before = sorted(self._losses)
        self._losses.append(loss)
        if len(before) < LEAST:
            return ""
        median = statistics.median(before)
        deviation = statistics.median(abs(one - median) for one in before)
        spread = max(_NORMAL * deviation, LEAST_SPREAD * abs(median))
        if loss <= median + SPREADS * spread:
            return ""
        return (
            f"the loss is {loss:.4g}, where the median of the {len(before)} before it is "
            f"{median:.4g} and their spread {spread:.2g}"
        )


def rollbacks_beyond(records: Sequence[RollbackRecord], step: int) -> int:
    """How often the training has gone back since it was at `step`, without a checkpoint beyond.

    `step`: where the present process began.
    """
    count = 0
    for record in reversed(records):
        if record.step <= step:
            break
        count += 1
    return count


def batches_to_drop(records: Sequence[RollbackRecord], step: int) -> int:
    """Batches that a process which resumes at `step` leaves out: those up to the newest spike.

    0 where the newest rollback repeats its data, or is behind this step.
    """
    if not records or not records[-1].skips or records[-1].step <= step:
        return 0
    newest = records[-1]
    dropped = newest.dropped if step <= newest.began_step else 0
    return newest.step - step + dropped
