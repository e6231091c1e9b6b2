"""Several optimizers: each waits for what it changes, and the image is the boundary's all the same.

Adversaries that step in turn, one optimizer per parameter inside the backward, tensors that two of
them change, parts that nobody changes.
"""

import threading
from typing import Any

import pytest
import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot import tear_check
from autockpt.executors.snapshot.copy_engine import CopyJob
from autockpt.executors.snapshot.optimizer_hooks import OptimizerHooks
from autockpt.executors.snapshot.snapshotter import Snapshot, Snapshotter
from autockpt.executors.state.live_state import LiveState
from tests.unit.executors.shots import (
    PATIENCE_S,
    Barrier,
    assert_image,
    copied_but_unproven,
    held,
    slot_for,
    snapshotter,
    state_bytes,
)
from tests.unit.executors.states import Module


class Adversaries:
    """Two networks, two optimizers, and one snapshot after the other."""

    def __init__(self) -> None:
        self.d, self.g = torch.nn.Linear(60, 60), torch.nn.Linear(60, 60)
        self.d_steps = torch.optim.AdamW(self.d.parameters(), lr=0.1, fused=True)
        self.g_steps = torch.optim.AdamW(self.g.parameters(), lr=0.1, fused=True)
        self.state = LiveState.of(
            model={"d": self.d, "g": self.g}, optimizer={"d": self.d_steps, "g": self.g_steps}
        )
        for network in (self.d, self.g):
            self.backward(network)

    def backward(self, network: torch.nn.Module) -> None:
        """New gradients."""
        network(torch.randn(5, 60)).square().sum().backward()

    def train(self) -> None:
        """Both step once."""
        self.d_steps.step()
        self.g_steps.step()


@pytest.fixture
def gan() -> Adversaries:
    """Both have stepped once."""
    made = Adversaries()
    made.train()
    return made


def stop_after(snapshot_: Snapshot, part: str) -> Barrier:
    """The copy stands still behind a part, before anything of the next one."""
    barrier, end = Barrier(), snapshot_.recipe.parts[part].end
    jobs = list(snapshot_.task.jobs)
    place = next(i for i, job in enumerate(jobs) if job.end > end)
    snapshot_.task.jobs = [*jobs[:place], barrier.job(end), *jobs[place:]]
    return barrier


def begun(shooter: Snapshotter, slot: Arena, part: str) -> tuple[Snapshot, Barrier]:
    """A snapshot whose copy stands still behind a part."""
    with held(shooter.engine):
        snapshot_ = shooter.begin(slot, {"step": 1}, lazy=True)
        return snapshot_, stop_after(snapshot_, part)


def test_an_optimizer_waits_for_its_own_part_only(gan: Adversaries) -> None:
    """The discriminator steps while the generator's tensors are still being copied."""
    with snapshotter(gan.state) as shooter:
        slot, expected = slot_for(shooter), state_bytes(gan.state)
        snapshot_, barrier = begun(shooter, slot, "optimizer.d")
        assert shooter.fence(gan.d_steps) == []
        gan.d_steps.step()
        assert barrier.reached.wait(PATIENCE_S)
        assert shooter.current is snapshot_
        assert not barrier.opened.is_set()

        fenced = threading.Thread(target=lambda: shooter.fence(gan.g_steps))
        fenced.start()
        assert shooter.current is snapshot_  # it waits
        barrier.opened.set()
        fenced.join(PATIENCE_S)
        gan.g_steps.step()
        assert (snapshot_.changed, snapshot_.error) == ([], None)
        assert_image(slot, expected)


def test_what_another_optimizer_did_after_its_fence_is_no_change(gan: Adversaries) -> None:
    """Snapshot after snapshot: every tensor gets its turn in the sample, no false alarm."""
    with snapshotter(gan.state) as shooter:
        slot = slot_for(shooter)
        for turn in range(12):
            expected = state_bytes(gan.state)
            snapshot_ = shooter.begin(slot, {"step": turn}, lazy=True)
            for optimizer in (gan.d_steps, gan.g_steps):
                assert shooter.fence(optimizer) == []
                optimizer.step()
            assert snapshot_.changed == []
            assert_image(slot, expected)


def test_a_step_before_its_fence_is_found_and_only_its_own_tensors_named(
    gan: Adversaries,
) -> None:
    """By fused kernels, which no version counter sees."""
    with snapshotter(gan.state) as shooter:
        _, barrier = begun(shooter, slot_for(shooter), "optimizer.d")
        assert shooter.fence(gan.d_steps) == []
        gan.d_steps.step()
        gan.g_steps.step()
        barrier.opened.set()
        changed = shooter.fence(gan.g_steps)
        assert {name for name in changed if "model.g." in name} == set(changed)
        assert {"model.g.weight", "optimizer.g.model.g.weight.exp_avg"} <= set(changed)


@pytest.mark.parametrize("late", [0, 3999])
def test_a_single_element_in_any_part_is_found_by_the_sample(
    monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """Beside the canaries; within as many snapshots as there are tensors, without probes too."""
    monkeypatch.setattr(tear_check, "SAMPLE_BYTES", 4000 * 4)
    monkeypatch.setattr(tear_check.Probe, "next", lambda self, sizes: [])
    model: Any = Module([(name, torch.zeros(4000)) for name in "abc"])
    state = LiveState.of(
        model=model, optimizer={n: torch.optim.SGD([getattr(model, n)], lr=0.1) for n in "abc"}
    )
    for name in "abc":
        with snapshotter(state) as shooter:
            slot = slot_for(shooter)
            found = []
            for turn in range(3):
                _, barrier = copied_but_unproven(shooter, slot, turn)
                getattr(model, name).data[late] += 1
                barrier.opened.set()
                found.append(shooter.fence())
            assert sorted(found) == [[], [], [f"model.{name}"]]


def test_an_optimizer_that_makes_its_state_late_disturbs_nobody() -> None:
    """Its first step, between its own fence and the other one's: that state is no change."""
    it = Adversaries()
    it.d_steps.step()
    with snapshotter(it.state) as shooter:
        slot, expected = slot_for(shooter), state_bytes(it.state)
        snapshot_ = shooter.begin(slot, {"step": 1}, lazy=True)
        assert shooter.fence(it.g_steps) == []
        it.g_steps.step()
        assert shooter.fence(it.d_steps) == []
        assert snapshot_.changed == []
        assert_image(slot, expected)
        expected = state_bytes(it.state)
        shooter.begin(slot, {"step": 2}, lazy=True)
        assert shooter.fence() == []
        assert_image(slot, expected)


def test_a_parameter_taken_over_by_another_optimizer_meanwhile_is_named(gan: Adversaries) -> None:
    """The fence of its new owner did not wait for it."""
    with snapshotter(gan.state) as shooter:
        _, barrier = copied_but_unproven(shooter, slot_for(shooter))
        (group,) = gan.g_steps.param_groups
        bias = group["params"].pop()
        gan.g_steps.state.pop(bias)
        gan.d_steps.add_param_group({"params": [bias]})
        changed = shooter.fence(gan.d_steps)
        barrier.opened.set()
        changed += shooter.fence(gan.g_steps)
        assert "model.g.bias" in changed


def test_a_tensor_of_two_optimizers_is_waited_for_by_both() -> None:
    """The second one waits for the first one's part, and the first one then for nothing."""
    model: Any = Module(
        [("a", torch.ones(2000)), ("both", torch.ones(3000)), ("b", torch.ones(2000))]
    )
    a = torch.optim.SGD([model.a, model.both], lr=0.1)
    b = torch.optim.SGD([model.both, model.b], lr=0.1)
    state = LiveState.of(model=model, optimizer={"a": a, "b": b})
    with snapshotter(state) as shooter:
        slot, expected = slot_for(shooter), state_bytes(state)
        snapshot_ = shooter.begin(slot, {"step": 1}, lazy=True)
        assert shooter.fence(b) == []
        assert snapshot_.proofs == {}
        model.both.data.add_(1)
        assert shooter.current is None
        assert_image(slot, expected)


def test_parts_that_nobody_steps_are_fenced_with_the_last_optimizer(gan: Adversaries) -> None:
    """Frozen layers wait for no step; a change of them until then is found."""
    frozen: Any = Module([("f", torch.zeros(3000))])
    state = LiveState.of(
        model={"d": gan.d, "g": gan.g, "f": frozen},
        optimizer={"d": gan.d_steps, "g": gan.g_steps},
    )
    with snapshotter(state) as shooter:
        slot = slot_for(shooter)
        for change, expected in ((0, []), (1, ["model.f.f"])):
            _, barrier = copied_but_unproven(shooter, slot)
            assert shooter.fence(gan.g_steps) == []
            frozen.f.data.add_(change)
            barrier.opened.set()
            assert shooter.fence(gan.d_steps) == expected


def test_a_stranger_is_fenced_as_if_it_changed_everything(gan: Adversaries) -> None:
    """An optimizer that nobody attached, and `None`: the snapshot is completed."""
    with snapshotter(gan.state) as shooter:
        slot = slot_for(shooter)
        for stranger in (None, torch.optim.SGD(gan.d.parameters(), lr=0.1)):
            shooter.begin(slot, {"step": 1}, lazy=True)
            assert shooter.fence(stranger) == []
            assert shooter.current is None


# --- one optimizer per parameter, inside the backward --------------------------------------------


@pytest.fixture
def backward_steps() -> tuple[torch.nn.Module, LiveState, list[torch.optim.Optimizer]]:
    """(model, state, optimizers): every parameter steps as soon as its gradient is there."""
    model = torch.nn.Sequential(
        torch.nn.Linear(30, 30), torch.nn.LayerNorm(30), torch.nn.Linear(30, 30)
    )
    own: dict[torch.Tensor, torch.optim.Optimizer] = {
        parameter: torch.optim.AdamW([parameter], lr=0.1, fused=True)
        for parameter in model.parameters()
    }

    def step(parameter: torch.Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in own:
        parameter.register_post_accumulate_grad_hook(step)
    optimizers = {str(i): optimizer for i, optimizer in enumerate(own.values())}
    return model, LiveState.of(model=model, optimizer=optimizers), list(own.values())


def test_optimizers_inside_the_backward_leave_the_boundary_in_the_image(
    backward_steps: Any,
) -> None:
    """Each fence lets one parameter go while the others are still copied, in the order learned."""
    model, state, optimizers = backward_steps
    with snapshotter(state) as shooter:

        def before(optimizer: torch.optim.Optimizer | None) -> None:
            if shooter.current is not None:
                assert shooter.fence(optimizer) == []

        hooks = OptimizerHooks(optimizers, before, state.stepped)
        try:
            model(torch.randn(4, 30)).square().sum().backward()
            slot = slot_for(shooter)
            for turn in range(4):
                expected = state_bytes(state)
                with held(shooter.engine):
                    snapshot_ = shooter.begin(slot, {"step": turn}, lazy=True)
                model(torch.randn(4, 30)).square().sum().backward()
                assert shooter.current is None
                assert (snapshot_.changed, snapshot_.error) == ([], None)
                assert_image(slot, expected)
        finally:
            hooks.remove()
    assert list(state.inventory().parts) == state.step_order
    assert state.step_order[0] != "optimizer.0"  # the last layer's gradient comes first


def test_the_jobs_of_the_parts_follow_each_other(backward_steps: Any) -> None:
    """So that a part is complete as early as it can be."""
    model, state, _ = backward_steps
    model(torch.randn(4, 30)).square().sum().backward()
    with snapshotter(state) as shooter:
        with held(shooter.engine):
            snapshot_ = shooter.begin(slot_for(shooter), {"step": 1}, lazy=True)
            jobs: list[CopyJob] = list(snapshot_.task.jobs)
            ends = [part.end for part in snapshot_.recipe.parts.values()]
        assert ends == sorted(ends)
        assert [job.end for job in jobs] == sorted(job.end for job in jobs)
        assert shooter.fence() == []
