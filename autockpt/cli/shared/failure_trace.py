"""Reads a trace of failures: a CSV of outages, one line each, all mistakes at once.

        node,start_h,end_h        the header; the unit of the times is s, h or d
        17,3.5,9.25               node 17 is out of service from 3.5 h to 9.25 h
        ,41.0,41.0                processes died, and no node's memory was lost

Lines that begin with # are comments.
"""

import csv
import math

from autockpt.tuner.simulation.history import Down
from autockpt.values.errors import ConfigError
from autockpt.values.units import DURATION_UNITS

UNITS = {unit: DURATION_UNITS[unit] for unit in ("s", "h", "d")}
MOST_SHOWN = 20


def read_trace(path: str, *, nodes: int | None) -> list[Down]:
    """The outages of a file.  Raises ConfigError with file:line for every malformed line."""
    try:
        with open(path, encoding="utf-8", newline="") as file:
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigError(f"--trace {path}: cannot be read: {reason}") from None
    lines = [
        (number, line)
        for number, line in enumerate(text.splitlines(), start=1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not lines:
        raise ConfigError(f"{path}:1: error: empty; expected the header node,start_h,end_h")
    number, header = lines[0]
    factor = _unit_s(f"{path}:{number}", header)
    downs, wrong = [], []
    for number, line in lines[1:]:
        try:
            downs.append(_down(line, factor, nodes))
        except ValueError as error:
            wrong.append(f"{path}:{number}: error: {error}")
    if wrong:
        more = [f"and {len(wrong) - MOST_SHOWN} more"] if len(wrong) > MOST_SHOWN else []
        raise ConfigError("\n".join([*wrong[:MOST_SHOWN], *more]))
    if not downs:
        raise ConfigError(f"{path}:{number}: error: no outage follows the header")
    return downs


def _unit_s(where: str, header: str) -> float:
    names = [cell.strip() for cell in next(csv.reader([header]))]
    for unit, factor in UNITS.items():
        if names == ["node", f"start_{unit}", f"end_{unit}"]:
            return factor
    raise ConfigError(
        f"{where}: error: header {','.join(names)!r}; expected node,start_U,end_U with U one of "
        f"{', '.join(UNITS)}"
    )


def _down(line: str, factor: float, nodes: int | None) -> Down:
    cells = [cell.strip() for cell in next(csv.reader([line]))]
    if len(cells) != 3:
        raise ValueError(f"{len(cells)} cells, expected 3: node, start, end")
    start_s, end_s = (
        _time(name, cell) * factor for name, cell in zip("se", cells[1:], strict=True)
    )
    if end_s < start_s:
        raise ValueError(f"ends at {cells[2]}, before its start at {cells[1]}")
    if not cells[0]:
        return Down(node=None, start_s=start_s, end_s=end_s)
    if not (cells[0].isascii() and cells[0].isdigit()):
        raise ValueError(f"node {cells[0]!r}: expected a number, or nothing for processes")
    node = int(cells[0])
    if nodes is not None and node >= nodes:
        raise ValueError(f"node {node}: the job has nodes 0 to {nodes - 1}")
    return Down(node=node, start_s=start_s, end_s=end_s)


def _time(name: str, cell: str) -> float:
    word = {"s": "start", "e": "end"}[name]
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{word} {cell!r}: expected a number") from None
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{word} {cell}: must be at least 0 and finite")
    return value
