"""`CheckpointDirectory` keeps the store contract; containers of one machine share one."""

import subprocess
import sys
from pathlib import Path

import pytest

from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places.file_system import FileSystem
from autockpt.values.errors import DirectoryBusyError
from tests.contracts.directory_contract import DirectoryContract


def on_path(path: Path) -> CheckpointDirectory:
    """As each process makes its own."""
    return CheckpointDirectory(str(path))


class TestDirectory(DirectoryContract):
    """On a POSIX file system."""

    make = staticmethod(on_path)


HOLDER = """
import select, sys
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.places.file_system import FileSystem
directory = CheckpointDirectory(sys.argv[1])
print(directory.claim(directory.open(), "theirs", 0, force=False), flush=True)
while not select.select([sys.stdin], [], [], 0.1)[0]:
    directory.heartbeat(1)
"""


@pytest.mark.root
def test_a_run_in_another_container_of_this_machine_holds_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Same boot, and its pid is nobody here, or somebody else: its heart tells."""
    monkeypatch.setattr(FileSystem, "patience_s", 1.0)
    ours = CheckpointDirectory(str(tmp_path))
    run_id = ours.open()
    container = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    with subprocess.Popen(
        [*container, sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as holder:  # fmt: skip
        assert holder.stdout is not None
        assert holder.stdout.readline() == "1\n"
        with pytest.raises(DirectoryBusyError, match=r"launch theirs, keeper pid 1 on .* term 1"):
            ours.claim(run_id, "ours", 0, force=False)
        with pytest.raises(DirectoryBusyError, match="launch theirs"):
            ours.require_unheld()
        assert ours.holds(1)
        holder.communicate(timeout=30)
    assert ours.claim(run_id, "ours", 0, force=False) == 2
