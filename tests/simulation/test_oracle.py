"""What the simulator's oracle asks for, where protection is promised: no less and no more."""

import pytest

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.replicating import ParityRanks
from tests.simulation.actors import Content, Keeper, Trainer
from tests.simulation.cluster import LAUNCH, gen
from tests.simulation.oracle import Promise, Violation
from tests.simulation.simulation import Simulation, run_seed

SAVED = gen(1, 1)


def two_nodes() -> tuple[Simulation, Keeper]:
    """A rank on each, which copies the other's shard; node 1 lost its keeper, and it came back."""
    world = Simulation(next(s for s in range(100) if len(Simulation(s).nodes) == 2), slots=2)
    world.world, world.nodes_of, world.disk.term = 2, (0, 1), 1
    for rank, node in enumerate(world.nodes):
        for owner, contents in ((rank, node.slots), (1 - rank, node.replicas)):
            content = Content(generation=SAVED, history=7, rank=owner, world=2, sealed=True)
            contents[owner, 0] = content  # type: ignore[index]
    keeper = world.start_keeper(world.nodes[0])
    keeper.coordinator.state.term, keeper.coordinator.state.nodes = 1, (0, 1)
    keeper.coordinator.state.replicated = {0: (1,), 1: (0,)}
    world.oracle.wanted[SAVED], world.replica_losses = 0, 1
    keeper.back[1] = 1
    return world, keeper


def test_a_copy_that_a_keeper_came_back_without_is_missed() -> None:
    """It said so: a round that counts the copy all the same is wrong."""
    world, keeper = two_nodes()
    world.nodes[1].replicas.clear()
    with pytest.raises(Violation, match=r"without: \[\(0, 1\)\]"):
        world.promise_protected(keeper, m.CopiesEnded(generation=SAVED, protected=True))


@pytest.mark.parametrize("copied", [True, False])
def test_nobody_knows_of_a_flipped_bit_that_nobody_read(copied: bool) -> None:
    """A keeper that came back says that it has the shard; a copy that it lacks is still missed."""
    world, keeper = two_nodes()
    rotten = world.nodes[1].slots[1, 0]
    assert rotten is not None
    rotten.corrupt = True
    ended = m.CopiesEnded(generation=SAVED, protected=True)
    if copied:
        world.promise_protected(keeper, ended)
        assert not world.oracle.protected
    else:
        world.nodes[1].replicas.clear()
        with pytest.raises(Violation, match=r"without: \[\(0, 1\), \(1, 1\)\]"):
            world.promise_protected(keeper, ended)


@pytest.mark.parametrize("protects", [True, False])
def test_what_was_protected_goes_with_memory_where_nothing_newer_will_be(protects: bool) -> None:
    """Ranks that cannot be protected, as by parity on unequal nodes, commit something newer."""
    world, keeper = two_nodes()
    own = {(0, 0), (1, 1)}
    promise = Promise(world=2, copies=own, parities=own, sets=((frozenset({0, 1}), 1),))
    world.oracle.promise_protected(SAVED, promise)
    keeper.coordinator.state.replicated = {}
    keeper.coordinator.state.sets = (ParityRanks(ranks=(0, 1), losses=1),) if protects else ()
    world.promise_memory(keeper, m.MemoryCommitted(generation=SAVED, health="good"))
    assert bool(world.oracle.protected) is protects


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_term_that_begins_without_copies_keeps_its_parent_as_memory(is_kept: bool) -> None:
    """A plan wants copies again in the moment in which something newer is committed."""
    world, keeper = two_nodes()
    newer = gen(2, 5)
    own = {(0, 0), (1, 1)}
    promise = Promise(world=2, copies=own, parities=own, sets=((frozenset({0, 1}), 1),))
    world.oracle.promise_protected(SAVED, promise)
    keeper.coordinator.state.sets = (ParityRanks(ranks=(0, 1), losses=1),)
    keeper.coordinator.state.term = world.disk.term = 2
    opened = m.TermOpened(
        incarnation=m.Incarnation(launch_id="L0", restart_round=1), term=2, parent=SAVED, step=1,
        parent_durable=False, lineage=(), protected=SAVED if is_kept else None,
    )  # fmt: skip
    world.execute(keeper, m.Send(to_node=1, message=opened))
    world.oracle.announced.add(newer)
    world.promise_memory(keeper, m.MemoryCommitted(generation=newer, health="good"))
    assert bool(world.oracle.protected) is is_kept


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_that_only_a_replaced_rank_holds_goes_with_its_keeper(world_size: int) -> None:
    """The next keeper does not wait for a rank that fewer ranks have left behind."""
    world, _ = two_nodes()
    world.oracle.memory = {SAVED}
    world.world, world.nodes_of = world_size, (0, 1)[:world_size]
    world.trainers.append(Trainer(rank=1, nodes=(0, 1), incarnation=LAUNCH, fitted=True))
    world.start_keeper(world.nodes[1])
    world.end_keeper(world.nodes[1])
    assert bool(world.oracle.memory) is (world_size == 2)


@pytest.mark.parametrize("whole", [True, False])
def test_what_a_job_commits_while_another_one_knocks_takes_the_place_of_the_older(
    whole: bool,
) -> None:
    """The one that knocks has another number of ranks, and is promised nothing of it."""
    world, keeper = two_nodes()
    newer = gen(1, 2)
    for rank, node in enumerate(world.nodes):
        content = Content(generation=newer, history=8, rank=rank, world=2, sealed=True)
        node.slots[rank, 1] = content
    if not whole:
        world.nodes[1].slots[1, 1] = None
    world.oracle.memory, world.oracle.announced = {SAVED}, {SAVED}
    world.oracle.decided[1] = None
    world.world, world.nodes_of, world.losses = 3, (0, 0, 1), int(not whole)
    world.promise_memory(keeper, m.MemoryCommitted(generation=newer, health="good"))
    assert world.oracle.memory == (set() if whole else {SAVED})


@pytest.mark.parametrize("sound", [True, False])
def test_what_a_new_keeper_says_of_an_older_one_is_no_promise(sound: bool) -> None:
    """It is free since the newer one was committed, though the loss of a node lifted that promise;
    one with NaN has freed nothing."""
    world, keeper = two_nodes()
    newer = gen(1, 2)
    world.oracle.announced = {newer}
    world.oracle.nan = set() if sound else {newer}
    world.promise_memory(keeper, m.MemoryCommitted(generation=SAVED, health="good"))
    assert world.oracle.memory == (set() if sound else {SAVED})


@pytest.mark.parametrize("round_no", [1, 2])
def test_a_term_is_claimed_again_beside_trainers_that_every_keeper_refuses(round_no: int) -> None:
    """Its directory was emptied; one of an earlier round than the claimer's is refused for sure."""
    world, keeper = two_nodes()
    for node in world.nodes:
        node.slots.clear()
        node.replicas.clear()
    world.disk.term = 2
    left = Trainer(rank=0, nodes=(0, 1), incarnation=m.Incarnation(launch_id="L", restart_round=1))
    left.term = 2
    world.trainers.append(left)
    claimer = m.Incarnation(launch_id="L", restart_round=round_no)
    if round_no == 1:
        with pytest.raises(Violation, match="something of it is left"):
            world.claim(keeper, claimer, 1)
    else:
        world.claim(keeper, claimer, 1)
        assert world.disk.term == 1


@pytest.mark.parametrize("sealed", [True, False])
def test_a_torn_shard_of_the_same_name_is_written_over(sealed: bool) -> None:
    """Names are given again where a directory was emptied; a sealed one of that name is kept."""
    world, keeper = two_nodes()
    world.disk.claim, world.oracle.decided[1] = 1, None
    world.oracle.memory = {SAVED}
    trainer = Trainer(rank=0, nodes=(0, 1), incarnation=LAUNCH, term=1, running=True)
    world.trainers.append(trainer)
    old = Content(generation=SAVED, history=7, rank=0, world=2, sealed=sealed)
    world.nodes[0].slots[0, 1] = old
    grant = m.GrantSlot(rank=0, generation=gen(1, 2), slot=1)
    if sealed:
        with pytest.raises(Violation, match="newest in memory"):
            world.do_GrantSlot(keeper, grant)
    else:
        world.do_GrantSlot(keeper, grant)
        assert world.nodes[0].slots[0, 1] is not old


def test_a_grant_is_for_the_trainer_that_was_admitted() -> None:
    """Its directory was emptied, and a replaced trainer of that rank has the same term."""
    world, keeper = two_nodes()
    world.disk.claim, keeper.machine.state.admission.current = 1, LAUNCH
    for incarnation in (m.Incarnation(launch_id="replaced", restart_round=0), LAUNCH):
        trainer = Trainer(rank=0, nodes=(0, 1), incarnation=incarnation, term=1, running=True)
        trainer.emptied = incarnation != LAUNCH
        world.trainers.append(trainer)
    world.do_GrantSlot(keeper, m.GrantSlot(rank=0, generation=gen(1, 2), slot=1))
    assert [bool(trainer.writing) for trainer in world.trainers] == [False, True]


def test_an_attempt_belongs_to_trainers_that_went_on() -> None:
    """A second part of the term needs another one, wherever it begins."""
    world, keeper = two_nodes()
    coordinator = keeper.coordinator.state
    coordinator.is_in_same_term = True
    coordinator.parts = (m.TermParent(term=1, parent=SAVED, attempt=2),)
    world.note_part(keeper)
    world.note_part(keeper)
    coordinator.parts = (m.TermParent(term=1, parent=gen(1, 2), attempt=2),)
    with pytest.raises(Violation, match="attempt 2 is used twice"):
        world.note_part(keeper)


@pytest.mark.parametrize("seed", [137681, 173388, 176481])
def test_an_attempt_of_a_start_that_was_given_up_is_free(seed: int) -> None:
    """Restores were ordered, and no trainer went on: nothing has that name."""
    assert not run_seed(seed)


def test_weights_alone_are_nothing_to_restore() -> None:
    """All newer checkpoints were damaged: the refusal is right."""
    assert not run_seed(495718)


def test_a_decision_that_a_newer_claim_has_overtaken_is_no_restore() -> None:
    """It is written late, and its start had been given up: promises made since do not bind it."""
    assert not run_seed(527306)
