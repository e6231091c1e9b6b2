"""The adapter contract in DeepSpeed, with the real package on the CPU."""

import pytest

from tests.contracts.adapter_contract import AdapterContract, Framework
from tests.contracts.adapter_process import Case

FRAMEWORK = Framework("deepspeed", "tests/frameworks/deepspeed_driver.py", "deepspeed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestDeepSpeed(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened; ZeRO-2, where no option says more."""

    framework = FRAMEWORK
    more = (
        Case(kill="sigterm:9", option="zero0"),
        Case(kill="boundary:12", option="zero1"),
        Case(kill="boundary:5", ranks=2, option="zero1"),
        Case(kill="backward:9", option="bf16"),
        Case(kill="forward:15", option="fp16"),
    )
