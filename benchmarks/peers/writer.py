"""A process that writes shared memory to a file: O_DIRECT, two threads, 8 MiB pieces, one fsync.

The hand-written reference of "a plain write".  Run as a script with a memfd and its length; every
line on stdin is "new PATH" or "over PATH" (overwrite in place), every answer is
"CLOCK_MONOTONIC-when-durable CPU-seconds-of-it" or "error REASON".  Imports no torch: it must
start at once and stay small.
"""

import mmap
import os
import sys
import threading
import time

PIECE_BYTES = 8 * 2**20
THREADS = 2
_POPULATE_WRITE = 23


def main() -> None:
    """Serves until stdin ends."""
    fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
    memory = mmap.mmap(fd, nbytes)
    memory.madvise(_POPULATE_WRITE)
    view = memoryview(memory)
    for line in sys.stdin:
        how, path = line.rstrip("\n").split(" ", 1)
        cpu = time.process_time()
        try:
            write(path, view, new=how == "new")
        except OSError as error:
            print("error", error, flush=True)
            continue
        print(time.monotonic(), time.process_time() - cpu, flush=True)


def write(path: str, view: memoryview, *, new: bool) -> None:
    """All of `view`, durable when it returns."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_DIRECT | (os.O_EXCL if new else 0)
    fd = os.open(path, flags, 0o600)
    try:
        os.posix_fallocate(fd, 0, len(view))
        threads = [threading.Thread(target=_share, args=(fd, view, i)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os.fsync(fd)
    finally:
        os.close(fd)
    if os.stat(path).st_size != len(view):
        raise OSError(f"{path}: is shorter than what was written")


def _share(fd: int, view: memoryview, index: int) -> None:
    """Every second piece."""
    for start in range(index * PIECE_BYTES, len(view), THREADS * PIECE_BYTES):
        stop = min(start + PIECE_BYTES, len(view))
        while start < stop:
            start += os.pwrite(fd, view[start:stop], start)


if __name__ == "__main__":
    main()
