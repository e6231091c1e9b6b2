"""In the keeper of a test: every write of a shard is noted in the file that WATCHED_STORE names.

The first ones wait for each other, WATCHED_WRITERS of them or MEET_S: as many as there are writers
meet.  STATED_ALIGNMENT is what every file states about direct I/O.  Python imports this module at
its start when its folder is on PYTHONPATH, so the keeper's own code is what runs.
"""

import fcntl
import json
import os
import threading

MEET_S = 0.5
_pwrite = os.pwrite
_meeting = threading.Condition()
_inside: set[str] = set()
_most = 0
_waited = 0


def _watched(fd: int, data: memoryview, at: int) -> int:
    global _most, _waited
    name = threading.current_thread().name
    wanted = int(os.environ["WATCHED_WRITERS"])
    with _meeting:
        _inside.add(name)
        _most = max(_most, len(_inside))
        _meeting.notify_all()
        if at and _waited < wanted:  # the page with the header comes alone, after all others
            _waited += 1
            _meeting.wait_for(lambda: _most >= wanted, MEET_S)
        note = {
            "path": os.readlink(f"/proc/self/fd/{fd}"), "at": at, "bytes": len(data),
            "direct": bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT), "together": _most,
        }  # fmt: skip
        with open(os.environ["WATCHED_STORE"], "a") as file:
            file.write(json.dumps(note) + "\n")
    try:
        return _pwrite(fd, data, at)
    finally:
        with _meeting:
            _inside.discard(name)


if "WATCHED_STORE" in os.environ:
    os.pwrite = _watched
if "STATED_ALIGNMENT" in os.environ:
    from autockpt.executors.linux import direct_io

    stated = int(os.environ["STATED_ALIGNMENT"])
    direct_io.stated_alignment = lambda descriptor: (stated, stated)
