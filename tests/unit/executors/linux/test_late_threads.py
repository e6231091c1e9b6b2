"""Work beside the end of a process, where Python may start no thread any more."""

import threading

import pytest

from autockpt.executors.linux import late_threads


def ran_on(name: str = "") -> str:
    """The name of the thread that ran some work, which fails in addition."""
    seen: list[str] = []
    done = threading.Event()

    def work() -> None:
        seen.append(threading.current_thread().name)
        done.set()
        if not name:
            raise KeyError("of the work")

    late_threads.start(work, name or "some work")
    assert done.wait(20)
    return seen[0]


def refuse(thread: threading.Thread) -> None:
    """As Python 3.12 does behind the script's last line."""
    raise RuntimeError("can't create new thread at interpreter shutdown")


def test_work_has_a_thread_of_its_own_while_there_may_be_one() -> None:
    """Of its name."""
    assert ran_on("autockpt-work") == "autockpt-work"


def test_a_thread_that_waits_takes_it_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after work that failed.  Threads are reserved once."""
    monkeypatch.setattr(late_threads, "is_needed", True)
    late_threads.reserve()
    count = threading.active_count()
    late_threads.reserve()
    assert threading.active_count() == count
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for _ in range(2 * late_threads.SPARE):
        assert ran_on() == "autockpt-spare"


def test_none_is_reserved_where_none_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is the caller's then."""
    monkeypatch.setattr(late_threads, "is_needed", False)
    monkeypatch.setattr(late_threads, "_spare", [])
    late_threads.reserve()
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="interpreter shutdown"):
        late_threads.start(list, "work")
