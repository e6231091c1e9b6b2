"""The adapter contract in Ray Train, with the real package: Ray starts the workers again."""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.contracts.adapter_contract import ROOT, AdapterContract, Framework

FRAMEWORK = Framework("ray", "tests/frameworks/ray_driver.py", "ray", launches=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(bool(FRAMEWORK.missing), reason=FRAMEWORK.missing),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One for all cases: a start of Ray takes longer than a training."""
    command = [FRAMEWORK.python, str(ROOT / "tests" / "frameworks" / "ray_cluster.py"), "2"]
    # A token of this cluster's own: Ray asks drivers for one, and else keeps one in the home.
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {
        **os.environ, **given, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "AUTOCKPT_NO_PROFILE": "1",
    }  # fmt: skip
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=sys.stderr,
    ) as process:  # fmt: skip
        assert process.stdin is not None
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("address ")).split()[1]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**given, "RAY_ADDRESS": address}.items():
                patch.setenv(name, value)
            yield
        process.stdin.close()


class TestRay(AdapterContract):
    """Killed anywhere, it ends as if nothing had happened."""

    framework = FRAMEWORK
