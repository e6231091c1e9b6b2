"""Which texts can name a directory of checkpoints.  Only the text is looked at."""

import os
import re

MAX_NAME_BYTES = 255
"""Longest name within a directory, on every common file system."""
MAX_PATH_BYTES = 4095
"""Longest path that Linux takes."""

STORES = ("s3", "gs", "az", "file")
"""Schemes of object stores; `file` is a mounted directory."""

_EXAMPLES = "s3://bucket/run, gs://bucket/run or az://container/run"
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*):/")
_VARIABLE = re.compile(r"\$(\w+|\{\w+\})")


def is_store_url(path: str) -> bool:
    """Whether a text names a place in an object store: `s3://bucket/run`."""
    scheme, found, rest = path.partition("://")
    return bool(found) and scheme in STORES and bool(rest.strip("/"))


def url_problem(url: str) -> str:
    """Why `url` can be no place in an object store, and what to do; "" if it can be one."""
    scheme, found, rest = url.partition("://")
    if not found or scheme not in STORES or not rest.strip("/"):
        return f"expected {'://, '.join(STORES)}:// and a place there, e.g. s3://bucket/run-7"
    if "@" in rest.partition("/")[0] or "?" in rest:
        return "names a user or an option; keys and options stand in the environment"
    place = rest.strip("/") if scheme == "file" else rest.rstrip("/")
    if odd := [part for part in place.split("/") if part in ("", ".", "..")]:
        return f"has {odd[0]!r} between two slashes; write each part of the place once"
    return ""


def path_problem(path: str) -> str:
    """Why checkpoints can go neither to a directory `path` nor to a URL in an object store, and
    what to do; "" if they can."""
    if not path.strip():
        return "expected a directory, got an empty text"
    scheme = _SCHEME.match(path)
    if scheme and scheme[1].lower() == "file":
        return f"expected a directory, got the URL {path!r:.80}; write the path without file://"
    if is_store_url(path):
        problem = url_problem(path)
        return f"expected {_EXAMPLES}; the URL {problem}" if problem else ""
    if scheme:
        return f"expected a directory or a place in an object store, {_EXAMPLES}; got {path!r:.80}"
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
