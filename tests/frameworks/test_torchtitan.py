"""The adapter contract for TorchTitan's manager, at the five points of its trainer."""

from typing import ClassVar

import pytest

from tests.contracts.adapter_contract import CASES, AdapterContract, Framework

FRAMEWORK = Framework("torchtitan", "tests/frameworks/torchtitan_driver.py", "torchtitan")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestTorchTitan(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    not_for: ClassVar[dict[str, str]] = {
        case.name: "the driver's loader is not divided among ranks"
        for case in CASES
        if case.ranks > 1
    }
