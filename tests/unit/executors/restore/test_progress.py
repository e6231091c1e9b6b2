"""Progress merged as a whole: random numbers alike where they must be, and what is told."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from autockpt.executors.restore.progress import GENERATORS, Merged, merge_progress, rng_for
from autockpt.executors.state.data.data_position import DataPosition
from autockpt.executors.state.rng import rng_state, set_rng_state
from autockpt.values.errors import ConfigError, CorruptCheckpointError
from tests.unit.executors.sharding.jobs import Job, shared


def seeded(seed: int) -> dict[str, Any]:
    """The random state of a process that seeded everything."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return rng_state()


def draws(rng: dict[str, Any]) -> tuple[float, float, float]:
    """What follows from a state: one number of each generator."""
    set_rng_state(rng)
    return random.random(), float(np.random.random()), float(torch.rand(()))


def saved(*seeds: int) -> dict[int, dict[str, Any]]:
    """Progress of ranks that seeded so."""
    return {
        rank: {"progress": {"step": 5, "data": None}, "rng": seeded(seed)}
        for rank, seed in enumerate(seeds)
    }


def merged(world: int, live: int, *seeds: int, rank: int = 0, same_mesh: bool = True) -> Merged:
    """Of ranks that seeded so, for a rank whose script seeds `live`."""
    return merge_progress(saved(*seeds), rank, world, same_mesh=same_mesh, live=seeded(live))


def test_as_many_ranks_keep_their_own() -> None:
    """Nothing is said about what is as it was."""
    for rank in range(3):
        same = merged(3, 99, 10, 11, 12, rank=rank)
        assert draws(same.rng) == draws(seeded(10 + rank))
        assert same.notices == ()


@pytest.mark.parametrize(("seeds", "world"), [((4, 4), 3), ((4, 5, 6), 1)])
def test_what_all_had_and_what_one_takes_goes_on(seeds: tuple[int, ...], world: int) -> None:
    """Ranks that drew alike go on drawing alike; a single one goes on with rank 0's."""
    result = merged(world, 99, *seeds)
    assert draws(result.rng) == draws(seeded(4))
    assert result.notices == ()


@pytest.mark.parametrize("seeds", [(4, 5), (4,)])
def test_other_ranks_draw_anew_and_are_told(seeds: tuple[int, ...]) -> None:
    """Each generator: the same for the same resume, others for a rank that is seeded otherwise."""
    here, again, there = (merged(4, live, *seeds) for live in (20, 20, 21))
    assert draws(here.rng) == draws(again.rng)
    for mine, other, old in zip(draws(here.rng), draws(there.rng), draws(seeded(4)), strict=True):
        assert len({mine, other, old}) == 3
    (text,) = here.notices
    assert text.startswith(
        f"random numbers (Python, numpy, torch): {len(seeds)} ranks saved and 4 resume"
    )


def test_another_checkpoint_gives_other_numbers() -> None:
    """The saved state counts, and not only the script's seed."""
    assert draws(merged(3, 20, 4, 5).rng) != draws(merged(3, 20, 6, 5).rng)


def test_another_mesh_of_as_many_ranks_draws_anew() -> None:
    """Four data-parallel ranks become two of two tensor-parallel ones: these must draw alike."""
    one, two = (merged(2, 20, 4, 5, rank=rank, same_mesh=False) for rank in (0, 1))
    assert draws(one.rng) == draws(two.rng) != draws(seeded(4))


def test_only_what_differed_is_drawn_anew() -> None:
    """Each generator by itself: numpy was seeded alike on all ranks."""
    states = [{**seeded(seed), "numpy": seeded(1)["numpy"]} for seed in (4, 5)]
    rng, (text,) = rng_for(states, 3, seeded(20))
    assert draws(rng)[1] == draws(seeded(1))[1]
    assert text.startswith("random numbers (Python, torch)")


def test_the_state_of_this_process_is_what_counts_by_default() -> None:
    """And it is not changed by asking."""
    given = merged(3, 20, 4, 5)
    ranks, live = saved(4, 5), seeded(20)
    assert draws(merge_progress(ranks, 0, 3, live=live).rng) == draws(given.rng)
    seeded(20)
    assert draws(merge_progress(ranks, 0, 3).rng) == draws(given.rng)


def test_gpus_get_a_seed_each_in_their_form() -> None:
    """16 bytes: the seed, and an offset of 0; as many as there were."""
    states = [{**seeded(s), "cuda": [torch.full((16,), s, dtype=torch.uint8)] * 2} for s in (4, 5)]
    rng, (text,) = rng_for(states, 3, seeded(20))
    assert "GPU" in text
    first, second = rng["cuda"]
    assert torch.equal(first, second)
    assert first.shape == (16,)
    assert first.dtype == torch.uint8
    assert first[:8].any()
    assert not first[8:].any()


@pytest.mark.gpu
def test_a_gpu_state_in_that_form_is_its_seed() -> None:
    """What torch itself makes of a seed."""
    state = torch.from_numpy(np.array([77, 0], dtype=np.uint64).view(np.uint8).copy())
    torch.cuda.manual_seed(77)
    assert torch.equal(torch.cuda.get_rng_state(), state)


# --- together ------------------------------------------------------------------------------------


def test_progress_is_merged_as_a_whole() -> None:
    """Step, position and random numbers, and what the user is told of the rest."""
    job = Job(shared(20), 2)
    job.step()
    ranks = saved(4, 5)
    for rank, state in enumerate(job.save()):
        ranks[rank]["progress"]["data"] = state
    result = merge_progress(ranks, 2, 3, live=seeded(20))
    assert result.progress["step"] == 5
    position = DataPosition(shared(20)(2, 3))
    position.load(result.progress["data"])
    order = list(DistributedSampler(range(20), 1, 0, seed=7))
    assert next(position.batches()).tolist() == [order[4 + 2], order[4 + 5]]
    assert any(
        text.startswith("data: 16 of 20 samples are left of epoch 0") for text in result.notices
    )
    assert len(result.notices) == 2


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_of_different_steps_are_corrupt(world: int) -> None:
    """Whoever resumes: these are not one state."""
    ranks = saved(4, 5)
    ranks[1]["progress"]["step"] = 6
    with pytest.raises(CorruptCheckpointError, match=r"\[0, 1\] were saved at the steps \[5, 6\]"):
        merge_progress(ranks, 0, world)


def test_a_missing_rank_is_corrupt() -> None:
    """Its share of the samples would be lost."""
    ranks = saved(4, 5, 6)
    del ranks[1]
    with pytest.raises(CorruptCheckpointError, match=r"the ranks \[0, 2\]"):
        merge_progress(ranks, 0, 1)


def test_every_generator_has_a_name_for_the_user() -> None:
    """A generator that `rng_state` learns to save must not be passed over."""
    assert set(rng_state()) <= set(GENERATORS)


def test_shuffles_of_each_rank_alone_are_said_or_refused() -> None:
    """The global generator's: rank 0's order serves all for this epoch.  A rank's own: no."""

    def states(own: bool, inner: bool = False) -> list[Any]:
        found = []
        for rank in range(2):
            torch.manual_seed(rank)
            generator = torch.Generator().manual_seed(rank) if own else None
            loader = DataLoader(range(9), 2, shuffle=True, generator=generator)
            if inner:
                loader = DataLoader(range(9), batch_sampler=loader.batch_sampler)
            position = DataPosition(loader)
            next(position.batches())
            found.append({"progress": {"step": 1, "data": position.state()}, "rng": rng_state()})
        return found

    merged = merge_progress(dict(enumerate(states(own=False))), 2, 3)
    assert any("each rank shuffled on its own; in epoch 0" in text for text in merged.notices)
    for inner in (False, True):
        with pytest.raises(ConfigError, match="shuffled with a generator of its own"):
            merge_progress(dict(enumerate(states(own=True, inner=inner))), 2, 3)


@pytest.mark.parametrize(
    ("states", "kept"),
    [(([1], [1]), True), (([1], [2]), False), ((None, [1]), False), (([1], None), False)],
)
def test_generators_of_the_script_are_kept_where_all_ranks_had_the_same(
    states: tuple[list[int] | None, list[int] | None], kept: bool
) -> None:
    """None of one rank's serves another number of ranks otherwise, which is said."""
    each = [{**seeded(1), **({"script": {"g": state}} if state else {})} for state in states]
    rng, said = rng_for(each, 1, seeded(2))
    assert ("script" in rng) is kept
    assert any("generators of the script" in text for text in said) is not kept
