"""The adapter contract in HuggingFace, with the real package."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.contracts.adapter_contract import EDGE, AdapterContract, Framework
from tests.contracts.adapter_process import Case
from tests.frameworks.changed_settings import each_epoch, trained
from tests.frameworks.undisturbed import require_undisturbed

FRAMEWORK = Framework("huggingface", "tests/frameworks/huggingface_driver.py", "transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestHuggingFace(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    more = (
        Case(kill="forward:8", option="lora"),
        Case(kill="backward:19", option="lora", accumulation=4),
        Case(kill="forward:9", option="sft"),
        Case(kill="boundary:5", option="sft", accumulation=2),
        Case(kill=f"boundary:{EDGE}", option="stream"),
        Case(kill="boundary:6", option="stream", accumulation=2),
        Case(kill="forward:17", option="stream"),
        Case(kill="boundary:4", ranks=2, option="stream"),
        Case(kill="boundary:5", ranks=2, option="stream", accumulation=2),
        Case(kill="forward:10", option="torn"),
        Case(kill="forward:10", option="beside"),
    )
    """PEFT, TRL, data without a length, a damaged save of Trainer's, nets beside the model."""


def test_the_callback_sets_youngs_interval() -> None:
    """sqrt(2 C M) for a save of 2 s and a failure in 3600 s: 120 s, at 0.5 s a step 240 steps."""
    pytest.importorskip("transformers")
    from transformers import TrainerControl, TrainerState

    from autockpt.integrations.huggingface import AutockptCallback

    now = [0.0]
    callback = AutockptCallback(mtbf_s=3600.0, clock=lambda: now[0])
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control)
    saved = []
    for step in range(1, 300):
        state.global_step, now[0] = step, now[0] + 0.5
        if callback.on_step_end(None, state, control).should_save:
            saved.append(step)
            now[0] += 2.0
            control.should_save = False
            callback.on_save(None, state, control)
    assert saved == [20, 260]
    assert callback.interval_steps == 240


def test_a_trainer_is_protected_once() -> None:
    """And one without these methods is refused by the name of the first that is missing."""
    pytest.importorskip("transformers")
    from autockpt.integrations.huggingface import protect
    from autockpt.values.errors import ConfigError

    with pytest.raises(ConfigError, match="has no get_train_dataloader; transformers 5 is needed"):
        protect(object())


SCRIPT = """
import os, signal, sys, torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from autockpt.integrations import huggingface

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def forward(self, x, labels=None):
        out = self.layer(x)
        return {"loss": (out - labels).square().mean(), "logits": out}

class Dies(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if "dies" in sys.argv and state.global_step > 1:
            link = trainer.autockpt._client  # a busy machine gives slots late
            link.wait_until(lambda: trainer.autockpt.ready, 60)
            if state.global_step == 30:
                link.wait_until(lambda: link.saves.memory_committed is not None, 60)
        if state.global_step == (30 if "dies" in sys.argv else 0 if "early" in sys.argv else -1):
            os.kill(os.getpid(), signal.SIGKILL)

class Average(TrainerCallback):
    mean = 5.0
    def state_dict(self):
        return {"mean": self.mean}
    def load_state_dict(self, state):
        self.mean = state["mean"]

class Odd(Average):
    def state_dict(self):
        return {"mean": object()}

data = [{"x": torch.randn(4), "labels": torch.randn(1)} for _ in range(80)]
own = [Dies()]
own += [Average()] if "average" in sys.argv else []
own += [Odd()] if "odd" in sys.argv else []
torch.manual_seed(0)
trainer = huggingface.protect(Trainer(
    model=Net(), train_dataset=data, callbacks=own,
    args=TrainingArguments(output_dir="own", use_cpu=True, report_to=[], disable_tqdm=True,
        per_device_train_batch_size=2, max_steps=40, save_strategy="no",
        remove_unused_columns=False, label_names=["labels"]),
), run_dir=None if "unnamed" in sys.argv else "run")
try:
    trainer.train(resume_from_checkpoint="again" in sys.argv or None)
except ValueError as error:
    print("refused", error)
    trainer.train()
restored = trainer.autockpt.restored
print("ended", trainer.state.global_step, "from", restored and restored.step)
print("means", [c.mean for c in own[1:]])
"""


def _start(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(SCRIPT)
    # The words say what fails, and make no other job of it.
    return subprocess.run(
        [sys.executable, "train.py", *words], cwd=folder, text=True, check=False, timeout=240,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "AUTOCKPT_SAME_JOB": "1"},
    )  # fmt: skip


def test_a_first_start_that_asks_to_resume_is_resumed_later(tmp_path: Path) -> None:
    """The script trains without a checkpoint where there is none: that is the first training."""
    pytest.importorskip("transformers")
    first = _start(tmp_path, "again", "dies")
    assert first.returncode == -signal.SIGKILL, first.stdout
    assert "refused No valid checkpoint found" in first.stdout
    assert not (tmp_path / "run" / "train-2").exists()
    second = _start(tmp_path, "again")
    assert "ended 40 from" in second.stdout, second.stdout
    assert "ended 40 from None" not in second.stdout
    assert "goes on from its own checkpoint of step" in second.stdout
    assert "refused" not in second.stdout


@pytest.mark.parametrize("words", [(), ("unnamed",)])
def test_a_kill_before_the_first_checkpoint_leaves_one_run(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """The script asks to resume, and begins where that is refused: always in the same run."""
    pytest.importorskip("transformers")
    first = _start(tmp_path, "again", "early", *words)
    assert first.returncode == -signal.SIGKILL, first.stdout
    second = _start(tmp_path, "again", "dies", *words)
    assert second.returncode == -signal.SIGKILL, second.stdout
    assert "refused No valid checkpoint found" in second.stdout
    third = _start(tmp_path, "again", *words)
    assert "ended 40 from" in third.stdout, third.stdout
    assert "ended 40 from None" not in third.stdout
    assert not [*tmp_path.rglob("train-?"), *tmp_path.rglob("attach-?")]


@pytest.mark.parametrize("style", ["seq2seq", "dpo", "reward", "merge", "stops"])
def test_a_killed_trainer_of_another_style(new_run: Callable[..., str], style: str) -> None:
    """Twice: parameters, optimizer, log lines and samples of every step, random numbers."""
    pytest.importorskip("transformers")
    options = {"STYLE": style, "KILL": "forward14,backward26"}
    require_undisturbed("huggingface_styles", new_run(), **options)


def test_callbacks_come_and_go_between_starts(tmp_path: Path) -> None:
    """One that the checkpoint lacks is named, as is one that cannot be saved."""
    pytest.importorskip("transformers")
    first = _start(tmp_path, "dies")
    assert first.returncode == -signal.SIGKILL, first.stdout
    second = _start(tmp_path, "average", "odd")
    assert second.returncode == 0, second.stdout
    assert "ended 40 from None" not in second.stdout
    assert "callback_Average: is not in the checkpoint; the training goes on" in second.stdout
    said = "callback_Odd: is not in the checkpoints, its state cannot be saved"
    assert second.stdout.count(said) == 1
    third = _start(tmp_path)
    assert third.returncode == 0, third.stdout
    assert "ended 40 from 40" in third.stdout


def test_a_trial_that_fails_is_not_begun_again() -> None:
    """Its error is its own, and no checkpoint of ours is asked for."""
    pytest.importorskip("transformers")
    from autockpt.integrations.huggingface import WRAPPED, protect

    begun: list[object] = []

    def train(resume: object, trial: object) -> None:
        begun.append(resume)
        trainer._init_training_state(1, 1, 1, resume, trial)
        raise ValueError("of the training")

    trainer = SimpleNamespace(
        callback_handler=SimpleNamespace(callbacks=[]),
        args=SimpleNamespace(gradient_accumulation_steps=1),
        **{name: lambda *_: (0, 0) for name in WRAPPED} | {"train": train},
    )
    protect(trainer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOCKPT_RESUME_FROM", "one")  # a checkpoint of ours may be there
        with pytest.raises(ValueError, match="of the training"):
            trainer.train("own", {"lr": 1})
    assert begun == ["own"]


def test_tensors_of_the_model_in_callbacks_are_no_loss() -> None:
    """They are in the checkpoint; a copy is not."""
    pytest.importorskip("transformers")
    from autockpt.integrations.huggingface import _unsaved

    class Keeps:
        def __init__(self, **kept: object) -> None:
            vars(self).update(kept)

    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    own = Keeps(
        net=net, part=net[0], weights=list(net.parameters()), layers={"last": net[1]},
        mean=net[1].running_mean,
    )  # fmt: skip
    copies = Keeps(copy=net[0].weight.detach().clone(), nets=[torch.nn.Linear(2, 2)])
    handler = SimpleNamespace(callbacks=[own, copies])
    trainer = SimpleNamespace(model=net, model_wrapped=net, callback_handler=handler)
    assert _unsaved(trainer) == [("Keeps", "copy"), ("Keeps", "nets")]


@pytest.mark.parametrize(
    ("batch", "window", "sizes", "end"),
    [
        (4, 1, [4, 4, 4, 4, 4, 4], 12),
        (1, 2, [4, 4, *[2] * 8], 22),
        (2, 3, [4, 4, 6, 6, 4], 9),
    ],
)
def test_other_batches_within_an_epoch(
    new_run: Callable[..., str], batch: int, window: int, sizes: list[int], end: int
) -> None:
    """Each sample is trained once; the end is named where it is not the one that was planned."""
    pytest.importorskip("transformers")
    run_dir = new_run()
    trained(FRAMEWORK, "huggingface", run_dir, batch=2, accumulation=2, stop=2)
    steps, said = trained(FRAMEWORK, "huggingface", run_dir, batch=batch, accumulation=window)
    assert [len(step) for step in each_epoch(steps)[0]] == sizes, said
    assert (f"2 epochs would end at step {end}" in said) == (end != 12), said


def test_a_larger_number_of_steps_goes_on_within_the_epoch(new_run: Callable[..., str]) -> None:
    """Trainer ended in its middle; the rest of its samples is trained."""
    pytest.importorskip("transformers")
    run_dir = new_run()
    trained(FRAMEWORK, "huggingface", run_dir, batch=4, accumulation=1, steps=4)
    steps, said = trained(FRAMEWORK, "huggingface", run_dir, batch=4, accumulation=1, steps=12)
    assert len(each_epoch(steps)) == 2, said


def test_a_start_keeps_its_own_arguments_and_forgets_a_model_that_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A patience that was raised counts; the end does not fail for the lost directory."""
    pytest.importorskip("transformers")
    from transformers import EarlyStoppingCallback, TrainerState

    from autockpt.integrations.huggingface import _Protection

    former, live = EarlyStoppingCallback(3), EarlyStoppingCallback(7)
    former.early_stopping_patience_counter = 2
    protection = object.__new__(_Protection)
    protection._trainer = trainer = SimpleNamespace(
        args=SimpleNamespace(eval_on_start=False), state=TrainerState(),
        callback_handler=SimpleNamespace(callbacks=[live]),
    )  # fmt: skip
    state = {"best_metric": 0.5, "best_model_checkpoint": str(tmp_path / "gone")}
    saved = {"state": state, "callbacks": [former.state()], "ended": True}
    protection._load(saved)
    assert not protection._saved["ended"]  # it had stopped by another patience
    assert (live.early_stopping_patience, live.early_stopping_patience_counter) == (7, 2)
    assert (trainer.state.best_metric, trainer.state.best_model_checkpoint) == (0.5, None)
    assert f"the best model is gone from {tmp_path / 'gone'}" in capsys.readouterr().out
    live.early_stopping_patience = 3
    protection._load(saved)
    assert protection._saved["ended"]
