"""Which texts can name a directory of checkpoints.  Only the text is looked at."""

import os
import re

MAX_NAME_BYTES = 255
"""Longest name within a directory, on every common file system."""
MAX_PATH_BYTES = 4095
"""Longest path that Linux takes."""

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def path_problem(path: str) -> str:
    """Why `path` can be no directory of checkpoints, and what to do; "" if it can be one."""
    if not path.strip():
        return "expected a directory, got an empty text"
    scheme = _SCHEME.match(path)
    if scheme and scheme[1].lower() == "file":
        return f"expected a directory, got the URL {path!r:.80}; write the path without file://"
    if scheme:
        return (
            f"expected a mounted directory, got the URL {path!r:.80}; for copies of good "
            "checkpoints in an object store set remote.url"
        )
    variable = _VARIABLE.search(path)
    if variable:
        return (
            f"expected a directory, got the variable {variable[0]} in {path!r:.80}, which nothing "
            "fills in; write the path itself"
        )
    if any(sign < " " or sign == "\x7f" for sign in path):
        return f"expected a directory, got a path with control characters: {path!r:.80}"
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return f"expected a directory, got text that no file name can hold: {path!r:.80}"
    longest = max((os.fsencode(name) for name in path.split("/")), key=len)
    if len(longest) > MAX_NAME_BYTES:
        return (
            f"expected names of at most {MAX_NAME_BYTES} bytes, got one of {len(longest)} bytes "
            f"in {path!r:.80}"
        )
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        return f"expected at most {MAX_PATH_BYTES} bytes, got {len(os.fsencode(path))}"
    return ""
