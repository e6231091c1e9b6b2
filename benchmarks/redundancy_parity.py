"""How fast a holder takes chunks into its parity, beside a plain copy of the same bytes.

One thread, memory faulted before, every contestant over all chunks in turn, ratios within a round.
"Coded" is the rate of bytes taken in; a holder of a set against two losses takes every chunk into
one of its two rows, so its mean is between XOR and the dearest constant.
"""

import ctypes
import random
import time
from collections.abc import Callable

from autockpt.executors.keeper.replication.parity.geometry import ParitySet
from autockpt.executors.keeper.replication.parity.sums import ParityMemory
from autockpt.executors.linux.memory import Arena
from benchmarks.harness import Row, row

CHUNK_BYTES = 8 * 2**20
MEMBERS = 8
XOR_TARGET = 0.60


def parity_rows(mib: int, rounds: int) -> list[Row]:
    """XOR for one loss and GF(16) for two, of a set of eight."""
    chunks = max(MEMBERS, mib * 2**20 // CHUNK_BYTES)
    source = Arena.anonymous(chunks * CHUNK_BYTES)
    source.view[:] = random.Random(0).randbytes(2**20) * (source.nbytes // 2**20)
    target = Arena.anonymous(chunks * CHUNK_BYTES)
    contestants = {
        "plain copy": lambda: _copy(source, target, chunks),
        "parity, one loss (XOR)": _adding(source, target, chunks, 1),
        "parity, two losses (GF(16))": _adding(source, target, chunks, 2),
        **_library(source, chunks),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, work in contestants.items():
            began = time.perf_counter()
            nbytes = work()
            if number:
                seconds[name].append((time.perf_counter() - began) / nbytes)
    return [one for name in contestants for one in _rows(name, seconds)]


def _rows(name: str, seconds: dict[str, list[float]]) -> list[Row]:
    rows = [row(name, "bytes taken", [1e-9 / s for s in seconds[name]], "GB/s")]
    if name != "plain copy":
        pairs = zip(seconds["plain copy"], seconds[name], strict=True)
        target = XOR_TARGET if "XOR" in name else None
        rows.append(row(name, "of a plain copy", [a / b for a, b in pairs], "x", at_least=target))
    return rows


def _copy(source: Arena, target: Arena, chunks: int) -> int:
    for start in range(0, chunks * CHUNK_BYTES, CHUNK_BYTES):
        ctypes.memmove(target.address + start, source.address + start, CHUNK_BYTES)
    return chunks * CHUNK_BYTES


def _adding(source: Arena, target: Arena, chunks: int, losses: int) -> Callable[[], int]:
    """All chunks that holder 0 fetches of the others; a chunk of `source` for each of them."""
    share = chunks // (MEMBERS - 1)
    parity = ParitySet(
        image_bytes=(share * (MEMBERS - losses) * CHUNK_BYTES,) * MEMBERS,
        chunk_bytes=CHUNK_BYTES, losses=losses,
    )  # fmt: skip
    arrivals = [
        (member, number)
        for member in range(1, MEMBERS)
        for start, stop in parity.for_holder(member, 0)
        for number in range(start, stop)
    ]

    def work() -> int:
        memory = ParityMemory(parity, 0, target.view[: parity.parity_bytes])
        for at, (member, number) in enumerate(arrivals):
            start = at % chunks * CHUNK_BYTES
            memory.add(member, number, source.view[start : start + CHUNK_BYTES])
        return len(arrivals) * CHUNK_BYTES

    return work


def _library(source: Arena, chunks: int) -> dict[str, Callable[[], int]]:
    """pyeclib's fastest code, where it is installed; it needs a whole stripe in one place."""
    try:
        from pyeclib.ec_iface import ECDriver
    except ImportError:
        return {}
    data = MEMBERS - 2
    driver = ECDriver(k=data, m=2, ec_type="isa_l_rs_cauchy")
    stripe = bytes(source.view[: data * CHUNK_BYTES])
    rounds = max(1, chunks // data)

    def work() -> int:
        for _ in range(rounds):
            driver.encode(stripe)
        return rounds * len(stripe)

    return {"pyeclib, 6 + 2 in one place": work}
