"""Slurm's lists of nodes: `node[001-004,7],gpu5` are six names.

Source: slurm.schedmd.com, "hostlist expressions": a comma between names, and in brackets numbers
and ranges, whose leading zeros count; several brackets in one name multiply.
"""

import itertools
import re

MOST_NODES = 100_000
"""More than the largest cluster; a mistyped range would fill the memory."""

_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


def expand(text: str) -> tuple[str, ...]:
    """The names of a list, in its order; "" and Slurm's "None assigned" are none.

    Raises ValueError where brackets or ranges are wrong.
    """
    text = text.strip()
    if not text or text.lower() in ("none assigned", "none", "(null)", "unknown"):
        return ()
    names: list[str] = []
    for word in _words(text):
        names += _names(word)
        if len(names) > MOST_NODES:
            raise ValueError(f"node list {text[:40]!r}: more than {MOST_NODES} nodes")
    return tuple(names)


def _words(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    words, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"node list {text[:40]!r}: brackets do not match")
        if letter == "," and not depth:
            words.append("")
        else:
            words[-1] += letter
    if depth or not all(words):
        raise ValueError(f"node list {text[:40]!r}: brackets do not match or a name is empty")
    return words


def _names(word: str) -> list[str]:
    parts = [
        [plain] if plain else list(itertools.chain.from_iterable(map(_range, ranges.split(","))))
        for ranges, plain in _PART.findall(word)
    ]
    count = 1
    for part in parts:
        count *= len(part)
    if count > MOST_NODES:
        raise ValueError(f"node list {word[:40]!r}: more than {MOST_NODES} nodes")
    return ["".join(pieces) for pieces in itertools.product(*parts)]


def _range(text: str) -> list[str]:
    found = _RANGE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"node range {text!r}: expected 7 or 001-004")
    first, last = int(found[1]), int(found[2] or found[1])
    if not first <= last or last - first > MOST_NODES:
        raise ValueError(f"node range {text!r}: ends before it begins, or is too long")
    return [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
