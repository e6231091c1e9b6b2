"""Which generation is restored: worked examples, then properties."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from autockpt.executors.protocol.messages import (
    CatalogueEntry,
    HeldShard,
    ShardCopy,
    TermParent,
)
from autockpt.executors.protocol.selection import (
    Question,
    chain_from,
    choose,
    newest_chain,
    on_lineage,
    parents_of,
)
from autockpt.values.generation import Generation


def gen(term: int, step: int) -> Generation:
    """Short for tests."""
    return Generation(term=term, step=step)


def shard(rank: int, generation: Generation, world: int = 2, **more: object) -> HeldShard:
    """A sealed shard whose root names its generation and rank."""
    base = HeldShard(
        rank=rank,
        slot=0,
        generation=generation,
        step=generation.step,
        world_size=world,
        root=f"{generation}:{rank}",
    )
    return replace(base, **more)  # type: ignore[arg-type]


def commit(generation: Generation, world: int = 2, **more: object) -> CatalogueEntry:
    """A commit of all ranks on disk."""
    records = tuple(
        {"file": f"{generation}-{r}", "root": f"{generation}:{r}"} for r in range(world)
    )
    base = CatalogueEntry(
        generation=generation, step=generation.step, world_size=world, records=records
    )
    return replace(base, **more)  # type: ignore[arg-type]


ONE_TERM = (TermParent(term=1, parent=None),)


WEIGHTS = tuple({"file": f"w-{r}", "root": f"w:{r}", "weights_only": True} for r in range(2))


def ask(*held: object, chain: tuple[TermParent, ...] = ONE_TERM, **more: object) -> Question:
    """A question about two ranks from shards and commits."""
    question = Question(
        world_size=2,
        memory=tuple(item for item in held if isinstance(item, HeldShard)),
        committed=tuple(item for item in held if isinstance(item, CatalogueEntry)),
        chain=chain,
    )
    return replace(question, **more)  # type: ignore[arg-type]


def chosen(question: Question) -> Generation | None:
    """Only the generation of the answer."""
    choice = choose(question)
    return choice.generation if choice else None


def test_memory_newer_than_disk_wins_if_every_rank_holds_it() -> None:
    """Two ranks hold (1, 7) and the disk has (1, 5): (1, 7), from memory."""
    choice = choose(ask(shard(0, gen(1, 7)), shard(1, gen(1, 7)), commit(gen(1, 5))))
    assert choice is not None
    assert choice.generation == gen(1, 7)
    assert choice.in_memory


def test_a_generation_one_rank_misses_is_passed_over() -> None:
    """Rank 1 has lost (1, 7): the commit (1, 5) is the greatest that all can get."""
    assert chosen(ask(shard(0, gen(1, 7)), commit(gen(1, 5)))) == gen(1, 5)


def test_one_rank_from_memory_and_the_other_from_disk() -> None:
    """Sources mix within one generation, because the commit names equal roots."""
    choice = choose(ask(shard(0, gen(1, 5)), commit(gen(1, 5))))
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["memory", "disk"]


def test_memory_with_another_root_than_the_commit_is_not_mixed_in() -> None:
    """The commit is what all ranks voted for; a shard that differs is read from disk."""
    choice = choose(ask(shard(0, gen(1, 5), root="other"), commit(gen(1, 5))))
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["disk", "disk"]


def test_a_generation_left_behind_is_never_chosen() -> None:
    """Term 2 began from (1, 5), so (1, 9) is abandoned even when it is whole."""
    chain = (TermParent(term=2, parent=gen(1, 5)), TermParent(term=1, parent=None))
    question = ask(commit(gen(1, 9)), commit(gen(1, 5)), chain=chain)
    assert chosen(question) == gen(1, 5)


def test_shards_of_another_world_size_do_not_make_a_generation() -> None:
    """Ranks 0 and 1 of a run of four hold half of a state, not a state of two."""
    assert chosen(ask(shard(0, gen(1, 5), world=4), shard(1, gen(1, 5), world=4))) is None


def test_a_commit_of_another_world_size_needs_resharding() -> None:
    """Four files are read by two ranks only if the commit says it may be."""
    assert chosen(ask(commit(gen(1, 5), world=4))) is None
    choice = choose(ask(commit(gen(1, 5), world=4, reshardable=True)))
    assert choice is not None
    assert {source.kind for source in choice.sources} == {"reshard"}
    # Whoever restores reads the commit: a list of all files for all ranks would be n squared.
    assert not choice.sources[0].records


def copies(generation: Generation, world: int, lost: set[int]) -> tuple[ShardCopy, ...]:
    """The shards of a larger job: rank r on node r and on the next one, without the lost nodes."""
    places = [(rank, node % world) for rank in range(world) for node in (rank, rank + 1)]
    return tuple(
        ShardCopy(node=node, shard=shard(rank, generation, world=world, copied=node != rank))
        for rank, node in places
        if node not in lost
    )


def test_another_number_of_ranks_gathers_what_is_newest_in_memory() -> None:
    """Three shards of four at home, that of the lost node from its partner; the disk is older."""
    question = ask(commit(gen(1, 5), world=4, reshardable=True), nodes=(0, 2))
    choice = choose(replace(question, copies=copies(gen(1, 7), 4, lost={1})))
    assert choice is not None
    assert choice.generation == gen(1, 7)
    assert {source.kind for source in choice.sources} == {"gather"}
    assert {place.shard.rank for place in choice.places} == {0, 1, 2, 3}
    assert {place.node for place in choice.places if place.shard.rank == 1} == {2}
    assert not choice.in_memory


def test_a_generation_of_which_a_shard_is_nowhere_is_not_gathered() -> None:
    """A node and its partner are lost: what is durable is read, if it may be by two ranks."""
    older = commit(gen(1, 5), world=4, reshardable=True)
    memory = copies(gen(1, 7), 4, lost={1, 2})
    assert chosen(ask(older, copies=memory)) == gen(1, 5)
    assert chosen(ask(copies=memory)) is None
    durable = commit(gen(1, 7), world=4, reshardable=True)
    choice = choose(ask(durable, copies=memory))
    assert choice is not None
    assert {place.shard.rank for place in choice.places} == {0, 2, 3}  # 1 has its file


def test_what_could_not_be_gathered_is_read_from_files() -> None:
    """One rank could not: nobody gathers this generation again."""
    durable, memory = commit(gen(1, 7), world=4, reshardable=True), copies(gen(1, 7), 4, lost={1})
    struck = frozenset({(1, gen(1, 7), "gather")})
    choice = choose(ask(durable, copies=memory, struck=struck))
    assert choice is not None
    assert {source.kind for source in choice.sources} == {"reshard"}
    assert choose(ask(copies=memory, struck=struck)) is None


def test_a_suspect_shard_is_not_gathered() -> None:
    """As in memory of the same ranks: one of them is enough."""
    good, *rest = copies(gen(1, 7), 4, lost={1})
    sick = replace(good, shard=replace(good.shard, health="suspect"))
    assert chosen(ask(copies=(sick, *rest))) is None
    assert chosen(ask(copies=(sick, *rest), resume_from=gen(1, 7))) == gen(1, 7)


def test_a_copy_with_another_root_than_the_commit_is_not_gathered() -> None:
    """Its file is what all ranks voted for."""
    good, *rest = copies(gen(1, 7), 4, lost=set())
    other = replace(good, shard=replace(good.shard, root="other"))
    choice = choose(ask(commit(gen(1, 7), world=4, reshardable=True), copies=(other, *rest)))
    assert choice is not None
    assert other not in choice.places


def across(*ranks: int) -> tuple[HeldShard, ...]:
    """Shards of ranks that divide what they hold alike with ranks of other nodes."""
    return tuple(shard(rank, gen(1, 7), across_nodes=True) for rank in ranks)


def test_shares_of_several_nodes_are_gathered_by_the_ranks_that_wrote_them() -> None:
    """No node has all of its state: every rank takes what it needs from the memory of all."""
    choice = choose(ask(*across(0, 1), commit(gen(1, 5)), nodes=(0, 1)))
    assert choice is not None
    assert choice.generation == gen(1, 7)
    assert [source.kind for source in choice.sources] == ["gather", "gather"]
    assert [(place.shard.rank, place.node) for place in choice.places] == [(0, 0), (1, 1)]
    assert choice.in_memory, "the slots that hold it are kept until there is a newer one"


def test_a_lost_node_takes_its_shares_with_it() -> None:
    """Nobody else has them: what is durable is read, in parts where only a part is lost."""
    assert chosen(ask(*across(0), nodes=(0, 1))) is None
    assert chosen(ask(*across(0), commit(gen(1, 5)), nodes=(0, 1))) == gen(1, 5)
    choice = choose(ask(*across(0), commit(gen(1, 7)), nodes=(0, 1)))
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["gather", "gather"]
    assert [place.shard.rank for place in choice.places] == [0]  # 1 has its file
    assert not choice.in_memory


def test_shares_of_a_lost_node_come_from_its_partner() -> None:
    """Copies of them are in another node's memory."""
    (lost,) = across(1)
    partner = ShardCopy(node=0, shard=replace(lost, copied=True))
    choice = choose(ask(*across(0), copies=(partner,), nodes=(0, 1)))
    assert choice is not None
    assert [(place.shard.rank, place.node) for place in choice.places] == [(0, 0), (1, 0)]
    assert not choice.in_memory, "the new machine has nothing yet"


def test_shares_that_could_not_be_gathered_are_read_from_files() -> None:
    """A shard of memory alone is no state, so memory is out of the question for all."""
    struck = frozenset({(0, gen(1, 7), "gather")})
    choice = choose(ask(*across(0, 1), commit(gen(1, 7)), nodes=(0, 1), struck=struck))
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["disk", "disk"]
    assert chosen(ask(*across(0, 1), nodes=(0, 1), struck=struck)) is None


def test_another_layout_is_not_restored_and_an_unknown_one_is() -> None:
    """Layout digests are compared only where both are known."""
    question = ask(shard(0, gen(1, 5), layout_digest="a"), shard(1, gen(1, 5), layout_digest="a"))
    assert chosen(replace(question, layout_digests=("a", "b"))) is None
    assert chosen(replace(question, layout_digests=("a", ""))) == gen(1, 5)


def test_suspect_and_quarantined_states_are_chosen_only_by_name() -> None:
    """Non-finite numbers are saved, but nobody resumes from them by accident."""
    for odd in (commit(gen(1, 9), health="suspect"), commit(gen(1, 9), quarantined=True)):
        assert chosen(ask(odd, commit(gen(1, 5)))) == gen(1, 5)
        assert chosen(ask(odd, commit(gen(1, 5)), resume_from=gen(1, 9))) == gen(1, 9)


def test_a_corrupt_commit_is_not_read() -> None:
    """Background verification found a difference: an older one is taken."""
    assert chosen(ask(commit(gen(1, 9), corrupt=True), commit(gen(1, 5)))) == gen(1, 5)


def test_resume_from_takes_exactly_that_one_or_none() -> None:
    """An explicit rollback never becomes something else."""
    question = ask(commit(gen(1, 9)), commit(gen(1, 5)))
    assert chosen(replace(question, resume_from=gen(1, 5))) == gen(1, 5)
    assert chosen(replace(question, resume_from=gen(1, 4))) is None


def test_a_struck_source_is_replaced_by_the_next_one() -> None:
    """Bad memory of rank 0: its file; bad file as well: an older generation for all."""
    question = ask(shard(0, gen(1, 5)), shard(1, gen(1, 5)), commit(gen(1, 5)), commit(gen(1, 3)))
    struck = replace(question, struck=frozenset({(0, gen(1, 5), "memory")}))
    choice = choose(struck)
    assert choice is not None
    assert [source.kind for source in choice.sources] == ["disk", "memory"]
    both = frozenset({(0, gen(1, 5), "memory"), (0, gen(1, 5), "disk")})
    assert chosen(replace(question, struck=both)) == gen(1, 3)


def test_commits_fill_in_for_lost_decision_records() -> None:
    """A copied directory without decisions still knows its lineage."""
    parents = parents_of((), (commit(gen(2, 3), parent=gen(1, 5)), commit(gen(1, 5))))
    assert newest_chain(parents) == (
        TermParent(term=2, parent=gen(1, 5)),
        TermParent(term=1, parent=None),
    )


def test_a_record_that_points_forward_ends_the_chain() -> None:
    """A corrupt parent cannot make the walk go on for ever."""
    assert chain_from(2, {2: gen(3, 1), 3: gen(2, 1)}) == (TermParent(term=2, parent=gen(3, 1)),)


generations = st.builds(gen, st.integers(1, 4), st.integers(0, 6))
histories = st.dictionaries(st.integers(1, 4), st.one_of(st.none(), generations), max_size=4)


@given(histories, generations)
def test_lineage_is_closed_downwards_within_a_term(
    parents: dict[int, Generation | None], generation: Generation
) -> None:
    """If a generation is eligible, so is every older one of its term."""
    chain = newest_chain(parents)
    if on_lineage(generation, chain) and generation.step > 0:
        assert on_lineage(gen(generation.term, generation.step - 1), chain)


@given(
    histories,
    st.sets(st.tuples(st.integers(0, 1), generations), max_size=12),
    st.sets(generations, max_size=6),
)
def test_the_choice_is_recoverable_eligible_and_the_greatest(
    parents: dict[int, Generation | None],
    held: set[tuple[int, Generation]],
    on_disk: set[Generation],
) -> None:
    """Compared with a plain search over all generations."""
    chain = newest_chain(parents)
    shards = [shard(rank, generation) for rank, generation in sorted(held)]
    commits = [commit(generation) for generation in sorted(on_disk)]
    possible = {
        generation
        for generation in on_disk | {g for _, g in held}
        if on_lineage(generation, chain)
        and all(generation in on_disk or (rank, generation) in held for rank in (0, 1))
    }
    choice = choose(ask(*shards, *commits, chain=chain))
    assert (choice.generation if choice else None) == max(possible, default=None)
    if choice is not None:
        for rank, source in enumerate(choice.sources):
            assert source.kind == ("memory" if (rank, choice.generation) in held else "disk")


def test_a_commit_of_weights_is_never_resumed_from() -> None:
    """Neither as the newest one, nor asked for by name, nor by another number of ranks."""
    old, newer = gen(1, 1), gen(1, 2)
    weights = commit(newer, records=WEIGHTS)
    assert chosen(ask(commit(old), weights)) == old
    assert choose(replace(ask(weights), resume_from=newer)) is None
    assert choose(replace(ask(weights), world_size=1, nodes=(0,))) is None


def test_memory_may_still_have_all_of_a_commit_of_weights() -> None:
    """Its slots hold other bytes than the files do, and roots are not compared."""
    generation = gen(1, 2)
    held = [shard(rank, generation) for rank in range(2)]
    assert chosen(ask(*held, commit(generation, records=WEIGHTS))) == generation
