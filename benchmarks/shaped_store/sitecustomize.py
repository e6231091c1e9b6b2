"""In a keeper of `make bench-redundancy`: all writes together take bytes / SHAPED_STORE seconds.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs, on a store of that rate (bytes per second, this node's share).
"""

import os
import threading
import time

_pwrite = os.pwrite
_turn = threading.Lock()


def _shaped(fd: int, data: memoryview, at: int) -> int:
    with _turn:
        time.sleep(memoryview(data).nbytes / float(os.environ["SHAPED_STORE"]))
        return _pwrite(fd, data, at)


if "SHAPED_STORE" in os.environ:
    os.pwrite = _shaped
