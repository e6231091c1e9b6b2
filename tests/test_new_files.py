"""Modes of what a run writes, under a umask of 0: nothing that another user could write."""

import contextlib
import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autockpt import new_files
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import Goal


@contextlib.contextmanager
def umask(value: int) -> Iterator[None]:
    """Of this process, for a while."""
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path: str | Path) -> int:
    """Permission bits."""
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_modes_are_set_whatever_the_umask_is(tmp_path: Path) -> None:
    """Also those of the parents that are made on the way; what exists keeps its own."""
    with umask(0):
        new_files.make_directory(tmp_path / "a" / "b", new_files.PRIVATE_DIRECTORY)
        new_files.make_directory(tmp_path / "a" / "c")
        new_files.make_directory(tmp_path / "a" / "b")
        with open(tmp_path / "private", "w", opener=new_files.private):
            pass
        with open(tmp_path / "readable", "w", opener=new_files.readable):
            pass
    names = ("a", "a/b", "a/c", "private", "readable")
    assert [mode(tmp_path / name) for name in names] == [0o755, 0o700, 0o755, 0o600, 0o644]


def test_a_umask_may_take_rights_away(tmp_path: Path) -> None:
    """Who wants nobody to read gets that."""
    with umask(0o077):
        new_files.make_directory(tmp_path / "a")
        with open(tmp_path / "readable", "w", opener=new_files.readable):
            pass
    assert (mode(tmp_path / "a"), mode(tmp_path / "readable")) == (0o700, 0o600)


def test_a_directory_that_cannot_be_made_is_an_error_of_the_system(tmp_path: Path) -> None:
    """A file in the way, a dangling link, a place where nothing can be made."""
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(FileExistsError, match="File exists"):
        new_files.make_directory(tmp_path / "file")
    with pytest.raises(NotADirectoryError, match="Not a directory"):
        new_files.make_directory(tmp_path / "file" / "below")
    with pytest.raises(FileNotFoundError, match="No such file"):
        new_files.make_directory(tmp_path / "link")
    with pytest.raises(FileNotFoundError, match="No such file"):
        new_files.make_directory("/proc/nothing/below")


def test_what_a_library_made_is_closed_to_others(tmp_path: Path) -> None:
    """Links are not followed."""
    with umask(0):
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "file").touch()
        (tmp_path / "elsewhere").touch()
        (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    new_files.close_to_others(tmp_path / "a")
    new_files.close_to_others(tmp_path / "missing")
    names = ("a", "a/file", "elsewhere")
    assert [mode(tmp_path / name) for name in names] == [0o755, 0o644, 0o666]


def test_a_run_under_a_umask_of_zero_opens_nothing(
    new_run: Callable[..., str], attach: Callable[..., Any]
) -> None:
    """Directories, records, telemetry, logs, checkpoints; goals and telemetry are nobody else's."""
    path = new_run()
    os.chmod(path, 0o755)
    with umask(0):
        run = RunDirectory.create(path)
        run.write_goal(Goal())
        run.write_text("report.html", "<html>")
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        session = attach(model=model, optimizer=optimizer, run_dir=path)
        for _ in session.steps(20):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        session.close()
    found = {str(p.relative_to(path)): mode(p) for p in Path(path).rglob("*")}
    assert {name: oct(bits) for name, bits in found.items() if bits & 0o022} == {}
    closed = ("goal.json", "telemetry", "logs", "controller", "failures.jsonl")
    private = {name: bits for name, bits in found.items() if name.startswith(closed)}
    assert len(private) >= 5
    assert {name: oct(bits) for name, bits in private.items() if bits & 0o077} == {}
    assert found["report.html"] == 0o644
    assert any(name.endswith("COMMIT") for name in found)


def test_a_descriptor_keeps_clear_of_scripts_where_the_limit_lets_it(tmp_path: Path) -> None:
    """A small limit of open files leaves the number; what is high already stays."""
    path = os.fspath(tmp_path / "long")
    descriptor = new_files.private_for_long(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC)
    try:
        assert descriptor >= new_files.FIRST_CLEAR_DESCRIPTOR
        assert not os.get_inheritable(descriptor)
        assert new_files.clear_of_scripts(descriptor) == descriptor
    finally:
        os.close(descriptor)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        low = os.open(path, os.O_RDONLY)
        assert new_files.clear_of_scripts(low) == low
        os.close(low)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
