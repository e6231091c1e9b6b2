"""The adapter contract in HuggingFace, with the real package."""

import pytest

from tests.contracts.adapter_contract import AdapterContract, Framework

FRAMEWORK = Framework("huggingface", "tests/frameworks/huggingface_driver.py", "transformers")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


class TestHuggingFace(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
