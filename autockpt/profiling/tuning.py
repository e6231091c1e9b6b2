"""The search for the best write, carried out: asks the search, measures, keeps every sample.

Bounded in writes by the budget and in time by shrinking the sample, then by ending early.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TextIO

from autockpt.profiles.estimators import codec_measures
from autockpt.profiles.probes.codecs import Piece, measure_codecs
from autockpt.profiles.probes.storage import PAGE_BYTES, SAMPLE_LIMIT_BYTES, SPACE_SHARE
from autockpt.profiling.measure import movers
from autockpt.profiling.measure.sample_data import PIECE_BYTES, Content, main_dtype
from autockpt.profiling.measure.timed_write import Write
from autockpt.tuner.search.record import Header, Trial, header_line, trial_line
from autockpt.tuner.search.search import Question, Search
from autockpt.tuner.search.space import Candidate
from autockpt.values.errors import AutockptError, StorageError
from autockpt.values.profile import Profile

EXPLORING = 0.6
"""Part of the time after which the final begins, however little was explored."""
WRITING = 0.8
"""Part of the time that the writes take if all are as fast as the first."""
PILOT_BYTES = 16 * 2**20
CODEC_S = 3.0
"""For codecs of a profile that measured none."""

Measure = Callable[[Candidate, int], Write]
"""(candidate, bytes a rank) to one write of all ranks.  Raises AutockptError or OSError."""


def largest_sample(directory: str, state_bytes: int, ranks: int) -> int:
    """Return the bytes that a write of one rank may take: bounded by state, space and a limit."""
    stat = os.statvfs(directory)
    allowed = int(stat.f_bavail * stat.f_frsize * SPACE_SHARE) // ranks
    size = min(state_bytes, SAMPLE_LIMIT_BYTES, allowed) // PAGE_BYTES * PAGE_BYTES
    if size < PAGE_BYTES:
        raise StorageError(f"{directory}: no space to write a sample; free some and tune again")
    return size


def fit_sample(
    measure: Measure, default: Candidate, largest: int, *, budget: int, limit_s: float
) -> int:
    """Bytes a rank with which the whole budget fits the time, by two writes of the default.

    The first is a warm-up.  Raises StorageError when the directory takes none.
    """
    pilot = min(largest, PILOT_BYTES)
    try:
        seconds = [measure(default, pilot).seconds for _ in range(2)][-1]
    except (AutockptError, OSError) as error:
        raise StorageError(f"the first write failed: {error}") from error
    fitting = int(pilot / seconds * WRITING * limit_s / budget)
    return max(pilot, min(largest, fitting // PAGE_BYTES * PAGE_BYTES))


def with_codecs(profile: Profile, content: Content) -> Profile:
    """The profile with codecs measured on these bytes where it has none, the same for all classes.

    The bytes are a mixture of all classes already.
    """
    if profile.codecs:
        return profile
    view = content.arena.view
    pieces = [
        Piece("parameters", view[start : start + PIECE_BYTES], main_dtype(profile.state))
        for start in range(0, len(view), PIECE_BYTES)
    ]
    samples, _ = measure_codecs(movers.codecs(), pieces, budget_s=CODEC_S)
    found = codec_measures(samples)
    classes = [part.name for part in profile.state.classes if part.bytes]
    copies = tuple(replace(m, tensor_class=name) for m in found for name in classes)
    return replace(profile, codecs=copies)


def carry_out(
    search: Search,
    header: Header,
    measure: Measure,
    out: TextIO,
    *,
    limit_s: float,
    told: Callable[[Trial], None],
    now_s: Callable[[], float] = time.monotonic,
) -> None:
    """Asks and measures until the search is over; every trial is in `out` before the next begins.

    `told` hears of each.
    """
    out.write(header_line(header))
    began_s = now_s()
    while (question := search.ask()) is not None:
        trial = _answer(question, header.sample_bytes, measure)
        out.write(trial_line(trial))
        out.flush()
        search.tell(trial)
        told(trial)
        share = EXPLORING if question.stage != "final" else 1.0
        if now_s() - began_s > share * limit_s:
            search.enough()


def _answer(question: Question, nbytes: int, measure: Measure) -> Trial:
    try:
        write = measure(question.candidate, nbytes)
    except (AutockptError, OSError) as error:
        return question.failed(str(error))
    return question.answered(
        seconds=write.seconds, cpu_s=write.cpu_s, stored_bytes=write.stored_bytes
    )
