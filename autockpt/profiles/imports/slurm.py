"""Jobs as Slurm's accounting has them: which were interrupted, and how long all of them ran.

    sacct -P -a -X -D -S now-90days -o JobID,State,ExitCode,Start,End,ElapsedRaw,NNodes,NodeList

Without -D a job that was queued again shows its last start alone, and the lost node is not there.
`FailedNode` is a field of newer versions only; a job on one node names that node by `NodeList`.

Every job is exposure, however it ends; some ends are interruptions:

        NODE_FAIL                 a node was lost: FailedNode or a NodeList of one names it
        FAILED, OUT_OF_MEMORY     processes died; nodes and their memory live
        PREEMPTED                 announced: exposure only, and counted in the notes
        COMPLETED, TIMEOUT, CANCELLED, DEADLINE, ...    exposure only

A job that fails in its first ten minutes is mostly a mistake in its script, and is left out with
its exposure.  One fleet's study has 73 % of all task failures there.

Source: sacct(1), "JOB STATE CODES" and the list of fields.
"""

from collections import Counter
from dataclasses import dataclass

from autockpt.profiles.imports.moments import iso_s
from autockpt.profiles.imports.node_list import expand
from autockpt.values.errors import ConfigError
from autockpt.values.failure import Exposure, FailureHistory, Incident, Kind

KINDS: dict[str, Kind] = {"NODE_FAIL": "node", "FAILED": "process", "OUT_OF_MEMORY": "process"}
NEVER_RAN = ("PENDING", "BOOT_FAIL", "REVOKED", "CONFIGURING")
EARLY_S = 600.0
"""A FAILED before this is taken for a mistake in the script."""
REQUIRED = ("State", "Start", "End")
MAX_NODES = 10**7
"""More in a row are a mistake in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    state: str
    exit_code: str
    begin_s: float
    end_s: float
    nodes: int
    failed: tuple[str, ...]


def recognises(text: str) -> bool:
    """A header of sacct's parsable output."""
    header = text.lstrip().split("\n", 1)[0].split("|")
    return len(header) > 2 and all(name in header for name in REQUIRED)


def read(text: str, *, where: str) -> FailureHistory:
    """The history of `sacct -P` (or -p).  Raises ConfigError with file:line for all malformed."""
    lines = [line for line in enumerate(text.splitlines(), start=1) if line[1].strip()]
    header = lines[0][1].split("|") if lines else []
    missing = [name for name in REQUIRED if name not in header]
    if missing or not {"NNodes", "NodeList"} & set(header):
        raise ConfigError(
            f"{where}:1: error: the header lacks {', '.join(missing) or 'NNodes or NodeList'}; ask "
            "sacct -P -X -D -o JobID,State,ExitCode,Start,End,ElapsedRaw,NNodes,NodeList"
        )
    jobs, skipped, wrong = [], Counter[str](), []
    for number, line in lines[1:]:
        try:
            job = _job(dict(zip(header, line.split("|"), strict=False)))
            if isinstance(job, str):
                skipped[job] += 1
            else:
                jobs.append(job)
        except ValueError as error:
            wrong.append(f"{where}:{number}: error: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong[:20]))
    if not jobs:
        raise ConfigError(f"{where}: no job in it ran; sacct needs -S and, for all users, -a")
    return _history(jobs, skipped, where)


def _job(row: dict[str, str]) -> _Job | str:
    """A job that ran, or why it is left out."""
    if not row.keys() >= set(REQUIRED):
        raise ValueError("fewer cells than the header has")
    state = (row["State"].split() or [""])[0]  # "CANCELLED by 1000"
    if "." in row.get("JobID", ""):
        return "steps of jobs"
    begin_s, end_s = iso_s(row["Start"]), iso_s(row["End"])
    if begin_s is None and row["Start"] not in ("Unknown", "None", ""):
        raise ValueError(f"Start {row['Start']!r}: expected 2026-01-31T12:00:00 or Unknown")
    if state in NEVER_RAN or begin_s is None:
        return "jobs that never ran"
    if end_s is None and row.get("ElapsedRaw", "").isdigit():
        end_s = begin_s + float(row["ElapsedRaw"])
    if end_s is None:
        return "running jobs; ask sacct for ElapsedRaw, and they are exposure"
    if end_s < begin_s:
        raise ValueError(f"ends at {row['End']}, before its start at {row['Start']}")
    if state == "FAILED" and end_s - begin_s < EARLY_S:
        return "FAILED in the first 10 min, taken for mistakes in scripts"
    return _Job(
        state=state,
        exit_code=row.get("ExitCode", ""),
        begin_s=begin_s,
        end_s=end_s,
        nodes=_nodes(row),
        failed=expand(row.get("FailedNode", "")) or _only_node(row),
    )


def _only_node(row: dict[str, str]) -> tuple[str, ...]:
    """The node of a job that had one; of several it is not known which was lost."""
    names = expand(row.get("NodeList", ""))
    return names if len(names) == 1 else ()


def _nodes(row: dict[str, str]) -> int:
    count = row.get("NNodes", "")
    if count.isdigit() and 0 < int(count) <= MAX_NODES:
        return int(count)
    names = expand(row.get("NodeList", ""))
    if not names:
        raise ValueError(f"NNodes {count!r} and NodeList {row.get('NodeList', '')!r}: no nodes")
    return len(names)


def _history(jobs: list[_Job], skipped: Counter[str], where: str) -> FailureHistory:
    jobs.sort(key=lambda job: job.end_s)
    notes = [f"{count} left out: {what}" for what, count in sorted(skipped.items())]
    preempted = sum(job.state == "PREEMPTED" for job in jobs)
    if preempted:
        notes.append(f"{preempted} preempted: announced, and not counted as failures")
    nameless = sum(job.state == "NODE_FAIL" and not job.failed for job in jobs)
    if nameless:
        notes.append(
            f"{nameless} lost nodes without a name: ask sacct for FailedNode, if it has it"
        )
    return FailureHistory(
        source=f"sacct, {where}: {len(jobs)} jobs",
        incidents=tuple(_incident(job) for job in jobs if job.state in KINDS),
        exposures=tuple(
            Exposure(
                begin_s=job.begin_s,
                end_s=job.end_s,
                node_s=job.nodes * (job.end_s - job.begin_s),
                job_s=job.end_s - job.begin_s,
            )
            for job in jobs
        ),
        notes=tuple(notes),
    )


def _incident(job: _Job) -> Incident:
    lost = job.failed if job.state == "NODE_FAIL" else ()
    return Incident(
        at_s=job.end_s,
        kind="nodes" if len(lost) > 1 else KINDS[job.state],
        nodes=lost,
        what=f"{job.state} {job.exit_code}".strip(),
    )
