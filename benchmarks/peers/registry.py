"""Who takes part: name, adapter, packages, and what a reader must know about the figures.

Pure data, importable without any of the packages.  `note` is the contestant's trap: what it does
not do, or does otherwise than its name says.  It stands beside its figures wherever they appear.
"""

from dataclasses import dataclass
from typing import Literal

from benchmarks.peers.environments import Needs

Mode = Literal["one", "every"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One contestant."""

    name: str
    adapter: str
    """module:Class below benchmarks.peers."""
    note: str = ""
    """Its trap, shown with the figures."""
    needs: Needs | None = None
    """What its own environment holds; None: it runs beside torch alone, in ours."""
    source_only: str = ""
    """Module of a peer that no index has: it runs where that is importable."""
    kind: Literal["nothing", "reference", "ours", "sync", "async"] = "async"
    """sync: the training stands still until the file is written."""
    durable: bool = True
    """False: what it calls saved does not survive the loss of power; it is in no "best peer"."""


NO_FSYNC = "does not fsync: the harness does after it, and counts it until durable"

ENTRIES: tuple[Entry, ...] = (
    Entry(
        name="none",
        adapter="reference:Nothing",
        kind="nothing",
        note="no checkpoint at all: its ratio is the noise of the method",
    ),
    Entry(
        name="autockpt",
        adapter="ours:OnDemand",
        kind="ours",
        note="digests, proof of the copy, commit and read-back on; the read-back's CPU seconds"
        " count",
    ),
    Entry(
        name="floor",
        adapter="reference:Floor",
        kind="reference",
        note="written here, not a peer: one slot, no digests, no commit, overwrites two files in"
        " turn (faster than new files); what the hardware allows",
    ),
    Entry(
        name="plain write",
        adapter="reference:PlainWrite",
        kind="reference",
        note="no snapshot: a helper writes as many bytes with O_DIRECT + fsync to a new file while"
        " the job trains; the denominator of time to durable",
    ),
    Entry(
        name="autockpt every iteration",
        adapter="ours:EveryIteration",
        kind="ours",
        note="memory and disk at every iteration; what was skipped is counted",
    ),
    Entry(
        name="autockpt memory only",
        adapter="ours:EveryIterationInMemory",
        kind="ours",
        durable=False,
        note="memory at every iteration, disk never",
    ),
    Entry(name="torch.save", adapter="torch_save:TorchSave", kind="sync", note=NO_FSYNC),
    Entry(
        name="safetensors",
        adapter="safetensors_file:Safetensors",
        kind="sync",
        needs=Needs(packages=("safetensors", "numpy")),
        note="tensors only, flat names; " + NO_FSYNC,
    ),
    Entry(name="DCP", adapter="dcp:Sync", kind="sync", note="fsyncs its files"),
    Entry(
        name="DCP async thread",
        adapter="dcp:AsyncThread",
        note="copies the state into fresh memory in the caller at every save; fsyncs",
    ),
    Entry(
        name="DCP async process",
        adapter="dcp:AsyncProcess",
        note="copies in the caller, hands over to a process; needs a process group (gloo, 1 rank)",
    ),
    Entry(
        name="DCP async staged",
        adapter="dcp:AsyncStaged",
        note="shared staging memory kept, copied by a thread, joined before the optimizer's step;"
        " pinned memory needs an accelerator and is off",
    ),
    Entry(
        name="torchsnapshot",
        adapter="torchsnapshot_async:Async",
        needs=Needs(packages=("torchsnapshot", "numpy", "setuptools<81")),
        note="unmaintained; " + NO_FSYNC,
    ),
    Entry(
        name="torchsnapshot sync",
        adapter="torchsnapshot_async:Sync",
        kind="sync",
        needs=Needs(packages=("torchsnapshot", "numpy", "setuptools<81")),
        note="unmaintained; " + NO_FSYNC,
    ),
    Entry(
        name="DLRover flash",
        adapter="dlrover_flash:Flash",
        needs=Needs(packages=("dlrover", "numpy", "grpcio", "protobuf", "setuptools<81")),
        note="skips a save silently while the former is being persisted: the adapter waits first,"
        " so none is skipped here; " + NO_FSYNC,
    ),
    Entry(
        name="NVRx fork",
        adapter="nvrx:Fork",
        needs=Needs(packages=("nvidia-resiliency-ext", "numpy")),
        note="three CUDA calls stubbed; the snapshot is a forked child: copy-on-write slows the"
        " iterations while it lives; fsyncs",
    ),
    Entry(
        name="NVRx persistent",
        adapter="nvrx:Persistent",
        needs=Needs(packages=("nvidia-resiliency-ext", "numpy")),
        note="three CUDA calls stubbed; takes no snapshot of CPU tensors (its worker would read"
        " the live ones: torn), so the adapter clones first and that counts; its wait polls every"
        " 0.1 s; fsyncs",
    ),
    Entry(
        name="lm-resiliency",
        adapter="lm_resiliency_flush:Flush",
        needs=Needs(packages=("lm-resiliency", "numpy")),
        note="one rank, hence no peer copy; capture and flush_to_disk of the same step in the"
        " caller, CRC on, detection off (it needs NCCL); keeps every file for ever, removed here",
    ),
    Entry(
        name="Orbax async",
        adapter="orbax_async:Async",
        needs=Needs(packages=("orbax-checkpoint", "jax[cpu]", "numpy")),
        note="numpy views of the tensors; compresses with zstd; " + NO_FSYNC,
    ),
    Entry(
        name="ByteCheckpoint",
        adapter="bytecheckpoint_ddp:Ddp",
        needs=Needs(
            packages=(
                "bytecheckpoint",
                "numpy",
                "psutil",
                "grpcio",
                "protobuf",
                "mmh3",
                "cachetools",
                "safetensors",
                "universal-pathlib",
            ),
            without_dependencies=("bytecheckpoint",),
        ),
        note="its pin of torch <= 2.5 is ignored; plans every save anew, so that fast saving blocks"
        " for the whole write; fsyncs",
    ),
    Entry(
        name="ml-flashpoint",
        adapter="ml_flashpoint_dcp:Flashpoint",
        needs=Needs(packages=("ml-flashpoint", "numpy", "psutil")),
        durable=False,
        note="writes to /dev/shm only: not durable; replication stubbed; it compiles with sources"
        " that it fetches",
    ),
    Entry(
        name="CheckFreq",
        adapter="checkfreq:Checkpoint",
        source_only="cf_manager",
        note="its copy to the host returns CPU tensors themselves (torn): patched to clone; fsyncs",
    ),
    Entry(
        name="Lightning async",
        adapter="lightning_async:Async",
        needs=Needs(packages=("lightning", "numpy", "setuptools<81")),
        note="clones in the caller, one thread; " + NO_FSYNC,
    ),
    Entry(
        name="DeepSpeed FastPersist",
        adapter="deepspeed_fast:FastPersist",
        kind="sync",
        needs=Needs(packages=("deepspeed", "numpy", "ninja", "setuptools<81", "packaging")),
        note="needs libaio's headers and a compile at first use; CPU gaps stood in for",
    ),
)

BY_NAME = {entry.name: entry for entry in ENTRIES}
