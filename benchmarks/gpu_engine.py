"""`make bench-gpu-engine`: the engine on one GPU, a model whose state is 20 GB, in one command.

The example's GPT, computed in bf16 (autocast) over fp32 parameters, with a fused fp32 AdamW: 12
bytes of state a parameter.  autockpt takes a snapshot to host memory at **every** iteration and
every so many of them to disk; `torch.save` (blocking) and torch DCP async save once a segment.

**Link**: the plain copy of device memory into a registered host buffer, measured first and alone.
**Stall**: the device is idle, then the time until the training thread may go on, plus what the
fences blocked it; a fence's order on the device is in the end-to-end ratio, which sees everything.
**End-to-end**: segments with and without checkpoints in the order AB, BA, ..., until the training's
stream is idle; their ratio, paired in time, with a bootstrap bound.  `none` is the method's noise.
**Windows**: the same in a pipeline with gaps, lazily and in its idle windows (`gpu_windows`).

Without a GPU it says so and ends with 2; `--smoke` runs the same code small, on a CPU if need be.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants import Contestant, DcpAsync, Nothing, TorchSave
from benchmarks.harness import Row, bootstrap_upper, parse, publish, row
from benchmarks.job import EXAMPLE, Job

SIZES = {"1.7b": (2304, 28, 18)}  # 1.8e9 parameters, 21 GB of state; the others are the example's
NEVER = 10**9
STALL_SHARE, END_TO_END, LINK_SHARE, STALL_FACTOR = 0.02, 1.02, 0.9, 48.0
"""Targets: stall of an iteration, ratio, rate over the link's, the blocking writer's stall."""
SLOTS_WAIT_S = 180.0
DURABLE_WAIT_S = 180.0
DISK_STATES = 2.2
"""States that the disk must have room for: one kept, one being written."""


class DeviceJob(Job):
    """The example's model on a device; batches large enough for iterations of about half a second
    on an H200."""

    def __init__(self, size: str, tokens: int, batch: int, device: torch.device) -> None:
        spec = importlib.util.spec_from_file_location("gpt_example", EXAMPLE)
        assert spec is not None
        assert spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(example)
        example.SIZES.update(SIZES)
        torch.manual_seed(0)
        with device:  # 21 GB are drawn in a moment there, and in half a minute on the host
            self.model = example.GPT(size, tokens, 0.0)
            self.batch = torch.randint(0, 256, (batch, tokens + 1))
        self.device = device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.before_update: Callable[[], None] = lambda: None

    def iterate(self) -> None:
        """One iteration, as the example computes it with `--dtype bf16 --fused`."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.batch[:, :-1], self.batch[:, 1:])
        loss.backward()
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def rest(self) -> None:
        """Returns when the training is done: copies beside it may go on, as they do in a run."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


class Ours(Contestant):
    """autockpt through its public face: a snapshot at every boundary."""

    name = "autockpt"

    def __init__(self, job: Job, folder: Path, disk_every: int, *, schedule: Any = None) -> None:
        """`schedule`: of the copies; None: as autockpt does without being told."""
        super().__init__(job, folder)
        import autockpt
        from autockpt.values.goal import Goal, Pins, Retention

        pins = Pins(
            memory_interval_steps=1, disk_interval_steps=disk_every or NEVER, in_flight=1,
            retune=False, schedule=schedule,
        )  # fmt: skip
        os.environ["AUTOCKPT_NO_PROFILE"] = "1"
        self.session: Any = autockpt.attach(
            model=job.model, optimizer=job.optimizer, run_dir=str(folder / "run"),
            goal=Goal(pins=pins, retention=Retention(keep_last=1)),
        )  # fmt: skip
        self._before = 0.0

    def warm(self) -> None:
        """Waits for the slots: they are allocated, faulted and pinned once."""
        deadline = time.monotonic() + SLOTS_WAIT_S
        while not self.session.ready:
            if time.monotonic() > deadline:
                raise RuntimeError(f"autockpt: no slots within {SLOTS_WAIT_S:.0f} s")
            self.job.iterate()
            self.session.step()

    def begin(self) -> None:
        self._before = self.session.fence_stall_s
        self.session.step()

    def boundary(self) -> None:
        """Segments without a checkpoint have no boundary, and so none."""

    def stalled_s(self) -> float:
        return float(self.session.fence_stall_s) - self._before

    def finish(self) -> float:
        self.session.wait_for_staging()
        self.session.wait_durable(DURABLE_WAIT_S)
        return time.monotonic()

    def events(self, kind: type, since: float = 0.0) -> list[Any]:
        """What this run told, from CLOCK_MONOTONIC `since` on."""
        from autockpt.run_directory import RunDirectory

        told = RunDirectory.open(str(self.folder / "run")).events()
        return [event for event in told if isinstance(event, kind) and event.at_s >= since]

    def close(self) -> None:
        self.session.close(final_checkpoint=False)


@dataclass(slots=True)
class Figures:
    """What was measured of one contestant."""

    ratios: list[float] = field(default_factory=list)
    stalls_s: list[float] = field(default_factory=list)
    iterations_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """A benchmark that is cut short says less; one that is killed says nothing."""

    ends_s: float

    @property
    def passed(self) -> bool:
        """No further round is begun."""
        return time.monotonic() > self.ends_s


# --- the parts -----------------------------------------------------------------------------------


def link_rate(device: torch.device, nbytes: int, repeats: int = 7) -> list[float]:
    """Bytes/s of plain copies from device memory into registered host memory, nothing beside."""
    from autockpt.executors.linux.memory import Arena
    from autockpt.executors.snapshot.device import register_with_cuda

    arena = Arena.anonymous(nbytes)
    if device.type == "cuda" and not register_with_cuda(arena):
        raise SystemExit("bench-gpu-engine: the host buffer could not be registered with CUDA")
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    target = torch.frombuffer(arena.view, dtype=torch.uint8, count=nbytes)
    rates = []
    for _ in range(repeats + 1):
        rest(device)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        rest(device)
        rates.append(nbytes / (time.perf_counter() - began))
    del target
    arena.close()
    return rates[1:]


def rest(device: torch.device) -> None:
    """Returns when the device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def segment(job: DeviceJob, contestant: Contestant, iterations: int, *, saves: int) -> float:
    """Seconds of so many iterations, of which the first `saves` begin with a checkpoint."""
    job.rest()
    began = time.perf_counter()
    for i in range(iterations):
        if i < saves:
            contestant.begin()
        job.iterate()
    job.rest()
    return time.perf_counter() - began


def one_round(job: DeviceJob, contestant: Contestant, k: int, turn: int, into: Figures) -> None:
    """A segment with and one without, in turn first; what is left over is waited for outside."""
    saves = k if isinstance(contestant, Ours) else 1
    times = {}
    for with_saves in (True, False) if turn % 2 == 0 else (False, True):
        segment(job, contestant, 1, saves=0)
        times[with_saves] = segment(job, contestant, k, saves=saves if with_saves else 0)
        contestant.finish()
        rest(job.device)
    into.ratios.append(times[True] / times[False])
    into.iterations_s.append(times[False] / k)
    into.stalls_s += stalls(job, contestant, saves)
    contestant.finish()


def stalls(job: DeviceJob, contestant: Contestant, count: int) -> list[float]:
    """Seconds that the training thread is blocked by each of `count` checkpoints in a row."""
    found = []
    for _ in range(count):
        job.rest()
        began = time.perf_counter()
        contestant.begin()
        blocked = time.perf_counter() - began
        job.iterate()
        found.append(blocked + contestant.stalled_s())
    job.rest()
    return found


def measure(args: argparse.Namespace, folder: Path) -> tuple[list[Row], dict[str, Any]]:
    """Everything; the rows and what they were taken with."""
    deadline = Deadline(ends_s=time.monotonic() + args.limit_s)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)  # a smoke test shares the machine
    link = link_rate(device, args.link_mib * 2**20)
    job = DeviceJob(args.size, args.tokens, args.batch, device)
    for _ in range(3):
        job.iterate()
    state_bytes = sum(tensor.nbytes for tensor in job.tensors())
    room = shutil.disk_usage(folder).free > DISK_STATES * state_bytes
    disk_every = args.disk_every if room else 0
    say(f"state {state_bytes / 1e9:.1f} GB, link {max(link) / 1e9:.1f} GB/s")
    ours = Ours(job, folder / "autockpt", disk_every)
    ours.warm()
    quick = [Nothing(job, folder / "none"), ours]
    writers = [TorchSave(job, folder / "save"), DcpAsync(job, folder / "dcp")] if room else []
    began = time.monotonic()
    taken = {c.name: Figures() for c in [*quick, *writers]}
    run(job, quick, args, args.rounds, taken, deadline)
    told = seen(ours, began)
    ours.close()
    run(job, writers, args, args.writer_rounds, taken, deadline)
    del job, ours, quick, writers  # their device memory
    rows, windows = [], {}
    if not deadline.passed:
        from benchmarks.gpu_windows import measure_windows  # which imports this module

        rows, windows = measure_windows(args, folder / "windows", device)
    settings = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "size": args.size, "state_bytes": state_bytes, "tokens": args.tokens, "batch": args.batch,
        "iterations_per_segment": args.iterations, "disk_every": disk_every,
        "rounds": {name: len(one.ratios) for name, one in taken.items()},
        "link_bytes_per_s": link, **told, "windows": windows,
    }  # fmt: skip
    return [*to_rows(taken, link, told), *rows], settings


def run(
    job: DeviceJob, contestants: list[Any], args: argparse.Namespace, rounds: int,
    taken: dict[str, Figures], deadline: Deadline,
) -> None:  # fmt: skip
    """Rounds in turn; the first one allocates what is allocated once and does not count."""
    for turn in range(rounds + 1):
        for contestant in contestants:
            if turn > 1 and deadline.passed:
                say("the time is used up: fewer rounds")
                return
            figures = taken[contestant.name] if turn else Figures()
            one_round(job, contestant, args.iterations, turn, figures)
            say(f"round {turn} {contestant.name}: {figures.ratios[-1]:.4f} x")
            shutil.rmtree(contestant.folder / "dcp", ignore_errors=True)
            (contestant.folder / "state.pt").unlink(missing_ok=True)


def seen(ours: Ours, since: float) -> dict[str, Any]:
    """What the run's own telemetry says of the time that was measured."""
    from autockpt.values import telemetry as t

    sealed = ours.events(t.SnapshotSealed, since)
    return {
        "rates": [one.bytes / one.copy_s for one in sealed if one.copy_s],
        "sealed": len(sealed),
        "skipped": len(ours.events(t.SaveSkipped, since)),
        "discarded": len(ours.events(t.SnapshotDiscarded, since)),
        "durable": len(ours.events(t.CheckpointDurable, since)),
    }


def to_rows(taken: dict[str, Figures], link: list[float], told: dict[str, Any]) -> list[Row]:
    """The table, judged."""
    rows: list[Row] = []
    for name, one in taken.items():
        mine = name == Ours.name
        ratios = one.ratios
        rows.append(row(name, "end-to-end", ratios, "x", at_most=END_TO_END if mine else None))
        if ratios:
            bound = [bootstrap_upper(ratios)]
            rows.append(row(name, "end-to-end, 95 % bound", bound, "x"))
        if name != Nothing.name:
            rows.append(row(name, "stall", [s * 1e3 for s in one.stalls_s], "ms"))
    ours, save = taken[Ours.name], taken.get(TorchSave.name, Figures())
    iteration = sum(ours.iterations_s) / max(1, len(ours.iterations_s))
    shares = [s / iteration for s in ours.stalls_s]
    rows.append(row(Ours.name, "stall/iteration", shares, "x", at_most=STALL_SHARE))
    best = sorted(link)[len(link) // 2]
    rates = [rate / best for rate in told["rates"]]
    rows.append(row(Ours.name, "device to host / link", rates, "x", at_least=LINK_SHARE))
    mean = sum(ours.stalls_s) / max(1, len(ours.stalls_s))
    factors = [s / mean for s in save.stalls_s] if mean else []
    rows.append(row(Ours.name, "torch.save's stall / ours", factors, "x", at_least=STALL_FACTOR))
    asked = told["sealed"] + told["skipped"] + told["discarded"]
    note = "what was skipped or discarded cost less than it should" if told["skipped"] else ""
    share = [told["sealed"] / asked] if asked else []
    rows.append(row(Ours.name, "snapshots that were taken", share, "x", note=note))
    rows.append(row(Ours.name, "durable on disk meanwhile", [told["durable"]], ""))
    return rows


def say(text: str) -> None:
    """Progress, beside the table."""
    print(text, file=sys.stderr, flush=True)


def arguments(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--size", default="1.7b", help="of the model (1.7b: 21 GB of state)")
    parser.add_argument("--tokens", type=int, default=2048, help="of a sequence")
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--iterations", type=int, default=8, help="of a segment")
    parser.add_argument("--rounds", type=int, default=8, help="of ours and of none")
    parser.add_argument("--writer-rounds", type=int, default=2, help="of the others")
    parser.add_argument(
        "--link-mib", type=int, default=2048, help="of a copy that measures the link"
    )
    parser.add_argument("--disk-every", type=int, default=16, help="snapshots per disk checkpoint")
    parser.add_argument("--windows-size", default="350m", help="of the model with gaps")
    parser.add_argument("--gap-s", type=float, default=0.02, help="of its windows")
    parser.add_argument("--limit-s", type=float, default=400.0, help="no round begins after this")
    return parse(
        parser, argv, size="1m", tokens=64, batch=1, iterations=3, rounds=1, writer_rounds=1,
        windows_size="tiny", link_mib=64,
    )  # fmt: skip


def main() -> int:
    """Measures and publishes; 2 where there is no GPU."""
    args = arguments(sys.argv[1:])
    if not (torch.cuda.is_available() or args.smoke):
        print("bench-gpu-engine: no CUDA device here, nothing was measured (--smoke runs the same "
              "code on a CPU)", file=sys.stderr)  # fmt: skip
        return 2
    folder = Path(tempfile.mkdtemp(prefix="bench-gpu-engine-", dir=Path.cwd()))
    try:
        rows, settings = measure(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    publish("gpu_engine", rows, settings=settings, smoke=args.smoke)
    return 0


if __name__ == "__main__":
    sys.exit(main())
