"""The adapter contract in Accelerate, with the real package."""

import pytest

from tests.contracts.adapter_contract import AdapterContract, Framework
from tests.contracts.adapter_process import Case

FRAMEWORK = Framework("accelerate", "tests/frameworks/accelerate_driver.py", "accelerate")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestAccelerate(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
    more = (
        Case(kill="boundary:3", ranks=2, option="split_batches"),
        Case(kill="boundary:3", ranks=2, option="dispatch_batches"),
        Case(kill="forward:14", option="use_seedable_sampler"),
    )
