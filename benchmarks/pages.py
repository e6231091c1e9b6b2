"""`make bench-pages`: what a slot in huge pages gains over one in small ones.

Two slots of the same size, one gathered into huge pages as a keeper does it, in turn: a copy into
it, its digest, a direct write of it and a direct read into it, and one more mapping of it with its
page table, as a trainer makes one.  Ratios within a round; below 1 huge pages are faster.
"""

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable

from autockpt.executors.image.container import chunk_digest
from autockpt.executors.linux.memory import Arena
from benchmarks.harness import parse, publish, row

PIECE_BYTES = 4 * 2**20
CHUNK_BYTES = 8 * 2**20


class Contestant:
    """A slot, and what is done with it."""

    def __init__(self, nbytes: int, source: Arena, file: int, *, huge: bool) -> None:
        self.slot, self._source, self._file = (
            Arena.create_shared(nbytes, name="pages"),
            source,
            file,
        )
        began = time.perf_counter()
        if huge:
            self.slot.make_huge(0, nbytes)
        self.gathering_s = time.perf_counter() - began

    def copy(self) -> None:
        """As the copy thread does."""
        for start in range(0, self.slot.nbytes, PIECE_BYTES):
            count = min(PIECE_BYTES, self.slot.nbytes - start)
            ctypes.memmove(self.slot.address + start, self._source.address + start, count)

    def digest(self) -> None:
        """As the keeper does."""
        for chunk, _ in self._chunks():
            chunk_digest(chunk)

    def write(self) -> None:
        """Direct, without an fsync."""
        for chunk, start in self._chunks():
            os.pwrite(self._file, chunk, start)

    def read(self) -> None:
        """Direct."""
        for chunk, start in self._chunks():
            os.preadv(self._file, [chunk], start)

    def map(self) -> None:
        """Once more, and gone again."""
        assert self.slot.fd is not None
        Arena.attach(os.dup(self.slot.fd)).close()

    def _chunks(self) -> list[tuple[memoryview, int]]:
        starts = range(0, self.slot.nbytes, CHUNK_BYTES)
        return [(self.slot.view[start : start + CHUNK_BYTES], start) for start in starts]


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--mib", type=int, default=512, help="size of a slot")
    parser.add_argument("--rounds", type=int, default=9)
    args = parse(parser, mib=16, rounds=1)
    nbytes = args.mib * 2**20
    with tempfile.NamedTemporaryFile(dir=os.getcwd(), prefix="bench-pages-") as file:
        direct = os.open(file.name, os.O_RDWR | os.O_DIRECT)
        os.posix_fallocate(direct, 0, nbytes)
        source = Arena.anonymous(nbytes)
        small = Contestant(nbytes, source, direct, huge=False)
        huge = Contestant(nbytes, source, direct, huge=True)
        ratios = measure(small, huge, args.rounds)
        os.close(direct)
    rows = [row("huge over small", name, samples, "x") for name, samples in ratios.items()]
    gathering = [huge.gathering_s / nbytes * 1e9]
    rows.append(row("gathering", "time", gathering, "s/GB"))
    publish("pages", rows, settings=vars(args), smoke=args.smoke)


def measure(small: Contestant, huge: Contestant, rounds: int) -> dict[str, list[float]]:
    """Ratios by what was done; the first round does not count."""
    ratios: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name in ("copy", "digest", "write", "read", "map"):
            order = (small, huge) if number % 2 else (huge, small)
            took = {one: _took(getattr(one, name)) for one in order}
            if number:
                ratios.setdefault(name, []).append(took[huge][0] / took[small][0])
            if number and name in ("write", "read"):
                ratio = took[huge][1] / max(1e-6, took[small][1])
                ratios.setdefault(f"{name}, CPU", []).append(ratio)
    return ratios


def _took(work: Callable[[], None]) -> tuple[float, float]:
    """(wall, CPU) seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


if __name__ == "__main__":
    main()
