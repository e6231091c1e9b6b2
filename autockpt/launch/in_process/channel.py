"""The connection between a launcher and the functions of its ranks.

The socket's name is in the abstract namespace: there is no file to clean up, and no path that is
too long.  Each end asks the kernel for the process of the other one.
"""

import os
import socket
from collections.abc import Mapping

from autockpt import new_files
from autockpt.launch import environment
from autockpt.launch.standby.channel import Channel


def listen(variables: Mapping[str, str]) -> socket.socket:
    """The launcher's socket.  Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(_name(variables))
        sock.listen(128)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def accept(listener: socket.socket) -> Channel | None:
    """The next connection; None: there is none."""
    try:
        sock, _ = listener.accept()
    except OSError:
        return None
    sock.setblocking(False)
    return Channel(sock)


def connect(variables: Mapping[str, str]) -> Channel | None:
    """The rank's end; None: the parent of this process is no launcher that restarts so."""
    launcher = variables.get(environment.LAUNCHER_PID, "")
    if not launcher.isdecimal() or int(launcher) != os.getppid():
        return None
    sock = new_files.socket_clear_of_scripts(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    channel = Channel(sock)
    try:
        sock.connect(_name(variables))
        if channel.peer() == int(launcher):
            return channel
    except OSError:
        pass
    sock.close()
    return None


def _name(variables: Mapping[str, str]) -> str:
    launch, launcher = variables[environment.LAUNCH_ID], variables[environment.LAUNCHER_PID]
    return f"\0autockpt-restarts-{launch}-{launcher}"
