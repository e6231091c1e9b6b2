"""In the keeper of a test: a host with room for as many bytes of slots as stand in the file that
TIGHT_HOST names, whoever holds them, the keeper or the trainer TIGHT_HOST_TRAINER.

Python imports this module at its start when its folder is on PYTHONPATH, so the keeper's own code
is what runs.
"""

import contextlib
import os

_SLOT = "/memfd:autockpt-r"


def held_bytes(*pids: int) -> int:
    """Of slots that these processes have mapped or hold a descriptor of."""
    found: dict[int, int] = {}
    for pid in pids:
        mapped: dict[int, int] = {}
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="ascii") as maps:
            for line in maps:
                if _SLOT in line:
                    span, _, _, _, inode, *_ = line.split()
                    low, high = (int(end, 16) for end in span.split("-"))
                    mapped[int(inode)] = mapped.get(int(inode), 0) + high - low
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                with contextlib.suppress(OSError):
                    if os.readlink(path).startswith(_SLOT):
                        mapped[os.stat(path).st_ino] = os.stat(path).st_size
        found |= {inode: max(size, found.get(inode, 0)) for inode, size in mapped.items()}
    return sum(found.values())


def _tight() -> None:
    from autockpt.executors.keeper import slots
    from autockpt.executors.linux import memory

    def headroom() -> memory.Headroom:
        with open(os.environ["TIGHT_HOST"], encoding="ascii") as file:
            room = int(file.read())
        left = room - held_bytes(os.getpid(), int(os.environ["TIGHT_HOST_TRAINER"]))
        return memory.Headroom(available_bytes=left, binding="the test")

    memory.headroom = slots.headroom = headroom
    memory.reserve_bytes = lambda left, *, swing_bytes=0: 0


if "TIGHT_HOST" in os.environ:
    _tight()
