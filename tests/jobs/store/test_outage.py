"""The store is away for a while, or forgets a key, while a real job trains on it."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from autockpt.executors.storage.catalogue import committed_names
from autockpt.values.generation import Generation
from tests.jobs.store.gate import Gate
from tests.jobs.store.test_run import PATIENCE_S, SCRIPT, URL, Machine, bare, machine, wait_for
from tests.unit.executors.storage.remote.test_remote import account, endpoint

__all__ = ["endpoint"]


@pytest.fixture
def gate(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """In front of the server; the environment names it."""
    one = Gate(endpoint)
    account(one.url, monkeypatch)
    yield one
    one.end()


def wait_until(true: Callable[[], object], said: Callable[[], str]) -> None:
    """Waits for a condition, and shows what the job has said where it never comes."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, said()
        time.sleep(0.1)


def kill_ranks(one: Machine) -> None:
    """SIGKILL for what trains and what is parked; launcher and keeper live."""
    assert one.job is not None
    for process in psutil.Process(one.job.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if SCRIPT.name in " ".join(process.cmdline()):
                process.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", ["SlowDown", "shut"])
def test_an_outage_costs_nothing_that_memory_holds(tmp_path: Path, gate: Gate, how: str) -> None:
    """A rank dies meanwhile and resumes from memory; then all is lost, and the store has the rest.

    The training goes on all the time, says what is wrong, and saves again when the store answers.
    """
    url = URL.format(f"outage-{how}")
    expected = {0: bare(tmp_path, steps=400)}
    with machine(tmp_path / "first", url) as first:
        first.start(steps=400, pace_s=0.1)
        before = wait_for(url, checkpoints=2)
        gate.code, gate.is_shut = ("SlowDown", False) if how == "SlowDown" else ("", True)
        wait_until(lambda: "no checkpoint reaches the" in first.said, lambda: first.said)
        kill_ranks(first)
        wait_until(lambda: "from memory" in first.said, lambda: first.said)
        assert first.is_running, first.said
        gate.code, gate.is_shut = "", False
        wait_until(lambda: committed_names(url)[-1] > before[-1], lambda: first.said)
        wait_until(lambda: "again, after" in first.said, lambda: first.said)
        first.lose()
    step = Generation.from_name(committed_names(url)[-1]).step
    with machine(tmp_path / "second", url) as second:
        second.start(steps=400, pace_s=0.0)
        assert second.finish() == expected
        assert f"resumed step {step} from disk" in second.said, second.said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_keys_that_are_renewed_in_the_file_reach_a_living_keeper(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is started again, and the checkpoints go to the store again."""
    url, file = URL.format("renewed"), tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write_key(file, "OLD")
    gate.key = "OLD"
    with machine(tmp_path / "first", url) as first:
        first.start(steps=300, pace_s=0.1)
        wait_for(url, checkpoints=1)
        gate.key = "NEW"
        wait_until(lambda: "ExpiredToken" in first.said, lambda: first.said)
        write_key(file, "NEW")
        before = committed_names(url)
        wait_until(lambda: committed_names(url)[-1] > before[-1], lambda: first.said)
        first.end()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_next_start_brings_new_keys_to_the_keeper_of_the_last(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher and its rank are killed; the keeper lives, with keys that have expired."""
    url = URL.format("brought")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "OLD")
    gate.key = "OLD"
    with machine(tmp_path / "first", url) as first:
        first.start(steps=200, pace_s=0.1)
        wait_for(url, checkpoints=1)
        gate.key = "NEW"
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "NEW")
        wait_until(lambda: "ExpiredToken" in first.said, lambda: first.said)
        assert first.job is not None
        first.job.kill()
        first.job.wait(PATIENCE_S)
        before = committed_names(url)[-1]
        first.start(steps=200, pace_s=0.0)
        assert first.finish() == {0: bare(tmp_path, steps=200)}
        assert "from memory" in first.said, first.said
        assert committed_names(url)[-1] > before


def write_key(file: Path, key: str) -> None:
    """The credentials file with one key, in place of the one before."""
    fresh = file.with_name("new")
    fresh.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = hush\n")
    fresh.replace(file)
