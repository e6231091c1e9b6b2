"""Mutational fuzzing of every parser: the documented error or a value, in bounded time and memory.

A light form of coverage: an input that ends in a way not seen before in its case (the line that
raised, or what came out) joins the inputs that later ones are made from.  Time and memory are
looked at once for a batch of inputs, and for each of them alone when a batch is not within the
bounds of one.
"""

import random
import resource
import signal
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from tests.campaigns.frame_parsers import frame_parsers
from tests.campaigns.framework import Violation, require
from tests.campaigns.mutation import Sample, changed, mutated
from tests.campaigns.parsers import Parser, parsers

BATCHES = 10
"""In a case, all of one parser."""
PARSE_CPU_S = 1.0
HANG_CPU_S = 10.0
MORE_MEMORY_BYTES = 512 * 2**20
KEPT = 64
"""Inputs in a case that are made from."""


class Hangs(BaseException):
    """No parser may catch it."""


class Fuzz:
    """Cases go around the parsers."""

    claim = "whatever the bytes, a parser returns or raises what it documents, in 1 s and 64 MiB"
    distinct: int | None = None

    def __init__(self, scratch: Path) -> None:
        self.executions = 0
        warnings.simplefilter("ignore")  # torch's, of damaged files
        self._parsers = [*parsers(scratch), *frame_parsers(scratch)]
        for parser in self._parsers:
            for good in parser.good:
                parser.read(parser.wrap(good))  # a good input that is refused would prove nothing
        _limit_memory()
        signal.signal(signal.SIGVTALRM, _hangs)
        self._peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def run(self, number: int, rng: random.Random) -> str:
        """One parser, from its good inputs on."""
        parser = self._parsers[number % len(self._parsers)]
        corpus, seen = [Sample(good) for good in parser.good], set[object]()
        for _ in range(BATCHES):
            batch = [_made(parser, corpus, rng) for _ in range(parser.batch)]
            ends = execute(parser, [whole for _, whole in batch])
            for (data, _), ended in zip(batch, ends, strict=True):
                if ended not in seen and len(corpus) < KEPT:
                    seen.add(ended)
                    corpus.append(Sample(data))
            self.executions += len(batch)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        more, self._peak_kib = peak - self._peak_kib, max(peak, self._peak_kib)
        require(more < 64 * 1024, f"{parser.name}: {more} KiB more memory")
        return parser.name

    def close(self) -> None:
        """Nothing stays open."""


def _made(parser: Parser, corpus: Sequence[Sample], rng: random.Random) -> tuple[bytes, bytes]:
    """(input, what is parsed: with lengths and digests that fit, most of the time)."""
    sample, other = (corpus[int(rng.random() * len(corpus))] for _ in range(2))
    data = mutated(sample, other.data, rng)
    whole = parser.wrap(data)
    return data, changed(whole, whole, rng) if rng.random() < 0.2 else whole


def execute(parser: Parser, inputs: Sequence[bytes]) -> list[object]:
    """Parses; how each ended.  Raises Violation."""
    ends: list[object] = []
    began = time.process_time()
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG_CPU_S)
    try:
        for data in inputs:
            ends.append(_ended(parser, data))
    except Hangs:
        pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    took = time.process_time() - began
    if took < PARSE_CPU_S and len(ends) == len(inputs):
        return ends
    if len(inputs) == 1:
        raise Violation(f"{parser.name}: {took:.1f} s for {inputs[0][:2000]!r}")
    return [end for data in inputs for end in execute(parser, [data])]


def _ended(parser: Parser, data: bytes) -> object:
    """The type of a value; the line that raised an error, and the one that raised its cause."""
    try:
        return type(parser.read(data))
    except parser.errors as error:
        return _line(error), _line(error.__cause__ or error.__context__)
    except Exception as error:
        raise Violation(f"{parser.name}: {error!r:.300} for {data[:2000]!r}") from error


def _line(error: BaseException | None) -> tuple[object, int]:
    trace = error.__traceback__ if error is not None else None
    if trace is None:
        return type(error), 0
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame.f_code, trace.tb_lineno


def _hangs(number: int, frame: FrameType | None) -> None:
    raise Hangs


def _limit_memory() -> None:
    """A parser that allocates by a number from the input gets a MemoryError, which it may not."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MORE_MEMORY_BYTES, hard))
