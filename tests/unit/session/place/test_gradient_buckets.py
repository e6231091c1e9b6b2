"""Three ranks in DDP sum gradients after a restart in the order of the run that went on."""

import json
import subprocess
import sys
from pathlib import Path

from autockpt.session.place.gradient_buckets import GradientBuckets
from tests.unit.cli.scripts import environment
from tests.unit.session.place.gradient_ranks import OPTIONS, WRAPPED_AGAIN


def test_a_model_that_is_wrapped_anew_trains_to_the_same_bits(tmp_path: Path) -> None:
    """With the buckets put back; without, last bits differ, in the iteration behind a restart."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.session.place.gradient_ranks", str(tmp_path)],
        env=environment(OMP_NUM_THREADS="1"), capture_output=True, text=True, timeout=240,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(3):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert set(found) == {*OPTIONS, "hook"}
        for case, digests in found.items():
            assert digests["kept"] == digests["late"] == digests["no"], case
            assert digests["torn"] == digests["plain"], case
            assert digests["plain"][:WRAPPED_AGAIN] == digests["no"][:WRAPPED_AGAIN], case
        assert any(each["plain"] != each["no"] for each in found.values())


def test_one_process_has_no_buckets_to_keep() -> None:
    """Nothing is searched, and what another number of ranks has stored is passed over."""
    buckets = GradientBuckets({}, has_trained=lambda: False)
    assert buckets.layouts() == {}
    assert buckets.put_back({"model": [[0]]}) == []
