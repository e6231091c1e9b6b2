"""Tables as text: aligned for a terminal, or Markdown.  Pages have the macro `table` for HTML.

A table that is wider than the terminal wraps its columns of text.  Where even that does not fit,
each row becomes a block: one line for each column, behind the column's name.
"""

import sys
import textwrap
from collections.abc import Iterable, Sequence

GAP = "  "
NARROWEST = 12
"""Characters that a wrapped column has at least; fewer cannot be read."""

Row = Sequence[str]


def table(headers: Row, rows: Iterable[Row], *, width: int | None = None) -> list[str]:
    """Lines of a table, numbers to the right; `width` in characters, None: without a limit."""
    body = [list(row) for row in rows]
    if not body:
        return _wrapped(GAP.join(headers), width or sys.maxsize)
    numbers = [bool(body) and all(_is_number(row[i]) for row in body) for i in range(len(headers))]
    lines = [list(headers), *body]
    widths = _widths(lines)
    if width is not None:
        least = [
            wide if is_number else min(wide, max(NARROWEST, _longest_word(cells)))
            for cells, wide, is_number in zip(
                zip(*lines, strict=True), widths, numbers, strict=True
            )
        ]
        room = width - len(GAP) * (len(widths) - 1)
        if sum(least) > room:
            return _blocks(headers, body, width)
        _shrink(widths, least, room)
    return [text for line in lines for text in _aligned(line, widths, numbers)]


def columns(rows: Iterable[Row], *, width: int | None = None, indent: str = "") -> list[str]:
    """Lines of columns without headers, at most `width` wide where their words allow it.

    The last column wraps below itself, then the others do.  Where even that does not fit, each cell
    has lines of its own.
    """
    lines = [list(row) for row in rows]
    if not lines:
        return []
    widths = _widths(lines)
    if width is not None:
        room = width - len(indent) - len(GAP) * (len(widths) - 1)
        least = [
            min(wide, max(NARROWEST, _longest_word(cells)))
            for cells, wide in zip([*zip(*lines, strict=True)][:-1], widths, strict=False)
        ]
        last = min(NARROWEST, widths[-1])
        if least and sum(least) + last > room:
            return [f"{indent}{text}" for line in lines for text in _stacked(line, room)]
        others = widths[:-1]
        _shrink(others, least, room - last)
        widths = [*others, max(NARROWEST, room - sum(others))]
    numbers = [False] * len(widths)
    return [f"{indent}{text}" for line in lines for text in _aligned(line, widths, numbers)]


def markdown(headers: Row, rows: Iterable[Row]) -> list[str]:
    """Lines of a Markdown table; the cells are Markdown."""
    lines = ["".join(f" {cell} |" if cell else " |" for cell in line) for line in (headers, *rows)]
    return [f"|{line}" for line in (lines[0], "---|" * len(headers), *lines[1:])]


def _blocks(headers: Row, rows: Sequence[Row], width: int) -> list[str]:
    lines: list[str] = []
    for row in rows:
        named = [(head, cell) for head, cell in zip(headers, row, strict=True) if cell]
        lines += [*([""] if lines else []), *columns(named, width=width)]
    return lines


def _stacked(cells: Row, width: int) -> list[str]:
    """A row with a cell on each line, the first one before the others."""
    first, *more = [_wrapped(cell, max(NARROWEST, width)) for cell in cells if cell] or [[""]]
    return [*first, *(f"{GAP}{text}" for cell in more for text in cell)]


def _shrink(widths: list[int], least: Sequence[int], room: int) -> None:
    """Makes the columns with the most to give narrower, till all are in `room` characters."""
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda i: (widths[i] - least[i], widths[i]))
        widths[widest] -= 1


def _wrapped(text: str, width: int) -> list[str]:
    """Lines of a text; words stay whole, as names, options and paths are copied from them."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _aligned(line: Row, widths: Sequence[int], numbers: Sequence[bool]) -> list[str]:
    """A row as one line, or as several where a cell wraps."""
    cells = [
        _wrapped(cell, wide) if len(cell) > wide else [cell]
        for cell, wide in zip(line, widths, strict=True)
    ]
    texts = []
    for number in range(max(map(len, cells))):
        parts = [cell[number] if number < len(cell) else "" for cell in cells]
        padded = [
            part.rjust(wide) if to_right else part.ljust(wide)
            for part, wide, to_right in zip(parts, widths, numbers, strict=True)
        ]
        texts.append(GAP.join(padded).rstrip())
    return texts


def _widths(lines: Sequence[Row]) -> list[int]:
    return [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]


def _longest_word(cells: Iterable[str]) -> int:
    return max((len(word) for cell in cells for word in cell.split()), default=0)


def _is_number(cell: str) -> bool:
    return not cell or cell[0].isdigit() or cell in ("-", "?")
