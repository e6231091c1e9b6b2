"""Adapters are loaded when they are asked for, and say what they lack."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import autockpt
from autockpt.cli.jobs.script_hints import advice
from autockpt.integrations.adapters import ADAPTERS, Adapter, adapter_of, is_there
from autockpt.values.errors import ConfigError


def test_each_adapter_is_there() -> None:
    """A line that is printed works with this autockpt."""
    assert all(map(is_there, ADAPTERS))


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda one: one.framework)
def test_each_adapter_is_a_module_of_its_public_name(adapter: Adapter) -> None:
    """`from autockpt.integrations.ray import attach` is as good as the attribute."""
    assert adapter.line.count("autockpt.integrations.") <= 1
    for public in re.findall(r"autockpt\.integrations\.(\w+)", adapter.line):
        assert importlib.util.find_spec(f"autockpt.integrations.{public}"), public
        assert public == adapter.module


@pytest.mark.parametrize("asked", ["lightning.Autockpt", "ray.attach"])
def test_a_missing_framework_is_named_where_a_name_is_imported(asked: str) -> None:
    """Also of an adapter that is a package: it imports its framework at the first name."""
    module, _, name = asked.partition(".")
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        f"from autockpt.integrations.{module} import {name}"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert f"pip install 'autockpt[{module}]'" in done.stderr


def test_a_missing_framework_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with a traceback of an import."""
    monkeypatch.delitem(sys.modules, "autockpt.integrations.huggingface", raising=False)
    monkeypatch.delitem(vars(autockpt.integrations), "huggingface", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"pip install 'autockpt\[huggingface\]'"):
        _ = autockpt.integrations.huggingface


def test_an_unknown_integration_is_an_attribute_error() -> None:
    """As of any module."""
    with pytest.raises(AttributeError, match="no attribute 'keras'"):
        _ = autockpt.integrations.keras


def test_a_script_that_only_loads_weights_trains_elsewhere() -> None:
    """`transformers` for its models alone is no Trainer."""
    assert adapter_of("from transformers import GPT2Config\nmodel = GPT2Config()") is None


def test_the_engine_is_the_first_that_initialize_returns() -> None:
    """Its name stands in the line that `autockpt run` prints."""
    source = "import deepspeed\nengine, _, _, _ = deepspeed.initialize(model=net)"
    found = adapter_of(source)
    assert found is not None
    assert (found[0].framework, found[1]) == ("DeepSpeed", "engine")
    assert autockpt.integrations.deepspeed.protect is not None


HF = "Hugging Face Trainer"
SCRIPTS = {
    "a trainer": (HF, "from transformers import Trainer\nt = Trainer(m)", "protect(t)"),
    "in a method": (HF, "import transformers as h\nimport transformers\nclass A:\n"
                    " def f(self): self.t = h.Seq2SeqTrainer(m)", "protect(self.t)"),
    "with a type": (HF, "from trl import SFTTrainer\nt: SFTTrainer = SFTTrainer(m)", "protect(t)"),
    "a class of its own": (HF, "from transformers import Trainer\nclass Mine(Trainer): pass\n"
                           "class Other(Mine): pass\nt = Other(m)", "protect(t)"),
    "without a name": (HF, "from transformers import Trainer\nTrainer(m).train()",
                       "protect(trainer)"),
    "Accelerate": ("Accelerate", "import accelerate\na = accelerate.Accelerator()", "attach(a)"),
    "Lightning": ("Lightning Trainer", "import pytorch_lightning as pl\nt = pl.Trainer()",
                  "callbacks=[autockpt.integrations.lightning.Autockpt()]"),
    "its command line": ("Lightning CLI", "from lightning.pytorch.cli import LightningCLI\n"
                         "LightningCLI(M)", "trainer_defaults={"),
    "Fabric": ("Lightning Fabric", "import lightning as L\nf = L.Fabric()", "attach(f,"),
    "Ignite": ("Ignite Engine", "from ignite.engine import Engine\ne = Engine(f)", "attach(e,"),
    "DeepSpeed": ("DeepSpeed", "import deepspeed\nengine, *_ = deepspeed.initialize(model=m)",
                  "protect(engine)"),
    "Ray": ("Ray Train", "import ray.train.torch\nray.train.torch.TorchTrainer(f).fit()",
            "integrations.ray.attach("),
    "TorchTitan": ("TorchTitan", "from torchtitan.config import Config\nt = config.build()",
                   "AutockptCheckpointManager.Config(enable=True)"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SCRIPTS)
def test_an_unprotected_script_gets_the_line_of_its_framework(shape: str, tmp_path: Path) -> None:
    """With the names of the script; the line is Python."""
    framework, source, part = SCRIPTS[shape]
    script = tmp_path / "train.py"
    script.write_text(source)
    said = advice(str(script))
    assert f"it trains with {framework}. " in said
    (line,) = [one for one in said.splitlines() if one.startswith("    ")]
    assert part in line
    ast.parse(line.strip())


@pytest.mark.parametrize(
    ("source", "part"),
    [
        ("from stable_baselines3 import PPO\nPPO('MlpPolicy', e).learn(9)", "reinforcement.md"),
        ("from megatron.training import pretrain\npretrain(a, b, c)", "plan --for megatron"),
        ("from composer import Trainer\nTrainer(model=m).fit()", "Composer, which has no adapter"),
    ],
)
def test_a_framework_without_an_adapter_is_named(source: str, part: str, tmp_path: Path) -> None:
    """With what there is instead, and no line that would do nothing."""
    script = tmp_path / "train.py"
    script.write_text(source)
    said = advice(str(script))
    assert part in said
    assert "autockpt.attach(" not in said
