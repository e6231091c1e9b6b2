"""Reads records of failures in the formats that there are, recognised by what stands in them."""

import os
from collections.abc import Callable
from dataclasses import replace

from autockpt.cli.shared.failure_trace import read_trace
from autockpt.profiles.failures import estimate_recovery, with_history
from autockpt.profiles.imports import own_log, slurm, xid
from autockpt.run_directory import RunDirectory, local_path
from autockpt.tuner.simulation.history import from_trace
from autockpt.values.errors import ConfigError
from autockpt.values.failure import Exposure, FailureHistory, Incident
from autockpt.values.profile import Profile
from autockpt.values.record import from_json

FORMATS = {
    "sacct": "Slurm's accounting, `sacct -P`",
    "xid": "a kernel log with NVIDIA Xid errors",
    "csv": "outages, a line each: node,start_h,end_h",
    "log": "failures.jsonl of a run",
    "kept": "what `autockpt failures --save` wrote",
}
RESTORES = ("restore_memory", "restore_disk")
LARGEST_BYTES = 512 * 2**20
"""A longer file is refused: it is read whole."""
_KEPT = '"incidents"'


def read_failures(
    path: str, *, form: str | None = None, nodes: int | None = None, observed_s: float | None = None
) -> FailureHistory:
    """The history in a file, or in the run directory of that name.

    `nodes` and `observed_s` say what a record does not: how many nodes it watched, and how long.
    A URL is that of the checkpoints of a run.
    Raises ConfigError where the file cannot be read, and for missing facts.
    """
    path = local_path(path)
    if os.path.isdir(path):
        run, path, form = RunDirectory(path), os.path.join(path, "failures.jsonl"), form or "log"
        if run.exists and not os.path.exists(path):
            return FailureHistory(
                source=f"failure log, {path}", incidents=(), exposures=(),
                notes=("this run met no failure; `autockpt profile` counts how long it trained",),
            )  # fmt: skip
        if not os.path.exists(path):
            raise ConfigError(
                f"{os.path.dirname(path)}: no record of failures in it (failures.jsonl); "
                "pass a run directory, or a file: a log of this program, sacct, Xid or CSV"
            )
    text = _text(path)
    form = form or _recognised(text, path)
    if observed_s is not None and form not in ("xid", "csv"):
        raise ConfigError(f"--observed: a record of the format {form} says itself how long it is")
    if form == "kept":
        return from_json(FailureHistory, text, where=path)
    if form == "sacct":
        return slurm.read(text, where=path)
    if form == "xid":
        return xid.read(text, where=path, nodes=nodes, observed_s=observed_s)
    if form == "log":
        return own_log.read(text, where=path, nodes=nodes or _nodes_of_run(path))
    return _outages(path, nodes, observed_s)


def with_failures_of(profile: Profile, path: str) -> Profile:
    """The same job, decided with this record beside what the profile knows.

    The log of a run of ours also says how long restarts and restores took.
    """
    path = local_path(path)
    profile = replace(profile, failures=with_history(profile.failures, read_failures(path)))
    if not os.path.isdir(path):
        return profile
    seen = estimate_recovery(RunDirectory(path).failures())
    parts = {name: getattr(seen, name) for name in ("detect", "restart", *RESTORES)}
    measured = {name: part for name, part in parts.items() if part.source == "measured"}
    return replace(profile, recovery=replace(profile.recovery, **measured))


def _nodes_of_run(path: str) -> int:
    """Of the run whose log this is; a log that was copied elsewhere is of one node."""
    info = RunDirectory(os.path.dirname(os.path.abspath(path))).read_info()
    return info.nodes if info is not None else 1


def _text(path: str) -> str:
    try:
        if os.path.getsize(path) > LARGEST_BYTES:
            raise ConfigError(f"{path}: larger than 512 MiB; pass a shorter stretch of time")
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; pass a record of failures"
        ) from None


def _recognised(text: str, path: str) -> str:
    if not text.strip():
        raise ConfigError(f"{path}: is empty; a record of failures has at least one line")
    tests: dict[str, Callable[[str], bool]] = {
        "kept": lambda text: text.startswith("{") and _KEPT in text,
        "log": own_log.recognises,
        "sacct": slurm.recognises,
        "csv": _is_csv,
        "xid": xid.recognises,
    }
    for form, recognises in tests.items():
        if recognises(text):
            return form
    known = "; ".join(f"{name} ({what})" for name, what in FORMATS.items())
    raise ConfigError(f"{path}: in no format that is known: {known}; name one with --format")


def _is_csv(text: str) -> bool:
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return next(lines, "").replace(" ", "").startswith("node,start_")


def _outages(path: str, nodes: int | None, observed_s: float | None) -> FailureHistory:
    """A trace of outages as a history: one cluster with one job on all of it."""
    downs = read_trace(path, nodes=nodes)
    named = [down.node for down in downs if down.node is not None]
    count = nodes or 1 + max(named, default=0)
    last_s = max(max(down.start_s, down.end_s) for down in downs)
    length_s = last_s if observed_s is None else observed_s
    if length_s < last_s:
        raise ConfigError(f"--observed: {path} has an outage at {last_s:g} s, later than that")
    history = from_trace(downs, nodes=count, spares=None, length_s=length_s + 1.0)
    notes = ["exposure is that of one job on all nodes, from 0 to " + f"{length_s / 86400:.3g} d"]
    if nodes is None:
        notes.append(f"{count} nodes, by the highest number; say --nodes if there are more")
    return FailureHistory(
        source=f"outages, {path}: {len(downs)} lines",
        incidents=tuple(
            Incident(
                at_s=failure.at_s,
                kind=("process", "node", "nodes")[min(2, len(failure.nodes))],
                nodes=tuple(map(str, failure.nodes)),
            )
            for failure in history.failures
        ),
        exposures=(Exposure(begin_s=0.0, end_s=length_s, node_s=count * length_s, job_s=length_s),),
        notes=tuple(notes),
    )
