"""A checkpoint with right digests and a malformed skeleton is refused as corrupt, by its field."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import xxhash

import autockpt
from autockpt.values.errors import CorruptCheckpointError

JOB = """
import torch, autockpt
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
ckpt = autockpt.attach(model=model, optimizer=optimizer, run_dir="r", data="script")
for step in ckpt.steps(3):
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""
Path("job.py").write_text(JOB)
subprocess.run(
    [sys.executable, "job.py"], check=True, env={**os.environ, "AUTOCKPT_NO_PROFILE": "1"}
)
folder = max(Path("r/checkpoints").glob("ckpt-*"))  # the newest


def compact(data):
    return json.dumps(data, separators=(",", ":"))


commit_text = (folder / "COMMIT").read_text()
row = json.loads(commit_text)["records"][0]
index_text = (folder / row["index"]).read_text()
first_image = (folder / row["file"]).read_bytes()


def reseal(change):
    """Change the skeleton, and make every digest right again."""
    commit, index, image = json.loads(commit_text), json.loads(index_text), bytearray(first_image)
    base = 8 + struct.unpack("<Q", image[:8])[0]
    start, stop = json.loads(image[8:base])["__extra"]["data_offsets"]
    skeleton = json.loads(image[base + start : base + stop])
    change(skeleton)
    image[base + start : base + stop] = compact(skeleton).encode().ljust(stop - start)
    size, head = index["chunk_bytes"], index["head_bytes"]
    chunks = [image[i : i + size] for i in range(0, len(image), size)]
    index["digests"] = [xxhash.xxh3_128_hexdigest(chunk) for chunk in chunks]
    if head:
        index["head_digest"] = xxhash.xxh3_128_hexdigest(image[:head])
    lines = [
        "autockpt-image-1",
        index["run_id"],
        folder.name,
        0,
    ]
    lines += [index[k] for k in ("world_size", "layout_digest", "image_bytes", "chunk_bytes")]
    lines += [*index["digests"], index["head_bytes"], index["head_digest"]]
    root = hashlib.sha256("\n".join(map(str, lines)).encode()).hexdigest()
    commit["records"][0]["root"] = root
    commit["digest"] = hashlib.sha256(compact({**commit, "digest": ""}).encode()).hexdigest()
    (folder / row["file"]).write_bytes(image)
    (folder / row["index"]).write_text(compact(index))
    (folder / "COMMIT").write_text(compact(commit))


reseal(lambda skeleton: None)
autockpt.load("r/checkpoints")
changes = {
    "others": {"others": None},
    "others ": {"others": []},
    "optimizers": {"optimizers": "x"},
    "optimizers ": {"optimizers": 1.5},
    "rng": {"rng": {"torch": {"$tensor": []}}},
}
for field, change in changes.items():
    reseal(lambda skeleton, change=change: skeleton.update(change))
    told = "it loads"
    try:
        autockpt.load("r/checkpoints")
    except CorruptCheckpointError as error:
        told = f"{type(error).__name__}: {error}"
    if "CorruptCheckpointError" not in told or field.strip() not in told:
        sys.exit(f"expected a CorruptCheckpointError that names {field}, got: {told}")
