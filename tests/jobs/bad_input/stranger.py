"""Another user of the machine, who tries to get at a keeper and at what it holds."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

STRANGER = 65534
"""`nobody`, where nothing says otherwise."""
PATIENCE_S = 20.0


def intrude(out: str, path: str, memory: list[str]) -> None:
    """What became of each attempt, to `out`/tried; the file is there before the rights go."""
    tried: dict[str, str] = {}
    with (Path(out) / "tried").open("w") as file:
        os.setgroups([])
        os.setresgid(STRANGER, STRANGER, STRANGER)
        os.setresuid(STRANGER, STRANGER, STRANGER)
        tried["socket"] = _ended(lambda: _talk(path))
        for name in memory:
            tried[name] = _ended(lambda name=name: os.close(os.open(name, os.O_RDONLY)))  # type: ignore[misc]
        json.dump(tried, file)


def _ended(attempt: Callable[[], object]) -> str:
    try:
        return str(attempt())
    except OSError as error:
        return type(error).__name__


def _talk(path: str) -> str:
    """Connects and asks nothing: what a keeper says to that."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(PATIENCE_S)
        sock.connect(path)
        return "closed" if sock.recv(1) == b"" else "answered"
