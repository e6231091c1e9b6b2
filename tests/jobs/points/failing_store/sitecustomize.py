"""In the keeper of a test: every write to the store fails while the file that FAILING_STORE names
exists.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs, on a disk that is broken.
"""

import errno
import os

_pwrite = os.pwrite


def _failing(fd: int, data: memoryview, at: int) -> int:
    if os.path.exists(os.environ["FAILING_STORE"]):
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return _pwrite(fd, data, at)


if "FAILING_STORE" in os.environ:
    os.pwrite = _failing
