"""Which starts are the same job: the matrix of docs/howto/launch/jobs.md."""

import itertools

import pytest

from autockpt.values.same_job import Job, array_task, differences, job_of, lengths, tag


def job(arguments: str, script: str = "/train.py", task: str = "") -> Job:
    """A start with these arguments."""
    return Job(script=script, args=tuple(arguments.split()), array_task=task)


def differ(there: str, here: str) -> list[str]:
    """What differs between two command lines of one script."""
    return differences(job(there), job(here), same_script=True)


SAME = [
    # spelling and order
    ("--lr 0.1", "--lr=0.10"), ("--lr 0.1", "--lr 1e-1"), ("--max_grad 1", "--max-grad=1.0"),
    ("--lr 1 --seed 2", "--seed 2 --lr 1"), ("lr=1 wd=2", "wd=2 lr=1.0"),
    ("--lr -1e-3", "--lr=-0.001"),
    ("--amp true", "--amp=True"), ("data --lr 1", "--lr 1 data"),
    # how long to train
    ("--steps 10 --lr 1", "--lr 1 --steps 20"), ("--epochs 3", "--epochs=4"), ("", "--max_steps 9"),
    ("--num-train-epochs 1", "--num-train-epochs 2"), ("--max_iters=400", "--max_iters=200"),
    ("trainer.max_steps=10 lr=1", "trainer.max_steps=20 lr=1"),
    ("--train-iters 5", "--train-iters 6"),
    ("--total-timesteps 1e6", "--total-timesteps 2e6"),
    ("--num-train-steps 5", "--num-train-steps 6"),
    ("--steps 5", "--steps 6"),
    ("--max-num-updates 5", "--max-num-updates 6"), ("--train-samples 5", "--train-samples 6"),
    ("--n_epochs 5", "--n_epochs 6"), ("--nepochs 5", "--nepochs 6"),
    ("--max-time 1h", "--max-time 2h"),
    # where a rank runs
    ("--local_rank=0", "--local_rank=1"), ("--local-rank 0", "--local-rank 3"),
    ("--node_rank 0 --master_addr a", "--node_rank 1 --master_addr b"), ("--gpu 0", "--gpu 1"),
    ("--device cuda:0", "--device cuda:1"), ("--world-size 2", "--world-size 4"),
    # to go on
    ("", "--resume"), ("--resume auto", "--resume latest"), ("", "--auto-resume"),
    ("", "resume=true"),
    # what is printed
    ("", "-v"), ("", "-vv"), ("--log-every 10", "--log-every 1"), ("", "--quiet"),
    ("--log_level info", "--log_level debug"),
]  # fmt: skip
OTHER = [
    ("--lr 1", "--lr 2"), ("--lr 1", ""), ("", "--amp"), ("1", "2"), ("100", "200"), ("a b", "b a"),
    ("lr=1", "lr=2"), ("--seed 1", "--seed 2"), ("-n 1", "-n 2"), ("-x 1", "-X 1"),
    ("--seed 10000000000000000000000000000000001", "--seed 10000000000000000000000000000000002"),
    ("--warmup-steps 1", "--warmup-steps 2"), ("--eval-steps 1", "--eval-steps 2"),
    ("--lr-decay-iters 1", "--lr-decay-iters 2"), ("--max-tokens 1", "--max-tokens 2"),
    ("--num-samples 1", "--num-samples 2"), ("--config a", "--config b"),
    ("--num-steps 16", "--num-steps 512"), ("--n-steps 5", "--n-steps 50"),
    ("--timesteps 100", "--timesteps 1000"), ("--updates 4", "--updates 40"),
    ("--lora.rank 8", "--lora.rank 64"),
    ("--gradient-accumulation-steps 1", "--gradient-accumulation-steps 2"),
    ("--resume a.pt", "--resume b.pt"),
    ("--hidden 64 64", "--hidden 64 32"), ("--step-size 1", "--step-size 2"), ("-- -v", "-- -w"),
    ("--data.a 1", "--data.b 1"), ("+lr=1", "+lr=2"),
]  # fmt: skip


@pytest.mark.parametrize(("there", "here"), SAME)
def test_these_are_the_same_job(there: str, here: str) -> None:
    """In both directions, with the same name among the runs."""
    assert differ(there, here) == differ(here, there) == []
    assert tag(job(there)) == tag(job(here))


@pytest.mark.parametrize(("there", "here"), OTHER)
def test_these_are_different_jobs(there: str, here: str) -> None:
    """In both directions, with names of their own."""
    assert differ(there, here)
    assert differ(here, there)
    assert tag(job(there)) != tag(job(here))


def test_the_names_of_a_sweep_are_all_different() -> None:
    """A few thousand of them."""
    sweep = itertools.product(range(30), range(30), ("adam", "sgd"))
    tags = {tag(job(f"--lr {lr} --seed {seed} --opt {opt}")) for lr, seed, opt in sweep}
    assert len(tags) == 1800


def test_what_differs_is_said_as_one_types_it() -> None:
    """Old and new value, and what only one of them has."""
    assert differ("--lr 1 --amp", "--lr 2 --seed 3") == [
        "--lr 2 (there: 1)", "--seed 3 (there: none)", "no --amp (there: given)",
    ]  # fmt: skip
    assert differ("a", "b c") == ["arguments b c (there: a)"]
    assert differ("", "b") == ["arguments b (there: none)"]
    assert differ("-n 1", "-n 2") == ["-n 2 (there: 1)"]
    assert lengths(job("--steps 1 --lr 3"), job("--steps 2 --lr 3")) == ["--steps 2 (there: 1)"]


def test_another_script_and_another_task_are_other_jobs() -> None:
    """Both are named."""
    there, here = job("--lr 1", task="1"), job("--lr 1", script="/other.py", task="2")
    assert differences(there, here, same_script=False) == [
        "script /other.py (there: /train.py)", "array task 2 (there: 1)",
    ]  # fmt: skip
    assert tag(here).startswith("task2-")
    assert differences(job("", task="1"), job(""), same_script=True) == [
        "array task none (there: 1)"
    ]


@pytest.mark.parametrize(
    ("environment", "task"),
    [
        ({}, ""), ({"SLURM_ARRAY_TASK_ID": "0"}, "0"), ({"SGE_TASK_ID": "undefined"}, ""),
        ({"SGE_TASK_ID": "3"}, "3"), ({"LSB_JOBINDEX": "0"}, ""), ({"LSB_JOBINDEX": "7"}, "7"),
        ({"PBS_ARRAY_INDEX": "2"}, "2"), ({"JOB_COMPLETION_INDEX": "1"}, ""),
    ],
)  # fmt: skip
def test_tasks_of_arrays_are_known_by_their_schedulers(
    environment: dict[str, str], task: str
) -> None:
    """What means "no array" is none."""
    assert array_task(environment) == task


def test_secrets_and_ranks_do_not_tell_jobs_apart() -> None:
    """A key may change; a rank may be given its number in an argument."""
    first = job_of("/t.py", ("--api-key", "one", "--lr", "1"), {})
    second = job_of("/t.py", ("--api-key", "two", "--lr", "1"), {})
    assert first == second
    assert "one" not in first.args
    ranks = [
        job_of("/t.py", (f"--id={rank}", str(rank), "--seed", "1", "9"), {}, ranks=2)
        for rank in (0, 1)
    ]
    assert ranks[0] == ranks[1]
    assert ranks[0].args == ("--id={rank}", "{rank}", "--seed", "{rank}", "9")


def test_a_kernel_of_a_notebook_is_the_same_job_after_a_restart() -> None:
    """Its connection file has another name each time."""
    first, second = (
        job_of("/lib/ipykernel_launcher.py", ("-f", f"/run/kernel-{n}.json"), {}) for n in (1, 2)
    )
    assert first == second
