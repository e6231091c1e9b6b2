"""In the keeper of a test: no byte reaches the store while the file that HELD_STORE names exists.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs, on a store that stands still.
"""

import os
import time

_pwrite = os.pwrite


def _held(fd: int, data: memoryview, at: int) -> int:
    while os.path.exists(os.environ["HELD_STORE"]):
        time.sleep(0.001)
    return _pwrite(fd, data, at)


if "HELD_STORE" in os.environ:
    os.pwrite = _held
