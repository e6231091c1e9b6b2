"""The adapter contract in HuggingFace, with the real package."""

import pytest

from tests.contracts.adapter_contract import EDGE, AdapterContract, Framework
from tests.contracts.adapter_process import Case

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
