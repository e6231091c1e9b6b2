"""In the keeper of a test: every write to the store takes longer by the seconds in SLOWED_STORE.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs, on a store whose speed the test sets while it runs.
"""

import os
import time

_pwrite = os.pwrite


def _slowed(fd: int, data: memoryview, at: int) -> int:
    with open(os.environ["SLOWED_STORE"], encoding="ascii") as delay:
        time.sleep(float(delay.read() or 0))
    return _pwrite(fd, data, at)


if "SLOWED_STORE" in os.environ:
    os.pwrite = _slowed
