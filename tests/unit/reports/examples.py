"""Realistic RunData: an 8-GPU profile, a run with two failures, an unprotected run."""

import random

from autockpt.reports.analysis.risk import Luck, Risk
from autockpt.reports.analysis.search import SearchedWay, SearchedWrite, SearchHistory
from autockpt.reports.analysis.what_if import WhatIfCurve, waste
from autockpt.reports.data import RunData
from autockpt.values.failure import FailureRecord
from autockpt.values.plan import CheckpointPlan, Choice, Decision, Expected, TierPlan
from autockpt.values.profile import (
    CodecMeasure,
    Distribution,
    EncoderMeasure,
    Estimate,
    FailureRates,
    Fingerprint,
    InterferenceMeasure,
    LinkMeasure,
    MemoryHeadroom,
    Profile,
    RatePosterior,
    RecoveryTimes,
    StateClass,
    StateInventory,
    StorageMeasure,
)
from autockpt.values.telemetry import (
    CheckpointDurable,
    Event,
    FailureObserved,
    FirstIterationEnded,
    IterationsTimed,
    MemoryCommitted,
    PlanChanged,
    Restored,
    RunEnded,
    RunStarted,
    SaveSkipped,
    SnapshotBegan,
    SnapshotSealed,
)

ITERATION_S = 0.412
STATE_BYTES = 13_200_000_000
RANKS = 8
STEP = 72
"""Iterations between checkpoints to memory."""
POINT = {
    "boundary": 0.0,
    "memory_interval_s": STEP * ITERATION_S + 0.0045,
    "memory_stall_s": 0.004,
    "memory_latency_s": 0.62,
    "memory_slowdown": 0.0008,
    "memory_restore_s": 3.1,
    "disk_interval_s": 360 * ITERATION_S + 0.5,
    "disk_stall_s": 0.0,
    "disk_latency_s": 9.4,
    "disk_slowdown": 0.02,
    "disk_restore_s": 14.0,
    "mtbf_s": 43_200.0,
    "process_share": 0.4,
    "restart_s": 41.0,
}


def dist(center: float, spread: float = 0.04, n: int = 200) -> Distribution:
    """A distribution around `center`."""
    return Distribution(
        n=n,
        mean=center * (1 + spread / 10),
        p10=center * (1 - spread),
        p50=center,
        p90=center * (1 + spread),
        p95=center * (1 + 1.5 * spread),
    )


def a_profile() -> Profile:
    """One node with eight GPUs and a local NVMe."""
    storage = tuple(
        StorageMeasure(
            operation="write",
            direct=direct,
            writers=writers,
            chunk_bytes=chunk * 2**20,
            alpha_s=0.004,
            bytes_per_s=dist(
                (4.1e9 if direct else 2.6e9)
                * (writers / (writers + 0.9))
                * (chunk / (chunk + 1.1)),
                0.06,
                5,
            ),
        )
        for direct in (True, False)
        for writers in (1, 2, 4, 8)
        for chunk in (1, 4, 8, 32, 64)
    )
    reads = tuple(
        StorageMeasure(
            operation="read",
            direct=True,
            writers=writers,
            chunk_bytes=8 * 2**20,
            alpha_s=0.002,
            bytes_per_s=dist(5.2e9 * writers / (writers + 0.6), 0.05, 5),
        )
        for writers in (1, 2, 4)
    )
    samples = tuple(
        ITERATION_S * (1 + 0.02 * ((i * 37 % 101) / 50 - 1) + (0.11 if i % 41 == 0 else 0))
        for i in range(200)
    )
    return Profile(
        fingerprint=Fingerprint(
            host="3f9a17c2",
            cpu="AMD EPYC 9654",
            cores=192,
            gpus=("NVIDIA H200",) * RANKS,
            world_size=RANKS,
            nodes=1,
            torch_version="2.13.0",
            layout_digest="b7e0",
            storage="ext4 on nvme0n1",
            autockpt_version="0.1.0",
        ),
        created="2026-11-21T04:00:00Z",
        command="autockpt profile train.py --lr 1e-3",
        iteration_s=dist(ITERATION_S, 0.02),
        phases_s={
            "forward": dist(0.131),
            "backward": dist(0.242),
            "optimizer": dist(0.021),
            "data_wait": dist(0.006, 0.3),
            "other": dist(0.012),
        },
        state=StateInventory(
            total_bytes=STATE_BYTES,
            layout_digest="b7e0",
            lazy_bytes=STATE_BYTES - 2_000_000,
            boundary_bytes=2_000_000,
            classes=(
                StateClass(
                    name="parameters",
                    tensors=291,
                    bytes=2_640_000_000,
                    dtypes={"bfloat16": 2_640_000_000},
                ),
                StateClass(
                    name="moments",
                    tensors=582,
                    bytes=10_558_000_000,
                    dtypes={"float32": 10_558_000_000},
                ),
                StateClass(name="other", tensors=14, bytes=2_000_000, dtypes={"int64": 2_000_000}),
            ),
        ),
        memory=MemoryHeadroom(
            host_total_bytes=1_500_000_000_000,
            host_available_bytes=1_310_000_000_000,
            cgroup_limit_bytes=1_024_000_000_000,
            cgroup_available_bytes=890_000_000_000,
            shm_available_bytes=64_000_000,
            device_total_bytes=150_000_000_000,
            device_available_bytes=22_000_000_000,
        ),
        failures=FailureRates(
            per_node=RatePosterior(
                shape=1.0, exposure_days=250.0, events=0, source="prior: 4 per 1000 node-days"
            ),
            per_job=RatePosterior(
                shape=1.0, exposure_days=0.502, events=0, source="prior: Gamma(1, 12 h)"
            ),
            process_share=0.4,
            nodes=1,
        ),
        recovery=RecoveryTimes(
            detect=Estimate(value_s=0.3, source="measured", n=3),
            restart=Estimate(value_s=40.7, source="measured", n=1, note="the start of this run"),
            restore_memory=Estimate(value_s=3.1, source="derived"),
            restore_disk=Estimate(value_s=14.0, source="derived", note="read bandwidth"),
        ),
        links=(
            LinkMeasure(
                link="device_to_host_pinned",
                alpha_s=1.1e-5,
                bytes_per_s=53.1e9,
                relative_spread=0.02,
                n=24,
            ),
            LinkMeasure(
                link="host_copy", alpha_s=2e-6, bytes_per_s=11.4e9, relative_spread=0.07, n=24
            ),
        ),
        storage=storage + reads,
        interference=(
            InterferenceMeasure(work="snapshot_copy", slowdown=dist(0.006, 0.5, 24), busy_s=0.62),
            InterferenceMeasure(work="storage_write", slowdown=dist(0.02, 0.4, 24), busy_s=8.8),
        ),
        codecs=(
            CodecMeasure(
                codec="zstd",
                tensor_class="parameters",
                ratio=1.41,
                encode_bytes_per_s=0.51e9,
                decode_bytes_per_s=1.6e9,
                sample_bytes=67_108_864,
            ),
            CodecMeasure(
                codec="zstd",
                tensor_class="moments",
                ratio=1.12,
                encode_bytes_per_s=0.44e9,
                decode_bytes_per_s=1.5e9,
                sample_bytes=67_108_864,
            ),
        ),
        encoders=EncoderMeasure(threads=2, worth=dist(0.82, 0.1, 6)),
        stall_s=dist(0.004, 0.2, 12),
        snapshot_s=dist(0.62, 0.1, 12),
        persist_s=dist(9.4, 0.1, 6),
        warnings=("/dev/shm holds 64 MB only; autockpt does not use it.",),
        samples={"iteration_s": samples},
    )


def a_decision() -> Decision:
    """The plan of `POINT`."""
    w = waste(POINT)
    return Decision(
        plan=CheckpointPlan(
            plan_id="auto-3f9a17",
            version=1,
            fingerprint=a_profile().fingerprint.digest,
            tiers=(
                TierPlan(tier="memory", interval_steps=STEP),
                TierPlan(tier="disk", interval_steps=360),
            ),
            slots=3,
        ),
        choices=(
            Choice(
                name="memory.interval",
                chosen="72 steps (29.7 s)",
                reason="least waste for a stall of 4 ms and one process failure in 30 h",
                numbers={"stall_s": 0.004, "slowdown_s": 0.0005},
                runner_up="90 steps",
                chosen_waste=w,
                runner_up_waste=w * 1.04,
            ),
            Choice(
                name="disk.interval",
                chosen="360 steps (2 min 28 s)",
                reason="least waste for 0.19 s of slow-down and one node failure in 20 h",
                runner_up="192 steps",
                chosen_waste=w,
                runner_up_waste=w * 1.09,
            ),
            Choice(
                name="staging",
                chosen="lazy, 2 writers, 8 MiB, streaming",
                reason="hides 9.3 s of the 9.4 s to durable under training",
                runner_up="blocking",
                chosen_waste=w,
                runner_up_waste=w * 9,
            ),
            Choice(
                name="codec",
                chosen="none",
                reason="zstd shrinks by 1.2 only and writes at 0.5 GB/s, the disk takes 3.9 GB/s",
                runner_up="zstd on parameters",
                chosen_waste=w,
                runner_up_waste=w * 1.3,
            ),
            Choice(
                name="slots",
                chosen="3",
                reason="two tiers need 3 images: 317 GB of 890 GB on the node",
            ),
        ),
        expected=Expected(
            stall_s=0.004,
            waste=w,
            waste_low=w * 0.6,
            waste_high=w * 1.9,
            checkpoint_waste=0.00142,
            persist_s=9.4,
            recovery_memory_s=59.7,
            recovery_disk_s=138.0,
        ),
        current=Expected(
            stall_s=13.4,
            waste=0.0312,
            waste_low=0.024,
            waste_high=0.049,
            checkpoint_waste=0.0074,
            persist_s=13.4,
            recovery_memory_s=968.0,
            recovery_disk_s=968.0,
        ),
    )


def a_what_if() -> WhatIfCurve:
    """The what-if of `a_decision`."""
    return WhatIfCurve(point=dict(POINT), waste=waste(POINT), mtbf_assumed=True)


def a_risk() -> Risk:
    """Sixty worlds in which the plan loses a tenth of what the habit does."""
    chance = random.Random(5)
    worlds = [chance.lognormvariate(0.0, 0.8) for _ in range(60)]
    return Risk(
        length_s=30 * 86400.0,
        seed=0,
        mtbf_s=(9_000.0, 43_200.0, 300_000.0),
        failures=(6, 60, 280),
        ways=(
            Luck(name="this plan", promised=0.00389, lost=tuple(0.003 * w for w in worlds)),
            Luck(name="a save every 30 min", promised=0.0312, lost=tuple(0.03 * w for w in worlds)),
        ),
    )


def a_search() -> SearchHistory:
    """Two seeds of which one failed, two proposals, a final of two."""
    fast, slow = "4 writers x 8 MiB direct none", "2 writers x 8 MiB direct none"
    writes = [("seed", slow, 3.4), ("seed", "1 writer x 8 MiB direct zstd", None),
              ("search", fast, 2.9), ("search", "8 writers x 1 MiB direct none", 4.1),
              ("final", fast, 2.8), ("final", slow, 3.5)]  # fmt: skip
    return SearchHistory(
        created="2026-11-21T04:01:00Z",
        directory="/data/checkpoints",
        content="the newest checkpoint",
        sample_bytes=128 * 2**20,
        budget=25,
        seed=0,
        proposer="optuna 5.0.0 TPE",
        default=slow,
        winner=fast,
        kept_default=False,
        reason="it took 0.81 times as long in 4 rounds, beyond the 5 % that count as noise",
        writes=tuple(
            SearchedWrite(number=i, stage=stage, way=way, seconds=seconds,
                          failure="" if seconds else "disk full")
            for i, (stage, way, seconds) in enumerate(writes)
        ),
        ways=(
            SearchedWay(way=fast, predicted_s=3.1, measured_s=2.85, waste=0.0036, writes=2,
                        note="chosen"),
            SearchedWay(way=slow, predicted_s=3.4, measured_s=3.45, waste=0.0039, writes=2,
                        note="default"),
            SearchedWay(way="1 writer x 8 MiB direct zstd", predicted_s=9.9, measured_s=None,
                        waste=None, writes=0, note="disk full"),
        ),
        space=112,
        refused={"pinned: disk.direct true": 56},
        importances={"writers": 0.71, "chunk": 0.25, "codec": 0.04, "direct": 0.0},
        explained=0.93,
    )  # fmt: skip


PLAN_YAML = """\
version: 1
tiers:
  memory:
    interval: 72 steps        # auto: sqrt(2 c / rate), c = 4.5 ms, one failure in 30 h
  disk:
    interval: 360 steps       # auto: one node failure in 20 h
staging:
  schedule: lazy              # auto: hides 9.3 s of 9.4 s
  writers: 2                  # auto: within 5 % of the best
  chunk: 8 MiB
codec: none                   # auto: zstd would slow the write to 0.5 GB/s
keep: {last: 3}
"""
DIFF = """\
--- current
+++ auto
@@ -1,4 +1,6 @@
 version: 1
-interval: 30 min
-mode: sync
+tiers:
+  memory: {interval: 72 steps}
+  disk: {interval: 360 steps}
"""


def profile_data() -> RunData:
    """What `autockpt profile` hands to a report."""
    return RunData(
        title="gpt-1.3b",
        command="autockpt profile train.py --lr 1e-3",
        argv=("autockpt", "profile", "train.py", "--lr", "1e-3"),
        train="autockpt run --profile runs/p/profile.json --nproc-per-node 8 train.py --lr 1e-3",
        created="2026-11-21 04:02 UTC",
        versions={"autockpt": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "driver": "575.51"},
        profile=a_profile(),
        decision=a_decision(),
        plan_yaml=PLAN_YAML,
        policy_diff=DIFF,
        what_if=a_what_if(),
        risk=a_risk(),
        search=a_search(),
    )


def run_events(*, ranks: int = RANKS, total: int = 9000, start_s: float = 5000.0) -> list[Event]:
    """A run of `total` steps: a process dies once and a node once; rank by rank, in order."""
    return _Run(ranks, start_s).train(total)


class _Run:
    """Writes the telemetry of a job that checkpoints every 72 and 360 steps."""

    def __init__(self, ranks: int, start_s: float) -> None:
        self.ranks, self.now, self.term = ranks, start_s, 0
        self.events: list[Event] = []
        self.memory: tuple[str, int] = ("", 0)
        self.disk: tuple[str, int] = ("", 0)

    def start(self, restart: int) -> None:
        self.term += 1
        for rank in range(self.ranks):
            self.events.append(
                RunStarted(
                    at_s=self.now + rank * 0.01,
                    rank=rank,
                    wall="2026-11-21T04:10:00+00:00" if not restart else "",
                    run_id="gpt-1.3b-0421",
                    term=self.term,
                    world_size=self.ranks,
                    pid=4000 + rank,
                    plan_id="auto-3f9a17",
                    plan_version=1,
                    state_bytes=STATE_BYTES,
                    restart_count=restart,
                    launch_s=0.4 if restart else None,
                    interpreter_s=0.06,
                    torch_import_s=8.1,
                    process_group_s=None if restart else 2.2,
                    script_s=9.6,
                    wait_s=0.8,
                    read_s=2.9,
                    apply_s=0.1,
                )
            )

    def block(self, step: int, count: int) -> None:
        """`count` steps up to `step`, a checkpoint at their end."""
        stall = 0.0036 + 0.001 * ((step * 7919) % 13) / 13
        disk = step % 360 == 0
        busy = 9.0 if step % 360 == STEP else 0.6
        slowed = count * ITERATION_S + busy * 0.016
        self.now += slowed + stall
        generation = f"step {step} (term {self.term})"
        for rank in range(self.ranks):
            at_s = self.now + 1e-4 * rank
            self.events.append(
                IterationsTimed(
                    at_s=at_s,
                    rank=rank,
                    step=step,
                    count=count,
                    total_s=slowed,
                    checkpoint_s=stall,
                    quiet_s=ITERATION_S,
                    busy_s=ITERATION_S * 1.016,
                )
            )
            self.events.append(
                SnapshotBegan(
                    at_s=at_s,
                    rank=rank,
                    generation=generation,
                    step=step,
                    tiers="memory+disk" if disk else "memory",
                )
            )
            self.events.append(
                SnapshotSealed(
                    at_s=at_s + 0.6 + 0.01 * rank,
                    rank=rank,
                    generation=generation,
                    step=step,
                    bytes=STATE_BYTES,
                    boundary_stall_s=0.001,
                    fence_stall_s=stall - 0.001,
                    copy_s=0.6 + 0.01 * rank,
                )
            )
        self.events.append(
            MemoryCommitted(
                at_s=self.now + 0.7, rank=-1, generation=generation, step=step, latency_s=0.7
            )
        )
        self.memory = (generation, step)
        if disk:
            latency = 9.1 + (step % 7) * 0.2
            self.events.append(
                CheckpointDurable(
                    at_s=self.now + latency,
                    rank=-1,
                    generation=generation,
                    step=step,
                    bytes=STATE_BYTES * self.ranks,
                    stored_bytes=STATE_BYTES * self.ranks + 65536,
                    latency_s=latency,
                    write_s=latency - 0.5,
                )
            )
            self.disk = (generation, step)
        if step % 2520 == 0:
            for rank in range(self.ranks):
                self.events.append(
                    SaveSkipped(
                        at_s=self.now + 0.2,
                        rank=rank,
                        step=step + STEP,
                        reason="the previous checkpoint is still being written",
                    )
                )

    def fail(self, what: str, step: int, source: str, down_s: float, restore_s: float) -> int:
        """Die after `step`; the restored step."""
        generation, back = self.memory if source == "memory" else self.disk
        failed_at = self.now + (step - self.memory[1]) * ITERATION_S + 0.1
        self.events.append(
            FailureObserved(
                at_s=failed_at,
                rank=-1,
                what=what,
                failed_rank=3,
                pid=4003,
                step=step,
                detail="signal 9 (killed)" if what == "trainer" else "no heartbeat for 10 s",
            )
        )
        self.now = failed_at + down_s - restore_s
        self.start(restart=self.term)
        self.now = failed_at + down_s
        for rank in range(self.ranks):
            self.events.append(
                Restored(
                    at_s=self.now,
                    rank=rank,
                    generation=generation,
                    step=back,
                    source=source,
                    bytes=STATE_BYTES,
                    restore_s=restore_s,
                    lost_steps=step - back,
                    lost_s=(step - back) * ITERATION_S,
                    down_s=down_s,
                )
            )
            self.events.append(FirstIterationEnded(at_s=self.now + 1.9, rank=rank, step=back + 1))
        return back

    def train(self, total: int) -> list[Event]:
        self.start(restart=0)
        self.now += 21.0
        pending = [("trainer", 3006, "memory", 44.2, 3.3), ("node", 6700, "disk", 71.0, 14.6)]
        step = 0
        while step < total:
            if pending and step + STEP > pending[0][1]:
                what, at, source, down, restore = pending.pop(0)
                step = self.fail(what, at, source, down, restore)
                continue
            step += STEP
            self.block(step, STEP)
            if step == 4752:
                for rank in range(self.ranks):
                    self.events.append(
                        PlanChanged(
                            at_s=self.now,
                            rank=rank,
                            plan_version=2,
                            step=step,
                            memory_interval_steps=STEP,
                            disk_interval_steps=360,
                            reason="one failure observed: rate is 1.6 times the prior",
                        )
                    )
        for rank in range(self.ranks):
            self.events.append(
                RunEnded(at_s=self.now + 0.5, rank=rank, step=step, reason="finished")
            )
        return self.events


def failure_records() -> tuple[FailureRecord, ...]:
    """The failure log of `run_events`."""
    return (
        FailureRecord(
            wall="2026-11-21T04:31:10Z",
            kind="process",
            what="trainer",
            node=0,
            step=3006,
            exposure_s=1262.0,
            detect_s=0.3,
            restart_s=40.6,
            restore_s=3.3,
            source="memory",
            lost_steps=6,
            lost_s=2.5,
        ),
        FailureRecord(
            wall="2026-11-21T04:58:40Z",
            kind="node",
            what="node",
            node=0,
            step=6700,
            exposure_s=1540.0,
            detect_s=10.2,
            restart_s=46.2,
            restore_s=14.6,
            source="disk",
            lost_steps=220,
            lost_s=90.6,
        ),
    )


def run_data(*, ranks: int = RANKS, total: int = 9000) -> RunData:
    """What `autockpt run` hands to a report."""
    data = profile_data()
    return RunData(
        title=data.title,
        command="autockpt run train.py --lr 1e-3",
        argv=("autockpt", "run", "train.py", "--lr", "1e-3"),
        created="2026-11-21 05:19 UTC",
        versions=data.versions,
        profile=data.profile,
        decision=data.decision,
        events=tuple(run_events(ranks=ranks, total=total)),
        failures=failure_records(),
        plan_yaml=data.plan_yaml,
        what_if=data.what_if,
        status={"state": "finished"},
    )


def unprotected_data() -> RunData:
    """An untouched script under `autockpt run`."""
    events: tuple[Event, ...] = (
        RunStarted(
            at_s=10.0,
            rank=0,
            wall="2026-11-21T04:10:00+00:00",
            run_id="plain",
            term=1,
            world_size=1,
            pid=1,
            plan_id="default",
            plan_version=0,
            state_bytes=0,
            restart_count=0,
        ),
        IterationsTimed(
            at_s=3610.0,
            rank=0,
            step=9000,
            count=9000,
            total_s=3590.0,
            checkpoint_s=0.0,
            quiet_s=0.3989,
            busy_s=0.0,
        ),
        RunEnded(at_s=3611.0, rank=0, step=9000, reason="finished"),
    )
    return RunData(
        title="train.py", command="autockpt run train.py", events=events, protected=False
    )
