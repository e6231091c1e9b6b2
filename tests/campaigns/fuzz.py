"""Mutational fuzzing of every parser: the documented error or a value, in bounded time and memory.

A light form of coverage: an input that ends in a way not seen before in its case (the error's first
words, or what came out) joins the inputs that later ones are made from.
"""

import random
import re
import resource
import signal
import time
import warnings
from collections import Counter
from pathlib import Path

from tests.campaigns.framework import Violation, require
from tests.campaigns.mutation import mutated
from tests.campaigns.parsers import Parser, parsers

EXECUTIONS = 200
"""Of one parser, in a case."""
PARSE_CPU_S = 1.0
HANG_CPU_S = 10.0
MORE_MEMORY_BYTES = 512 * 2**20
KEPT = 64
"""Inputs in a case that are made from."""


class Fuzz:
    """Cases go around the parsers."""

    claim = "whatever the bytes, a parser returns or raises what it documents, in 1 s and 64 MiB"
    distinct: int | None = None
    executions = 0

    def __init__(self, scratch: Path) -> None:
        warnings.simplefilter("ignore")  # torch's, of damaged files
        self._parsers = parsers(scratch)
        for parser in self._parsers:
            for good in parser.good:
                parser.read(parser.wrap(good))  # a good input that is refused would prove nothing
        _limit_memory()
        signal.signal(signal.SIGVTALRM, _hangs)
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, number: int, rng: random.Random) -> str:
        """One parser, from its good inputs on."""
        parser = self._parsers[number % len(self._parsers)]
        corpus, seen = [*parser.good], Counter[str]()
        count = EXECUTIONS // 20 if parser.slow else EXECUTIONS
        for _ in range(count):
            data = mutated(rng.choice(corpus), rng.choice(corpus), rng)
            whole = parser.wrap(data)
            if rng.random() < 0.2:
                whole = mutated(whole, whole, rng)
            ended = execute(parser, whole)
            seen[ended] += 1
            if seen[ended] == 1 and len(corpus) < KEPT:
                corpus.append(data)
        self.executions += count
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        more, self._peak_kib = peak - self._peak_kib, max(peak, self._peak_kib)
        require(more < 64 * 1024, f"{parser.name}: {more} KiB more memory")
        return parser.name

    def close(self) -> None:
        """Nothing stays open."""


def execute(parser: Parser, data: bytes) -> str:
    """Parses; how it ended.  Raises Violation."""
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_CPU_S)
    try:
        ended = type(parser.read(data)).__name__
    except parser.errors as error:
        ended = re.sub(r"[0-9'\"].*", "", str(error))[:80]
    except Exception as error:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        raise Violation(f"{parser.name}: {error!r:.300} for {data[:2000]!r}") from error
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    took = time.process_time() - began
    require(took < PARSE_CPU_S, f"{parser.name}: {took:.1f} s for {data[:2000]!r}")
    return ended


def _hangs(*_: object) -> None:
    raise TimeoutError(f"no end within {HANG_CPU_S:.0f} s")


def _limit_memory() -> None:
    """A parser that allocates by a number from the input gets a MemoryError, which it may not."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY_BYTES, hard))
