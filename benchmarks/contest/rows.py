"""From what was measured to the rows of the table.  Pure."""

import statistics
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.contest.schedule import Taken
from benchmarks.harness import Row, bootstrap_upper, quantile, row
from benchmarks.peers.registry import Entry

OURS = "autockpt"
EVERY, MEMORY_ONLY = "autockpt every iteration", "autockpt memory only"
NONE, PLAIN = "none", "plain write"
UPPER_TARGET, PEER_SHARE_TARGET = 1.03, 0.25
STALL_MEDIAN_TARGET, STALL_P95_TARGET = 0.01, 0.03
DURABLE_TARGET, CPU_TARGET, EVERY_TARGET, MEMORY_TARGET_MIB = 1.15, 1.5, 2.2, 64.0
NOISE = 0.005
"""Excess over 1 below which a peer's end-to-end says nothing, and a ratio to it even less."""


def contest_rows(
    entries: Iterable[Entry], taken: Mapping[str, Taken], iterations: int
) -> list[Row]:
    """One checkpoint per segment: all contestants, then what holds ours against the others."""
    chosen = [entry for entry in entries if entry.name in taken]
    rows: list[Row] = []
    for entry in chosen:
        rows += _contestant(entry, taken, iterations)
    if OURS in taken and taken[OURS].rounds:
        rows.append(peer_share(chosen, taken))
        rows += memory_row(taken)
    return rows


def _contestant(entry: Entry, taken: Mapping[str, Taken], iterations: int) -> list[Row]:
    mine = taken[entry.name]
    if not mine.rounds:
        reason = mine.failed or "no round"
        return [Row(contestant=entry.name, figure="end-to-end", value=None, unit="x", n=0,
                    note=reason)]  # fmt: skip
    rows = end_to_end(entry.name, mine)
    if entry.name != NONE:
        rows += _stalls(entry.name, mine)
        rows += _durable(entry.name, mine, taken.get(PLAIN))
        rows += _cpu(entry.name, mine, taken.get(PLAIN), iterations)
        rows += _loaded(entry.name, mine)
    rows.append(row(entry.name, "foreign CPUs", mine.values("foreign"), ""))
    return rows


def end_to_end(name: str, mine: Taken, figure: str = "end-to-end") -> list[Row]:
    """Time with over time without, of pairs; the bound is of their median."""
    ratios, ours = mine.values("ratio"), name == OURS
    limit = UPPER_TARGET if ours else None
    upper = row(name, f"{figure}, upper 95 %", ratios, "x", at_most=limit,
                statistic=bootstrap_upper)  # fmt: skip
    rows = [row(name, figure, ratios, "x", note=mine.failed), upper]
    pairs, figure = iteration_pairs(mine), f"{figure}, iterations"
    if not pairs:
        return rows
    value, bound = typical_ratio(pairs), bootstrap_upper(pairs, statistic=typical_ratio)
    spread = (min(map(min, pairs)), max(map(max, pairs)))
    met = None if limit is None else bound <= limit
    rows.append(Row(contestant=name, figure=figure, value=value, unit="x", spread=spread,
                    n=len(pairs)))  # fmt: skip
    rows.append(Row(contestant=name, figure=f"{figure}, upper 95 %", value=bound, unit="x",
                    n=len(pairs), target="" if limit is None else f"<= {limit:g}",
                    met=met))  # fmt: skip
    return rows


def iteration_pairs(mine: Taken) -> list[tuple[float, ...]]:
    """By round: each iteration of the segment with a checkpoint over a usual one without."""
    return [
        tuple(one / statistics.median(each["bare_iterations"]) for one in each["iterations"])
        for each in mine.rounds.values()
        if "iterations" in each
    ]


def typical_ratio(pairs: Sequence[tuple[float, ...]]) -> float:
    """The mean over a segment of the medians of its first, second, ... iterations.

    An iteration in ten is half as long again for reasons of the machine.  Such ones outweigh a
    checkpoint in the sum of a segment, and hardly move a median.  What a checkpoint blocks now and
    then does not move it either: that is what the stalls' p95 is for.
    """
    return statistics.fmean(statistics.median(place) for place in zip(*pairs, strict=True))


def _stalls(name: str, mine: Taken) -> list[Row]:
    shares, ours = mine.values("stall_share"), name == OURS
    return [
        row(name, "stall", [s * 1e3 for s in mine.values("stall")], "ms"),
        row(name, "stall/iteration", shares, "x", at_most=STALL_MEDIAN_TARGET if ours else None),
        row(name, "stall/iteration, p95", shares, "x", at_most=STALL_P95_TARGET if ours else None,
            statistic=lambda samples: quantile(samples, 0.95)),
        row(name, "slow-down beside the stall", mine.values("slowdown"), "x"),
    ]  # fmt: skip


def _durable(name: str, mine: Taken, plain: Taken | None) -> list[Row]:
    rows = [row(name, "durable", mine.values("durable"), "s")]
    ratios = paired(mine, plain, "durable") if plain and plain.rounds else []
    limit = DURABLE_TARGET if name == OURS else None
    return [*rows, row(name, "durable/plain write", ratios, "x", at_most=limit)]


def _cpu(name: str, mine: Taken, plain: Taken | None, iterations: int) -> list[Row]:
    seconds = mine.values("cpu")
    rows = [row(name, "CPU per checkpoint", seconds, "s")]
    if plain and plain.rounds:
        least = statistics.median(plain.values("copy_cpu")) + statistics.median(
            plain.values("write_cpu")
        )
        limit = CPU_TARGET if name == OURS else None
        rows.append(row(name, "CPU/(copy + write)", [s / least for s in seconds], "x",
                        at_most=limit))  # fmt: skip
    bounds = [1 + one["cpu"] / (iterations * one["iteration"]) for one in mine.rounds.values()]
    return [*rows, row(name, "1 + CPU/(k iterations)", bounds, "x")]


def _loaded(name: str, mine: Taken) -> list[Row]:
    if not mine.check:
        return []
    names = mine.check["torn"]
    torn = f"{len(names)} tensors differ from what was saved, first {names[0]}" if names else ""
    return [
        row(name, "load, cold", [mine.check["load_s"]], "s"),
        row(name, "exact", [float(not names)], "", note=torn),
    ]


def paired(mine: Taken, other: Taken, key: str) -> list[float]:
    """Ratios within a turn where both took part in it, else to the other's median."""
    usual = statistics.median(other.values(key))
    return [
        one[key] / (other.rounds[turn][key] if turn in other.rounds else usual)
        for turn, one in mine.rounds.items()
    ]


def peer_share(entries: Sequence[Entry], taken: Mapping[str, Taken]) -> Row:
    """Our end-to-end excess, by iterations, over that of the best peer that makes durable.

    Torn ones compete: it can only be harder for us.
    """
    figure = "(ours - 1)/(best peer - 1)"
    found = {
        entry.name: typical_ratio(iteration_pairs(taken[entry.name]))
        for entry in entries
        if entry.kind in ("sync", "async") and entry.durable and taken[entry.name].rounds
    }  # fmt: skip
    if not found:
        return row(OURS, figure, [], "x", at_most=PEER_SHARE_TARGET, note="no peer ran")
    best = min(found, key=lambda name: found[name])
    excess = found[best] - 1
    if excess <= NOISE:
        return row(OURS, figure, [], "x", at_most=PEER_SHARE_TARGET,
                   note=f"{best} costs {excess:.2%}: within the noise")  # fmt: skip
    ours = typical_ratio(iteration_pairs(taken[OURS])) - 1
    note = f"best peer: {best}, {found[best]:.3f}"
    return row(OURS, figure, [ours / excess], "x", at_most=PEER_SHARE_TARGET, note=note)


def memory_row(taken: Mapping[str, Taken]) -> list[Row]:
    """Memory of trainer and keeper beyond slots x state and beyond a run without us."""
    mine, none = taken[OURS], taken.get(NONE)
    if not mine.resident_bytes or none is None or not none.resident_bytes:
        return []
    slots = len(mine.slots_bytes) * mine.state_bytes
    beyond = mine.resident_bytes - slots - none.resident_bytes
    note = f"{len(mine.slots_bytes)} slots; proportional set sizes"
    return [row(OURS, "memory beyond slots x state", [beyond / 2**20], "MiB",
                at_most=MEMORY_TARGET_MIB, note=note)]  # fmt: skip


def every_rows(entries: Iterable[Entry], taken: Mapping[str, Taken]) -> list[Row]:
    """A checkpoint at every iteration: the blocking writers, ours, and ours in memory alone."""
    rows: list[Row] = []
    best: dict[str, float] = {}
    for entry in entries:
        mine = taken.get(entry.name)
        if mine is None:
            continue
        figure = "every iteration"
        rows.append(row(entry.name, figure, mine.values("ratio"), "x", note=mine.failed))
        if mine.rounds and entry.kind == "sync":
            best[entry.name] = statistics.median(mine.values("ratio"))
        if mine.rounds and entry.kind == "ours":
            rows += _really_saved(entry.name, mine)
    if best and EVERY in taken and taken[EVERY].rounds:
        rows += _gain(best, taken[EVERY])
    return rows


def _gain(best: Mapping[str, float], mine: Taken) -> list[Row]:
    """The blocking writer with the smallest ratio over ours, and the same for what was saved."""
    name = min(best, key=lambda one: best[one])
    gains = [best[name] / ratio for ratio in mine.values("ratio")]
    share = mine.saved.get("disk", 0) / max(1, mine.asked)
    note = f"best blocking writer: {name}, {best[name]:.3f}; of ours {share:.0%} became durable"
    figure = "best blocking writer/ours"
    return [
        row(EVERY, figure, gains, "x", at_least=EVERY_TARGET, note=note),
        row(EVERY, f"{figure}, per durable one", [share * gain for gain in gains], "x"),
    ]


def _really_saved(name: str, mine: Taken) -> list[Row]:
    """Of the checkpoints asked for, those that were made: the rest was skipped, not slow."""
    shares = {"saved to memory": "memory", "saved to disk": "disk"}
    note = f"of {mine.asked} asked for: " + ", ".join(f"{v} {k}" for k, v in mine.saved.items())
    return [
        row(name, figure, [mine.saved.get(key, 0) / max(1, mine.asked)], "share", note=note)
        for figure, key in shares.items()
        if not (key == "disk" and name == MEMORY_ONLY)
    ]
