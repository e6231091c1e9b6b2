"""Every pattern of lost nodes: within the placement's tolerance nothing that was protected is lost.

One job loses one pattern after the other.  What came back is compared to the bit with a training
that nobody disturbed, in the end.
"""

import itertools
from collections.abc import Sequence

import pytest

from autockpt.values.placement import place
from autockpt.values.redundancy import Redundancy
from tests.jobs.nodes.conftest import MakeJob
from tests.jobs.nodes.network_job import NetworkJob

STEPS_EACH = 60
TWO_COPIES = Redundancy(scheme="replicas", copies=2, placement="mixed")
THREE_COPIES = Redundancy(scheme="replicas", copies=3, placement="mixed")
XOR = Redundancy(scheme="xor", set_size=4, parity=1)
TWO_OF_FIVE = Redundancy(scheme="rs", set_size=5, parity=2)

Pattern = tuple[int, ...]


def patterns(nodes: int, most: int) -> list[Pattern]:
    """All sets of up to `most` nodes."""
    return [p for k in range(1, most + 1) for p in itertools.combinations(range(nodes), k)]


def lose_in_turn(job: NetworkJob, redundancy: Redundancy, losses: Sequence[Pattern]) -> None:
    """Trains, loses, recovers; checks after every loss what the placement promises."""
    placement = place(redundancy, job.count)
    job.start(STEPS_EACH)
    began = 0
    for number, pattern in enumerate(losses, start=1):
        job.wait(lambda began=began: job.newest("GenerationReplicated") > began + 12, "protection")
        job.wait(lambda began=began: job.newest("CheckpointDurable") > began, "a durable one")
        job.lose(pattern)
        promised = job.newest("GenerationReplicated")
        durable = job.newest("CheckpointDurable")
        job.start(STEPS_EACH * (number + 1))
        restored = job.restored()
        began = restored[0]["step"]
        kinds = [event["source"] for event in restored]
        if placement.survives(pattern):
            # A rebuild reads several states: where the same generation is durable, it is read.  So
            # is one that became durable before the copies of it were complete.
            far = {"parity"} if redundancy.parity else {"peer"}
            far |= {"disk"} if redundancy.parity or began > promised else set()
            for rank, kind in enumerate(kinds):
                wanted = far if rank in pattern else {"memory"}
                assert kind in wanted, (pattern, restored, job.tale())
            assert began >= promised, (pattern, began, promised, job.tale())
        else:
            # What no memory holds is read; the rest of that generation may be in memory still.
            assert "disk" in kinds or began >= promised, (pattern, kinds, job.tale())
            assert began >= durable, (pattern, began, durable, job.tale())
    assert job.finish() == job.undisturbed(), job.tale()


@pytest.mark.root
@pytest.mark.timeout(120)
def test_one_of_four_nodes_is_lost_and_comes_back_from_its_partner(new_job: MakeJob) -> None:
    """Two copies, real interfaces between the nodes: one loss of each group."""
    losses = [(1,), (2,)]
    job = new_job(4, TWO_COPIES, steps=STEPS_EACH * (len(losses) + 1))
    lose_in_turn(job, TWO_COPIES, losses)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("redundancy", "nodes", "most"),
    [(TWO_COPIES, 4, 2), (THREE_COPIES, 4, 3), (TWO_COPIES, 8, 1), (XOR, 4, 2)],
)
def test_every_pattern_of_lost_nodes(
    new_job: MakeJob, redundancy: Redundancy, nodes: int, most: int
) -> None:
    """All that the placement tolerates by memory, all others by the newest durable checkpoint."""
    losses = patterns(nodes, most)
    job = new_job(nodes, redundancy, steps=STEPS_EACH * (len(losses) + 1))
    lose_in_turn(job, redundancy, losses)


@pytest.mark.root
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_of_five_nodes_lost_at_once_are_rebuilt_from_parity(new_job: MakeJob) -> None:
    """Reed-Solomon: the newest protected checkpoint, which is on no disk, comes back twice."""
    held = 59  # steps; in memory after every third one, on disk after every twentieth
    job = new_job(5, TWO_OF_FIVE, steps=3 * held)
    job.start(held)
    for number, pattern in enumerate([(1, 3), (0, 4)], start=1):
        job.wait(lambda n=number: job.newest("GenerationReplicated") >= n * held - 2, "protection")
        promised = job.newest("GenerationReplicated")
        assert promised > job.newest("CheckpointDurable"), job.tale()
        job.lose(pattern)
        job.start((number + 1) * held)
        restored = job.restored()
        kinds = ["parity" if rank in pattern else "memory" for rank in range(5)]
        assert [event["source"] for event in restored] == kinds, (restored, job.tale())
        assert restored[0]["step"] == promised, (restored, job.tale())
    assert job.finish() == job.undisturbed(), job.tale()
