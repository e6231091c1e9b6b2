"""FastPersist's way of writing against one writer through the page cache: the same bytes, durable.

Both are the executors' own `write_image` with the staging of the two presets, in turn, each into a
new file that is fsynced before it counts.
"""

import os
from pathlib import Path

from autockpt.executors.linux.memory import Arena
from autockpt.executors.storage.shard_file import write_image
from autockpt.policies.default_plan import plan_without_profile
from autockpt.policies.policy_file import load_policy
from autockpt.values.plan import Staging


def staging_of(preset: str) -> Staging:
    """How a preset writes."""
    return plan_without_profile(load_policy(f"builtin:{preset}").goal).staging


def measure(nbytes: int, folder: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds until durable by preset; the first round is dropped."""
    arena = Arena.anonymous(nbytes)
    arena.view[:] = os.urandom(2**20) * (arena.nbytes // 2**20) + bytes(arena.nbytes % 2**20)
    taken: dict[str, list[float]] = {"sync": [], "fastpersist": []}
    try:
        for _ in range(rounds + 1):
            for preset, samples in taken.items():
                samples.append(_write_s(arena, folder / "image", staging_of(preset)))
    finally:
        arena.close()
    return {preset: samples[1:] for preset, samples in taken.items()}


def _write_s(arena: Arena, path: Path, staging: Staging) -> float:
    try:
        timing = write_image(
            str(path), arena.view, writers=staging.writers, chunk_bytes=staging.chunk_bytes,
            direct=staging.direct_io,
        )  # fmt: skip
    finally:
        path.unlink(missing_ok=True)
    return timing.total_s
