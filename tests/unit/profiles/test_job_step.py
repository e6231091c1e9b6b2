"""What takes the memory of a node under Slurm, and what the plan makes of it."""

from dataclasses import replace
from pathlib import Path

import pytest

from autockpt.cli.shared.plan_choice import decide_now, with_logs_beside
from autockpt.policies.cost_model.expectation import split_rates
from autockpt.policies.decide import decide
from autockpt.policies.redundancy.peer_costs import served
from autockpt.profiling.facts.failure_history import FailureEvidence
from autockpt.profiling.facts.job_step import memory_end
from autockpt.profiling.facts.start_decision import decide_start, with_evidence
from autockpt.run_directory import RunDirectory
from autockpt.values.goal import FailureDeclaration, Goal
from autockpt.values.placement import FailureDomains
from autockpt.values.profile import MemoryEnd
from autockpt.values.redundancy import Redundancy
from tests.support.profiles import example_profile

V1 = "8:pids:/\n6:freezer:/slurm_n1/uid_0/job_41/step_0\n4:memory:/box\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_41/step_0/user/task_1\n"
LINUXPROC = "8:pids:/\n6:freezer:/\n4:memory:/slurm/uid_0/job_41/step_0/task_0\n0::/\n"
RANK = {
    "SLURM_JOB_ID": "41", "SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
}  # fmt: skip
BELOW_A_LAUNCHER = {**RANK, "TORCHELASTIC_RUN_ID": "slurm-41.0", "RANK": "1", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "groups", "end"),
    [
        (RANK, V1, "rank"),
        (RANK, V2, "rank"),
        (BELOW_A_LAUNCHER, V1, "step"),
        ({"SLURM_JOB_ID": "41"}, V2.replace("step_0", "step_batch"), "step"),
        (RANK, LINUXPROC, "node"),  # the memory controller accounts; it ends nothing
        ({**RANK, "SLURM_JOB_ID": "4"}, V1, "node"),  # a shell that copied variables
        ({}, V1, "node"),
        (RANK, "", "node"),
    ],
)
def test_what_takes_the_memory_of_a_node(
    environ: dict[str, str], groups: str, end: MemoryEnd
) -> None:
    """Groups of Slurm 22.05 (version 1, seen) and of its manual (version 2)."""
    assert memory_end(environ, groups) == end


def test_memory_that_ends_with_any_rank_serves_no_failure() -> None:
    """A share that a person declares is believed."""
    profile = example_profile()
    failures, recovery = profile.failures, profile.recovery
    alone = split_rates(failures, Goal(), recovery)
    assert alone.memory_per_s > 0
    ended = split_rates(replace(failures, memory_ends_with="rank"), Goal(), recovery)
    assert ended.memory_per_s == 0
    assert ended.disk_per_s == pytest.approx(alone.memory_per_s + alone.disk_per_s)
    said = Goal(failures=FailureDeclaration(process_share=0.4))
    believed = split_rates(replace(failures, memory_ends_with="rank"), said, recovery)
    assert believed.memory_per_s == split_rates(failures, said, recovery).memory_per_s > 0


@pytest.mark.parametrize("end", ["step", "rank"])
def test_memory_of_other_nodes_that_ends_with_the_step_is_not_counted(end: MemoryEnd) -> None:
    """Copies on other nodes are gone with the first of the nodes."""
    failures = replace(example_profile().failures, nodes=4)
    pairs = Redundancy(scheme="replicas", copies=2)
    assert served(failures, pairs, FailureDomains()) > 0.9
    assert served(replace(failures, memory_ends_with=end), pairs, FailureDomains()) == 0


def test_the_plan_reckons_with_it_and_says_why() -> None:
    """The same job, as ranks of srun: the disk serves every failure."""
    profile = example_profile()
    alone = decide(profile, Goal())
    told = replace(profile, failures=replace(profile.failures, memory_ends_with="rank"))
    ended = decide(told, Goal())
    rates = [
        [choice.numbers["failures_per_s"] for choice in decision.choices if choice.name == name]
        for decision in (alone, ended)
        for name in ("memory.interval", "disk.interval")
    ]
    (memory,), (disk,), (no_memory,), (all_on_disk,) = rates
    assert (no_memory, all_on_disk) == (0.0, pytest.approx(memory + disk))
    # Slurm itself does not end the step then, but by --kill-on-bad-exit: the other ranks fail.
    assert any("the other ranks fail, the step ends" in warning for warning in ended.warnings)
    assert not any("memory serves no failure" in warning for warning in alone.warnings)


@pytest.mark.parametrize(
    ("before", "now", "planned"),
    [
        ("rank", "node", "rank"), ("rank", "step", "step"), ("node", "rank", "rank"),
        ("node", "node", "node"),
    ],
)  # fmt: skip
def test_a_start_knows_its_machine_and_a_plan_that_of_the_profile(
    before: MemoryEnd, now: MemoryEnd, planned: MemoryEnd
) -> None:
    """A profile of Slurm's ranks serves a workstation, and a login node plans for a job step."""
    profile = example_profile()
    profile = replace(profile, failures=replace(profile.failures, memory_ends_with=before))
    rates = replace(profile.failures, memory_ends_with=now)
    known = FailureEvidence(rates=rates, recovery=profile.recovery)
    assert with_evidence(profile, known).failures.memory_ends_with == now
    plan = with_evidence(profile, known, starting=False)
    assert plan.failures.memory_ends_with == planned


def test_a_profile_of_slurm_serves_a_run_elsewhere(tmp_path: Path) -> None:
    """`autockpt run` counts on memory there, and says nothing of Slurm; `autockpt plan` does."""
    profile = example_profile()
    told = replace(profile, failures=replace(profile.failures, memory_ends_with="rank"))
    run = RunDirectory.create(tmp_path / "runs" / "a")
    started = decide_now(run, told, Goal(), nodes=1).decision
    planned = decide(with_logs_beside(told, str(run.path)), Goal())
    memory_served = []
    for decision in (started, planned):
        (rate,) = [
            choice.numbers["failures_per_s"]
            for choice in decision.choices
            if choice.name == "memory.interval"
        ]
        said = any("memory serves no failure" in warning for warning in decision.warnings)
        assert said is (rate == 0)
        memory_served.append(rate > 0)
    assert memory_served == [True, False]


@pytest.mark.parametrize(("before", "now"), [("rank", "node"), ("node", "step")])
def test_a_start_counts_the_copies_on_other_nodes_that_are_kept_here(
    tmp_path: Path, before: MemoryEnd, now: MemoryEnd
) -> None:
    """Not those of the place where the profile was taken: re-tuning reckons with them."""
    profile = example_profile()
    failures = replace(profile.failures, nodes=4, memory_ends_with=before)
    profile = replace(profile, failures=failures)
    plan = replace(decide(profile, Goal()).plan, redundancy=Redundancy(scheme="replicas", copies=2))
    rates = replace(failures, memory_ends_with=now)
    known = FailureEvidence(rates=rates, recovery=profile.recovery)
    run = RunDirectory.create(tmp_path / "run")
    prior = decide_start(run, Goal(), plan, profile, nodes=4, evidence=known).memory.seen.prior
    assert prior is not None
    assert prior.peers is not None
    assert (prior.peers.served > 0) is (now == "node")
