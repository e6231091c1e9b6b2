"""A rank is killed, and the others run their function again without a new process.

Each iteration begins as in a run that nobody disturbed, and so does the end.
"""

import os
import random
import re
from pathlib import Path

import pytest

from tests.jobs.kill.restartable import Death, deaths, job, require_exact

SEED = int(os.environ.get("KILL_SEED", "5"))
KILLS = int(os.environ.get("KILLS", "20"))


@pytest.mark.timeout(280)
def test_survivors_go_on_in_their_processes(tmp_path: Path) -> None:
    """Of four ranks that sum gradients in small buckets, when one dies while it sums them.

    They have the variables and the output of the new start.  What they train again is the same.
    """
    death = Death(rank=1, place="backward", step=21)
    with job(tmp_path / "job", 40, ranks=4, deaths=[death]) as killed:
        killed.finish()
    starts = [killed.starts(rank) for rank in range(4)]
    kinds = [[start["process"] for start in one] for one in starts]
    assert kinds == [["new", "same"], ["new", "new"], ["new", "same"], ["new", "same"]]
    assert [one[0]["pid"] == one[1]["pid"] for one in starts] == [True, False, True, True]
    for rank in range(4):
        seen: dict[str, list[str]] = {}
        for step, _, *began in killed.rows(rank):
            assert seen.setdefault(step, began) == began, (rank, step)
        assert list(seen) == [*map(str, range(40)), "end"]
    assert "rank 0, 2, 3 in its own process" in killed.said()
    logs = sorted(killed.run.glob("logs/*-attempt-*/rank-00002.out"))
    assert [path.read_text() for path in logs] == ["", "rank 2 is done in call 2\n"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_survivors_of_all_nodes_go_on_in_their_processes(tmp_path: Path) -> None:
    """Two launchers with two ranks each; first a rank of one node dies, then one of the other."""
    deaths = [Death(rank=3, place="backward", step=21), Death(rank=0, place="forward", step=42)]
    with job(tmp_path / "a", 60, ranks=4) as whole:
        whole.finish()
    with job(tmp_path / "b", 60, ranks=4, nodes=2, deaths=deaths) as killed:
        killed.finish()
    require_exact(killed, whole)
    assert "rank 2 in its own process" in killed.said()
    kinds = [[start["process"] for start in killed.starts(rank)] for rank in range(4)]
    assert kinds == [["new", "same", "new"], *[["new", "same", "same"]] * 2, ["new", "new", "same"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_survivors_of_a_lost_launcher_go_on_with_its_replacement(tmp_path: Path) -> None:
    """Whose ranks are new; the others have a process of either kind, and train the same."""
    with job(tmp_path / "a", 60, ranks=4) as whole:
        whole.finish()
    with job(tmp_path / "b", 60, ranks=4, nodes=2) as killed:
        killed.wait(lambda: killed.step() >= 20, "step 20")
        killed.replace_launcher(1)
        killed.finish()
    require_exact(killed, whole)
    assert all(len(killed.starts(rank)) == 2 for rank in range(4))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_is_left_by_the_function_forces_a_new_process(tmp_path: Path) -> None:
    """A thread, which is named once."""
    with job(tmp_path / "a", 60) as whole:
        whole.finish()
    with job(tmp_path / "b", 60, leaves="thread") as killed:
        for step in (10, 30):
            killed.wait(lambda s=step: killed.step() >= s, f"step {step}")  # type: ignore[misc]
            killed.kill(1)
        killed.finish()
    require_exact(killed, whole)
    assert [start["process"] for start in killed.starts(0)] == ["new"] * 3
    reason = "its function has left a thread, loads-data"
    assert [start["new_process_reason"] for start in killed.starts(0)] == ["", reason, reason]
    assert killed.said().count(f"rank 0 goes on in a new process: {reason}") == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [3, 4])
def test_twenty_kills_end_in_the_state_of_an_undisturbed_run(tmp_path: Path, ranks: int) -> None:
    """At random instants of every part of the script; survivors go on in their processes.

    Replay: KILL_SEED=N pytest tests/jobs/kill/test_in_process.py
    """
    planned = deaths(random.Random(SEED), ranks, KILLS)
    steps = max(death.step for death in planned) + 10
    with job(tmp_path / "a", steps, ranks=ranks) as whole:
        whole.finish()
    with job(tmp_path / "b", steps, ranks=ranks, standby="on", deaths=planned) as killed:
        killed.finish(1200)
    require_exact(killed, whole)
    told = re.findall(
        r"rank (\d) was killed by .*\(restart \d+\)(?:; rank (.*) in)?", killed.said()
    )
    assert [int(dead) for dead, _ in told] == [death.rank for death in planned]
    for number, (dead, survivors) in enumerate(told[:-1]):  # at the last one functions have ended
        died_ns = (killed.folder / f"death-{number}").stat().st_mtime_ns
        for rank in set(range(ranks)) - {int(dead)}:
            # A process that has not come to its function cannot go on in it.
            begun = killed.folder / f"begun-{number}-{rank}"
            late = not begun.exists() or begun.stat().st_mtime_ns > died_ns
            said = [line for line in killed.said().splitlines() if line.startswith("autockpt:")]
            # gloo does not end the wait for a rank that has died within a message.
            stood = any(f"rank {rank} goes on in a new process: it stood in" in one for one in said)
            goes_on = str(rank) in survivors.split(", ")
            assert late or stood or goes_on, (number, rank, "\n".join(said))
