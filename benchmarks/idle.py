"""`make bench-idle`: what an attached session costs the thread that trains, apart from copies.

Where nothing is due: microseconds of an iteration boundary by itself, and the ratio of a training
loop with a session to the same loop without one, in alternating segments of one process.  Where a
snapshot begins at every iteration: CPU of its boundary and its fence on the thread that trains,
after a wait of 4 ms and an optimizer's step, so with cold caches.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch

from autockpt.executors.linux.memory import Arena
from autockpt.executors.snapshot.snapshotter import Snapshotter
from autockpt.executors.state.live_state import LiveState
from benchmarks.harness import parse, publish, row
from benchmarks.job import Job


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--segments", type=int, default=40)
    parser.add_argument("--iterations", type=int, default=25)
    parser.add_argument("--snapshots", type=int, default=300)
    args = parse(parser, segments=2, iterations=5, snapshots=20)
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="bench-idle-", dir=os.getcwd()))
    try:
        boundary_us, ratios = measure(args.segments, args.iterations, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish(
        "idle",
        [
            row("autockpt", "boundary", boundary_us, "us", at_most=50.0),
            row("autockpt", "iteration with/without", ratios, "x", at_most=1.01),
            *(
                row(
                    "autockpt",
                    f"snapshot of {4 * layers} tensors",
                    snapshots(layers, args.snapshots),
                    "us",
                    at_most=at_most,
                )
                for layers, at_most in ((12, 300.0), (55, 800.0))
            ),
        ],
        settings={
            "segments": args.segments,
            "iterations": args.iterations,
            "snapshots": args.snapshots,
        },
        smoke=args.smoke,
    )


def measure(segments: int, iterations: int, folder: Path) -> tuple[list[float], list[float]]:
    """(microseconds per boundary, with/without ratios per pair of segments)."""
    import autockpt
    from autockpt.values.goal import Goal, Pins

    never = 10**9
    os.environ["AUTOCKPT_NO_PROFILE"] = "1"
    job = Job("1m", 32)
    job.iterate()
    session = autockpt.attach(
        model=job.model,
        optimizer=job.optimizer,
        run_dir=str(folder / "run"),
        goal=Goal(pins=Pins(memory_interval_steps=never, disk_interval_steps=never, retune=False)),
    )
    for _ in range(10):
        job.iterate()
        session.step()
    ratios = []
    for _ in range(segments):
        began = time.perf_counter()
        for _ in range(iterations):
            job.iterate()
            session.step()
        middle = time.perf_counter()
        for _ in range(iterations):
            job.iterate()
        ratios.append((middle - began) / (time.perf_counter() - middle))
    boundaries = []
    for _ in range(200):
        began = time.perf_counter()
        for _ in range(10):
            session.step()
        boundaries.append((time.perf_counter() - began) / 10 * 1e6)
    session.close(final_checkpoint=False)
    return [statistics.median(boundaries)], ratios


def snapshots(layers: int, count: int) -> list[float]:
    """CPU of boundary and fence on this thread, us, of each snapshot; four tensors a layer."""
    model = torch.nn.Sequential(*(torch.nn.Linear(96, 96, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = LiveState.of(model=model, optimizer=optimizer)
    snapshotter = Snapshotter(state, memoryview(bytearray(16)))
    layout = snapshotter.plan({"step": 0})
    slots = [Arena.anonymous(layout.image_bytes + 2**16) for _ in range(2)]
    took = []
    for step in range(count):
        began = time.thread_time()
        snapshotter.begin(slots[step % 2], {"step": step}, lazy=True)
        boundary = time.thread_time() - began
        time.sleep(0.004)
        began = time.thread_time()
        changed = snapshotter.fence(optimizer)
        took.append((boundary + time.thread_time() - began) * 1e6)
        assert not changed, changed
        optimizer.step()
    snapshotter.close()
    return took[count // 10 :]


if __name__ == "__main__":
    main()
