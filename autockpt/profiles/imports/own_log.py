"""Our own failure log, `failures.jsonl` of a run: one FailureRecord a line and node."""

import json
import math

from autockpt.values.errors import ConfigError
from autockpt.values.failure import (
    Exposure,
    FailureHistory,
    FailureRecord,
    Incident,
    Kind,
    interruptions,
    lost_nodes,
)
from autockpt.values.record import from_json


def recognises(text: str) -> bool:
    """The first line is a record of ours."""
    first = text.lstrip().split("\n", 1)[0]
    return first.startswith("{") and '"exposure_s"' in first


_BEGIN = '{"schema_version"'


def _behind_fragment(line: str) -> str:
    """The record that a new process has appended to a torn one; else the line as it is."""
    begin = line.rfind(_BEGIN)
    return line[begin:] if begin > 0 else line


def _is_whole(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def read(text: str, *, where: str, nodes: int) -> FailureHistory:
    """The history of a log; times are training time.  Raises ConfigError for a foreign line.

    The log has no training after its last failure; the run's telemetry, which `autockpt profile`
    reads beside it, does.  A crash may have torn the last line: it is left out.
    """
    records, lines = [], text.splitlines()
    for number, read in enumerate(lines, start=1):
        is_last = number == len(lines) and not text.endswith("\n")
        line = read if _is_whole(read) else _behind_fragment(read)
        if not line.strip() or (is_last and not _is_whole(line)):
            continue
        record = from_json(FailureRecord, line, where=f"{where}:{number}")
        if not 0 <= record.exposure_s < math.inf:
            raise ConfigError(
                f"{where}:{number}: exposure_s {record.exposure_s}: must be >= 0 and finite"
            )
        records.append(record)
    incidents, exposures, now_s, of_script = [], [], 0.0, 0
    for record, lost in zip(interruptions(records), lost_nodes(records), strict=True):
        begin_s, now_s = now_s, now_s + record.exposure_s
        if record.kind == "script":
            of_script += 1
        else:
            names = tuple(f"node {number}" for number in lost)
            kind: Kind = "nodes" if len(names) > 1 else record.kind
            incidents.append(Incident(at_s=now_s, kind=kind, nodes=names, what=record.what))
        exposures.append(
            Exposure(
                begin_s=begin_s,
                end_s=now_s,
                node_s=nodes * record.exposure_s,
                job_s=record.exposure_s,
            )
        )
    return FailureHistory(
        source=f"failure log, {where}",
        incidents=tuple(incidents),
        exposures=tuple(exposures),
        notes=(
            "the training after the last failure is not in a failure log",
            *([f"{of_script} ended by an exception of the script do not count"] * (of_script > 0)),
        ),
    )
