"""`make bench-overhead`: what a disk checkpoint every few iterations costs the training.

One process, one model, all contestants in turn, round after round.  A round of a contestant is a
segment of k iterations that begins with a checkpoint, a wait until that is durable (outside the
figures), and a segment of k iterations without any: the ratio of the two is the end-to-end cost,
paired within seconds so that the machine's drift cancels.

Figures: stall (training blocked), end-to-end ratio, slow-down of the iterations after the stall,
time to durable over a plain O_DIRECT write + fsync of the same bytes, CPU seconds per checkpoint.
`torch.save` is fsynced here after it returns, because it does not do so itself; torch DCP fsyncs
its data files.
"""

import argparse
import gc
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Row, publish, row
from benchmarks.job import Job


class Contestant:
    """A way to save; `begin` is the blocking part, `finish` returns when it is durable."""

    name = ""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.folder = folder
        folder.mkdir(parents=True)

    def begin(self) -> None:
        """Starts the checkpoint; the training is blocked meanwhile."""

    def boundary(self) -> None:
        """After every iteration."""

    def stalled_s(self) -> float:
        """Stall that `begin` does not show (at the fence), since `begin`."""
        return 0.0

    def finish(self) -> float:
        """Waits until durable; CLOCK_MONOTONIC at which it was."""
        return time.monotonic()

    def close(self) -> None:
        """Lets go."""


class Nothing(Contestant):
    """No checkpoint: shows the noise of the method."""

    name = "none"


class TorchSave(Contestant):
    """torch.save to a new file, fsynced."""

    name = "torch.save"

    def begin(self) -> None:
        path = self.folder / "state.pt"
        path.unlink(missing_ok=True)
        with open(path, "wb") as file:
            torch.save(self.job.state(), file)
            file.flush()
            os.fsync(file.fileno())
        self._done = time.monotonic()

    def finish(self) -> float:
        return self._done


class DcpSync(Contestant):
    """torch.distributed.checkpoint.save."""

    name = "torch DCP"

    def begin(self) -> None:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        dcp.save(self.job.state(), checkpoint_id=str(self.folder / "dcp"), no_dist=True)
        self._done = time.monotonic()

    def finish(self) -> float:
        return self._done


class DcpAsync(Contestant):
    """torch.distributed.checkpoint.async_save (thread), as documented."""

    name = "torch DCP async"

    def begin(self) -> None:
        import torch.distributed.checkpoint as dcp

        shutil.rmtree(self.folder / "dcp", ignore_errors=True)
        self._ended = [0.0]
        future: Any = dcp.async_save(
            self.job.state(), checkpoint_id=str(self.folder / "dcp"), no_dist=True
        )
        ended = self._ended

        def note(_: Any) -> None:
            ended[0] = time.monotonic()

        future.add_done_callback(note)
        self._future = future

    def finish(self) -> float:
        self._future.result()
        while not self._ended[0]:
            time.sleep(0.001)
        return self._ended[0]


class Ours(Contestant):
    """autockpt through its public face, digests and verification on."""

    name = "autockpt"

    def __init__(self, job: Job, folder: Path) -> None:
        super().__init__(job, folder)
        import autockpt
        from autockpt.values.goal import Goal, Pins, Retention

        never = 10**9
        pins = Pins(memory_interval_steps=never, disk_interval_steps=never, retune=False)
        os.environ["AUTOCKPT_NO_PROFILE"] = "1"
        self.session = autockpt.attach(
            model=job.model,
            optimizer=job.optimizer,
            run_dir=str(folder / "run"),
            goal=Goal(pins=pins, retention=Retention(keep_last=1)),
        )
        self._before = 0.0

    def warm(self) -> None:
        """Waits for the slots: they are allocated once, after the first step."""
        deadline = time.monotonic() + 120
        while not self.session.ready:
            if time.monotonic() > deadline:
                raise RuntimeError("autockpt: no slots within 120 s")
            self.job.iterate()
            self.session.step()

    def begin(self) -> None:
        self.session.save()
        self.session.step()
        self._before = self.session.fence_stall_s

    def boundary(self) -> None:
        self.session.step()

    def stalled_s(self) -> float:
        return self.session.fence_stall_s - self._before

    def finish(self) -> float:
        return self.session.wait_durable(120.0)

    def close(self) -> None:
        self.session.close(final_checkpoint=False)


CONTESTANTS: tuple[type[Contestant], ...] = (Nothing, Ours, TorchSave, DcpSync, DcpAsync)


def plain_write(tensors_bytes: int, folder: Path) -> float:
    """Seconds of a plain O_DIRECT write + fsync of the same bytes, two writers, 8 MiB."""
    from autockpt.executors.memory import Arena
    from autockpt.executors.persist import write_image

    arena = Arena.anonymous(tensors_bytes)
    path = folder / "plain"
    try:
        timing = write_image(
            str(path), arena.view[:tensors_bytes], writers=2, chunk_bytes=8 * 2**20, direct=True
        )
        return timing.total_s
    finally:
        path.unlink(missing_ok=True)
        arena.close()


def cpu_s() -> float:
    """CPU seconds of this process and, through /proc, of its keepers."""
    times = os.times()
    return times.user + times.system


def process_cpu_s(pid: int) -> float:
    """CPU seconds of another process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rsplit(b")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def segment(job: Job, contestant: Contestant, iterations: int) -> list[float]:
    """Times of `iterations` iterations."""
    times = []
    for _ in range(iterations):
        began = time.perf_counter()
        job.iterate()
        contestant.boundary()
        times.append(time.perf_counter() - began)
    return times


def one_round(job: Job, contestant: Contestant, k: int, keeper: int | None) -> dict[str, float]:
    """A segment with a checkpoint and one without."""
    gc.collect()
    segment(job, contestant, 1)
    extra = (lambda: process_cpu_s(keeper)) if keeper else (lambda: 0.0)
    cpu = cpu_s() + extra()
    began, began_monotonic = time.perf_counter(), time.monotonic()
    contestant.begin()
    stall = time.perf_counter() - began
    with_save = segment(job, contestant, k)
    total_with = time.perf_counter() - began
    fence = contestant.stalled_s()
    durable = contestant.finish() - began_monotonic
    cpu_with = cpu_s() + extra() - cpu
    segment(job, contestant, 1)
    cpu = cpu_s() + extra()
    without = segment(job, contestant, k)
    cpu_without = cpu_s() + extra() - cpu
    quiet = statistics.fmean(without)
    return {
        "stall": stall + fence,
        "stall_share": (stall + fence) / quiet,
        "ratio": total_with / sum(without),
        "slowdown": (sum(with_save) - fence) / sum(without),
        "durable": durable,
        "cpu": cpu_with - cpu_without,
        "iteration": quiet,
    }


def main() -> None:
    """Runs all contestants and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--size", default="60m")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--every", type=int, default=4, help="iterations per checkpoint")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="compute threads")
    parser.add_argument("--only", nargs="*", default=None, help="contestants by name")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = Path(tempfile.mkdtemp(prefix="bench-overhead-", dir=os.getcwd()))
    try:
        rows, settings = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("overhead", rows, settings=settings)


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """All rounds; the rows and what they were taken with."""
    job = Job(args.size, args.tokens)
    for _ in range(3):
        job.iterate()
    state_bytes = sum(tensor.nbytes for tensor in job.tensors())
    chosen = [c for c in CONTESTANTS if not args.only or c.name in args.only]
    samples: dict[str, list[dict[str, float]]] = {c.name: [] for c in chosen}
    plain: list[float] = []
    alive = [c(job, folder / c.name.replace(" ", "-")) for c in chosen]
    keeper = None
    for contestant in alive:
        if isinstance(contestant, Ours):
            contestant.warm()
            keeper = contestant.session.keeper_pid
    for turn in range(args.rounds + 1):
        plain.append(plain_write(state_bytes, folder))
        for contestant in alive:
            pid = keeper if isinstance(contestant, Ours) else None
            figures = one_round(job, contestant, args.every, pid)
            if turn:  # the first round allocates what is allocated once
                samples[contestant.name].append(figures)
            print(
                f"round {turn} {contestant.name:<16} "
                + " ".join(f"{key}={value:.4f}" for key, value in figures.items()),
                file=sys.stderr,
                flush=True,
            )
    for contestant in alive:
        contestant.close()
    settings = {
        "size": args.size,
        "state_bytes": state_bytes,
        "checkpoint_every_iterations": args.every,
        "compute_threads": args.threads,
        "rounds": args.rounds,
        "iteration_s": statistics.median(s["iteration"] for r in samples.values() for s in r),
        "plain_write_s": statistics.median(plain[1:]),
    }
    return to_rows(samples, plain[1:]), settings


def to_rows(samples: dict[str, list[dict[str, float]]], plain: list[float]) -> list[Row]:
    """The table: the target of the first release is an end-to-end ratio of 1.10."""
    floor = statistics.median(plain)
    rows: list[Row] = []
    for name, taken in samples.items():
        ours = name == Ours.name
        limit = 1.10 if ours else None
        rows.append(row(name, "end-to-end", [s["ratio"] for s in taken], "x", at_most=limit))
        if name == Nothing.name:
            continue
        rows.append(row(name, "stall", [s["stall"] * 1e3 for s in taken], "ms"))
        rows.append(row(name, "stall/iteration", [s["stall_share"] for s in taken], "x"))
        rows.append(row(name, "slow-down after", [s["slowdown"] for s in taken], "x"))
        rows.append(row(name, "durable/plain write", [s["durable"] / floor for s in taken], "x"))
        rows.append(row(name, "CPU per checkpoint", [s["cpu"] for s in taken], "s"))
    return rows


if __name__ == "__main__":
    main()
