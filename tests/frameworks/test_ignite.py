"""Engines that are killed end as undisturbed ones do."""

from collections.abc import Callable
from typing import ClassVar

import pytest

from tests.contracts.adapter_contract import BY_MICRO_BATCH, LATER, AdapterContract, Framework
from tests.frameworks.undisturbed import require_undisturbed

pytest.importorskip("ignite", reason="Ignite is not installed: make test-frameworks")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class TestIgnite(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = Framework("ignite", "tests/frameworks/ignite_driver.py", "ignite")
    not_for: ClassVar[dict[str, str]] = BY_MICRO_BATCH
    more = LATER


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"KILL": "batch13,backward21", "DRAW": "1"}, id="at a step and in backward"),
        pytest.param({"KILL": "batch10,epoch2"}, id="at the edge of an epoch"),
        pytest.param({"KILL": "batch13", "SIGNAL": "SIGTERM"}, id="an announced end"),
    ],
)
def test_a_killed_engine(new_run: Callable[..., str], options: dict[str, str]) -> None:
    """Iteration, epoch and what the script registered; samples of every step."""
    require_undisturbed("ignite_training", new_run(), **options)
