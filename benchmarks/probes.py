"""`make bench-probes`: what the search for a few changed rows costs beside the copy it is part of.

A state of a table and layers is saved again and again, without probes and with them: the first ten
snapshots, which probe a tenth of the bytes each, and later ones, which probe a hundredth.  Shown
are the stall at the boundary and the time until the last byte is copied and compared.

    python -m benchmarks.probes [--mib 512]
"""

import argparse
import statistics
import time
from unittest import mock

import torch

from autockpt.executors.linux.memory import Arena, page_align
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.snapshot.tear_check import FIRST_SNAPSHOTS, Probe
from autockpt.executors.state.live_state import LiveState
from autockpt.values.table import markdown
from benchmarks.harness import parse

SLACK_BYTES = 2**18


def state_of(mib: int) -> LiveState:
    """A fifth of it is one table."""
    width, layers = 1024, max(1, mib // 5)
    table = torch.nn.Embedding(mib * 2**20 // 5 // 512, 128)
    rest = [torch.nn.Linear(width, width, bias=False) for _ in range(layers)]
    return LiveState.of(model=torch.nn.ModuleList([table, *rest]))


def save(shooter: Snapshotter, slot: Arena, count: int) -> tuple[list[float], list[float]]:
    """(stall at the boundary, until all is compared) in s, of each of `count` snapshots."""
    stalls, wholes = [], []
    for step in range(count):
        began = time.perf_counter()
        shooter.begin(slot, {"step": step}, lazy=True)
        stalls.append(time.perf_counter() - began)
        shooter.engine.wait()
        wholes.append(time.perf_counter() - began)
        if shooter.fence():
            raise RuntimeError("a state that nobody changes was found changed")
    return stalls, wholes


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--later", type=int, default=100, help="snapshots behind the first ten")
    given = parse(parser, mib=8, later=12)
    mib, later = given.mib, given.later
    torch.set_num_threads(1)
    shooter = Snapshotter(state_of(mib), memoryview(bytearray(64)))
    slot = Arena.anonymous(page_align(shooter.plan({"step": 0}).image_bytes) + SLACK_BYTES)
    with mock.patch.object(Probe, "next", return_value=[]):
        save(shooter, slot, 3)  # warm
        without = save(shooter, slot, later)
    first, rest = save(shooter, slot, FIRST_SNAPSHOTS), save(shooter, slot, later)
    shooter.close()
    print(f"{mib} MiB; means of {later} snapshots, of {FIRST_SNAPSHOTS} in the second row\n")
    rows = {"without probes": without, "first ten": first, "later": rest}
    cells = [
        (name, f"{statistics.mean(stalls) * 1e3:.2f} ms", f"{statistics.mean(wholes) * 1e3:.1f} ms")
        for name, (stalls, wholes) in rows.items()
    ]
    print("\n".join(markdown(("", "stall at the boundary", "copied and compared"), cells)))


if __name__ == "__main__":
    main()
