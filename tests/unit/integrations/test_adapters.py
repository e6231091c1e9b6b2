"""Adapters are loaded when they are asked for, and say what they lack."""

import sys

import pytest

import autockpt
from autockpt.integrations.adapters import ADAPTERS, adapter_of, is_there
from autockpt.values.errors import ConfigError


def test_each_adapter_is_there() -> None:
    """A line that is printed works with this autockpt."""
    assert all(map(is_there, ADAPTERS))


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
