"""`make bench-integrity-peers`: damage and sudden death against the common ways to checkpoint.

Rot: one random bit of a random file of a checkpoint is flipped, then it is loaded.  Loading either
fails (found), gives the numbers that were saved (harmless), or others without a word (silent).
Kills: SIGKILL at a random instant while a second checkpoint is written where the first one stands,
then whatever is there is loaded: one of the two as a whole, or nothing, or a mixture.
"""

import argparse
import logging
import os
import random
import shutil
import signal
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from benchmarks.harness import Row, parse, publish

State = dict[str, torch.Tensor]
TENSORS = 8


@dataclass(frozen=True, slots=True)
class Way:
    """How one of them saves to a folder and loads from it."""

    name: str
    save: Callable[[Path, State], object]
    load: Callable[[Path, State], State]
    """The second argument is an empty state of the same form."""
    trap: str
    package: str = "torch"
    """That it needs."""


def main() -> None:
    """Measures and publishes."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--flips", type=int, default=400)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    args = parse(parser, flips=4, kills=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable()  # torch logs a traceback for every damaged file
    folder = Path(tempfile.mkdtemp(prefix="bench-integrity-", dir=os.getcwd()))
    present = [way for way in ways() if find_spec(way.package)]
    rows: list[Row] = []
    try:
        for way in present:
            rng = random.Random(f"{args.seed}/{way.name}")
            rows += shares(way.name, "rot", rot(way, folder, args.flips, rng), "silent")
            rows += shares(way.name, "kill", kills(way, folder, args.kills, rng), "nothing left")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    notes = {
        way.name: way.trap if way in present else f"not measured: {way.package} is not installed"
        for way in ways()
        if way.trap
    }
    settings = {"flips": args.flips, "kills": args.kills, "seed": args.seed}
    publish("integrity_peers", rows, settings=settings, notes=notes, smoke=args.smoke)


def shares(name: str, attack: str, seen: Counter[str], bad: str) -> list[Row]:
    """A row for every end; of autockpt none may be bad."""
    total = sum(seen.values())
    kinds = {"rot": ("found", "harmless", "silent"), "kill": ("whole", "nothing left", "mixed")}
    judged = name == "autockpt"
    return [
        Row(
            contestant=name, figure=f"{attack}: {kind}", value=seen[kind], unit=f"of {total}",
            n=total, target="<= 0" if judged and kind in (bad, "mixed") else "",
            met=seen[kind] == 0 if judged and kind in (bad, "mixed") else None,
        )
        for kind in kinds[attack]
    ]  # fmt: skip


def state_of(seed: int, size: int) -> State:
    """Random numbers."""
    generator = torch.Generator().manual_seed(seed)
    return {f"layer.{i}": torch.randn(size, generator=generator) for i in range(TENSORS)}


def rot(way: Way, folder: Path, flips: int, rng: random.Random) -> Counter[str]:
    """How loading ends after each of so many flips."""
    place = folder / "rot"
    saved = state_of(1, 2048)
    place.mkdir()
    way.save(place, saved)
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.stat().st_size]
    seen: Counter[str] = Counter()
    for _ in range(flips):
        path = rng.choices(files, weights=[file.stat().st_size for file in files])[0]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        seen[_loaded(way, place, [saved], "found", "silent", "harmless")] += 1
        path.write_bytes(whole)
    shutil.rmtree(place)
    return seen


def kills(way: Way, folder: Path, count: int, rng: random.Random) -> Counter[str]:
    """What is left after each of so many kills."""
    place, first, second = folder / "kill", state_of(1, 2**17), state_of(2, 2**17)
    seen: Counter[str] = Counter()
    lasts_s = 0.0
    for number in range(count + 1):
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        way.save(place, first)
        began = time.monotonic()
        pid = os.fork()
        if not pid:
            _save_and_die(way, place, second)
        if not number:  # how long it takes
            os.waitpid(pid, 0)
            lasts_s = time.monotonic() - began
            continue
        time.sleep(rng.uniform(0.0, lasts_s))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        seen[_loaded(way, place, [first, second], "nothing left", "mixed", "whole")] += 1
    shutil.rmtree(place, ignore_errors=True)
    return seen


def _save_and_die(way: Way, place: Path, state: State) -> None:
    try:
        way.save(place, state)
    finally:
        os._exit(0)


def _loaded(
    way: Way, place: Path, expected: list[State], failed: str, other: str, same: str
) -> str:
    empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected[0].items()}
    try:
        found = way.load(place, empty)
    except (Exception, CheckpointException):  # however it says so
        return failed
    return same if any(_equal(found, state) for state in expected) else other


def _equal(found: State, state: State) -> bool:
    return found.keys() == state.keys() and all(torch.equal(found[n], state[n]) for n in state)


def ways() -> list[Way]:
    """Ours, then the others, each as its documentation says."""
    return [
        Way("autockpt", _save_ours, _load_ours, ""),
        Way(
            "torch.save", lambda folder, state: torch.save(state, folder / "model.pt"),
            lambda folder, _: torch.load(folder / "model.pt", weights_only=True),
            "onto the same file; no fsync",
        ),
        Way("safetensors", _save_safetensors, _load_safetensors, "onto the same file",
            "safetensors"),
        Way("torch DCP", _save_dcp, _load_dcp, "onto the same directory, without ranks"),
    ]  # fmt: skip


def _save_ours(folder: Path, state: State) -> None:
    from autockpt.integrations.dcp.storage_writer import GenerationWriter

    writer = GenerationWriter(folder / "checkpoints")
    dcp.save({"model": dict(state)}, storage_writer=writer, no_dist=True)
    writer.close()


def _load_ours(folder: Path, _: State) -> State:
    import autockpt

    found: State = autockpt.load(str(folder / "checkpoints"))["model"]
    return found


def _save_safetensors(folder: Path, state: State) -> None:
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")


def _load_safetensors(folder: Path, _: State) -> State:
    from safetensors.torch import load_file

    found: State = load_file(folder / "model.safetensors")
    return found


def _save_dcp(folder: Path, state: State) -> None:
    dcp.save(dict(state), checkpoint_id=str(folder / "dcp"), no_dist=True)


def _load_dcp(folder: Path, empty: State) -> State:
    dcp.load(empty, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return empty


if __name__ == "__main__":
    main()
