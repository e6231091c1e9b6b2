"""examples/gpt/train.py with slow iterations until the file HOLD names is there: SLOW_S seconds.

So a test finds the training under way on any machine, and lets it run to its end.
"""

import os
import time
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from examples.gpt import train

SLOW_S = float(os.environ.get("SLOW_S", "0.1"))


def slow(*_: Any) -> None:
    """Waits behind an optimizer's step.  No number of the training depends on it."""
    if (hold := os.environ.get("HOLD")) and not os.path.exists(hold):
        time.sleep(SLOW_S)


if __name__ == "__main__":
    register_optimizer_step_post_hook(slow)
    train.main()
