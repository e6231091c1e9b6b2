"""Capabilities of the machine: storage, links, memory."""

from autockpt.reports.findings import slots_bytes_of
from autockpt.reports.html.charts import heat, memory
from autockpt.reports.html.escape import Child, join, tag
from autockpt.reports.html.sections.parts import Section, chart, details, fraction, table
from autockpt.reports.model import ReportModel
from autockpt.values.profile import GpuCounters, Profile, StorageMeasure
from autockpt.values.units import format_bytes, format_duration, format_multiple, format_rate

LINKS = {
    "host_copy": "host memory to host memory",
    "host_to_peer": "host to peer host",
    "device_to_peer": "GPU to peer GPU",
    "device_to_host_pinned": "GPU to pinned host memory",
    "device_to_host_pageable": "GPU to pageable host memory",
    "device_clone": "GPU memory to GPU memory",
}


def storage(model: ReportModel) -> Section | None:
    """Storage by writers and chunk, links, interference, codecs."""
    profile = model.profile
    if profile is None or not (profile.storage or profile.links):
        return None
    rest = (_links(profile), _traffic(profile), _interference(profile), _codecs(profile))
    body = join(*_storage(model, profile), *rest)
    return Section(id="storage", title="Storage and network", body=body)


def memory_section(model: ReportModel) -> Section | None:
    """Host, device and shared memory against their limits."""
    profile = model.profile
    if profile is None:
        return None
    head = profile.memory
    ours = slots_bytes_of(profile, model.decision)
    bars = [
        memory.Bar(
            label="host memory, one node",
            total_bytes=head.host_total_bytes,
            used_bytes=max(0, head.host_total_bytes - head.host_available_bytes),
            ours_bytes=ours,
            limit_bytes=head.host_total_bytes,
        )
    ]
    if head.cgroup_limit_bytes is not None and head.cgroup_available_bytes is not None:
        bars.append(
            memory.Bar(
                label="container",
                total_bytes=head.cgroup_limit_bytes,
                used_bytes=max(0, head.cgroup_limit_bytes - head.cgroup_available_bytes),
                ours_bytes=ours,
                limit_bytes=head.cgroup_limit_bytes,
            )
        )
    if head.device_total_bytes is not None and head.device_available_bytes is not None:
        bars.append(
            memory.Bar(
                label="GPU",
                total_bytes=head.device_total_bytes,
                used_bytes=max(0, head.device_total_bytes - head.device_available_bytes),
                ours_bytes=0,
                limit_bytes=head.device_total_bytes,
            )
        )
    rows = [
        (b.label, *map(format_bytes, (b.used_bytes, b.ours_bytes, b.limit_bytes))) for b in bars
    ]
    extra = {"/dev/shm free": head.shm_available_bytes, "lockable": head.memlock_limit_bytes}
    others = ", ".join(f"{k} {format_bytes(v)}" for k, v in extra.items() if v is not None)
    slots = model.decision.plan.slots if model.decision else 0
    lead = f"{slots} images of the state per rank, allocated once. " if slots else ""
    body = join(
        tag("p", lead + (f"Also: {others}." if others else ""), class_="lead"),
        chart(memory.draw(bars)),
        details("Same data as a table",
                table(("", "in use", "checkpoints", "limit"), rows, caption="Memory",
                      numbers=(1, 2, 3))),
        _state(profile),
        _gpus(profile),
    )  # fmt: skip
    return Section(id="memory", title="Memory", body=body)


def _storage(model: ReportModel, profile: Profile) -> list[Child]:
    groups: dict[tuple[str, bool], list[StorageMeasure]] = {}
    for measure in profile.storage:
        groups.setdefault((measure.operation, measure.direct), []).append(measure)
    staging = model.decision.plan.staging if model.decision else None
    writes = [m for m in profile.storage if m.operation == "write"]
    parts: list[Child] = []
    if writes:
        best = max(writes, key=lambda m: m.bytes_per_s.p50)
        state = profile.state.total_bytes / best.bytes_per_s.p50 if best.bytes_per_s.p50 else None
        took = f", one rank's state in {format_duration(state)}" if state else ""
        parts.append(
            tag("p", "Your storage takes ", tag("b", format_rate(best.bytes_per_s.p50)),
                f" at best, with {best.writers} writers{took}.")
        )  # fmt: skip
    ordered = sorted(groups, key=lambda key: (key[0] != "write", not key[1]))
    for i, key in enumerate(ordered):
        operation, direct = key
        how = "direct" if direct else "through the page cache"
        mine = staging is not None and operation == "write" and staging.direct_io == direct
        chosen = (staging.writers, staging.chunk_bytes) if staging and mine else (0, 0)
        drawn = heat.draw(
            groups[key], caption=f"{operation.capitalize()}, {how}, GB/s by writers and chunk size",
            chosen=chosen,
        )  # fmt: skip
        parts.append(drawn if i == 0 else details(f"{operation.capitalize()}, {how}", drawn))
    if profile.storage:
        parts.append(details("Fixed time and spread of each cell", _cells(profile)))
    return parts


def _cells(profile: Profile) -> Child:
    rows = [
        (f"{m.operation}, {'direct' if m.direct else 'buffered'}, {m.writers} x "
         f"{m.chunk_bytes / 2**20:g} MiB", format_duration(m.alpha_s),
         *map(format_rate, (m.bytes_per_s.p10, m.bytes_per_s.p50, m.bytes_per_s.p90)),
         str(m.bytes_per_s.n))
        for m in profile.storage
    ]  # fmt: skip
    head = ("operation, writers x chunk", "fixed time", "p10", "p50", "p90", "n")
    caption = "Time for S bytes is the fixed time plus S over the rate"
    return table(head, rows, caption=caption, numbers=(1, 2, 3, 4, 5))


def _links(profile: Profile) -> Child:
    rows: list[tuple[str, ...]] = [
        (LINKS.get(link.link, link.link), format_rate(link.bytes_per_s),
         format_duration(link.alpha_s), format_multiple(link.relative_spread), str(link.n),
         link.note)
        for link in profile.links
    ]  # fmt: skip
    if not rows:
        return None
    head: tuple[str, ...] = ("from, to", "rate", "fixed time", "spread", "n", "")
    if not any(link.note for link in profile.links):
        rows, head = [row[:-1] for row in rows], head[:-1]
    return join(tag("h3", "Links"),
                table(head, rows, caption="Time for S bytes is the fixed time plus S over the rate",
                      numbers=(1, 2, 3, 4)))  # fmt: skip


def _traffic(profile: Profile) -> Child:
    rows = [
        (item.device, format_rate(item.sent_bytes_per_s), format_rate(item.received_bytes_per_s),
         "\u2013" if item.capacity_bytes_per_s is None else format_rate(item.capacity_bytes_per_s),
         fraction(item.sent_share), fraction(item.received_share), format_duration(item.seconds))
        for item in profile.traffic
    ]  # fmt: skip
    if not rows:
        return None
    head = ("", "sent", "received", "of at most", "out in use", "in in use", "counted for")
    return join(tag("h3", "Traffic of the training"),
                table(head, rows, caption="Byte counters while no checkpoint was taken",
                      numbers=(1, 2, 3, 4, 5, 6)))  # fmt: skip


def _interference(profile: Profile) -> Child:
    rows = [
        (item.work.replace("_", " "), format_multiple(item.slowdown.mean),
         format_multiple(item.slowdown.p90),
         format_duration(item.busy_s), str(item.slowdown.n))
        for item in profile.interference
    ]  # fmt: skip
    if not rows:
        return None
    return join(tag("h3", "Interference"),
                table(("while", "mean slow-down", "p90", "runs for", "n"), rows,
                      caption="How much longer an iteration takes while background work runs",
                      numbers=(1, 2, 3, 4)))  # fmt: skip


def _codecs(profile: Profile) -> Child:
    rows = [
        (f"{item.codec} on {item.tensor_class}", f"{item.ratio:.2f}",
         format_rate(item.encode_bytes_per_s), format_rate(item.decode_bytes_per_s))
        for item in profile.codecs
    ]  # fmt: skip
    if not rows:
        return None
    return join(tag("h3", "Compression"),
                table(("codec", "ratio", "encode", "decode"), rows,
                      caption="On samples of this job's own tensors",
                      numbers=(1, 2, 3)),
                _encoders(profile))  # fmt: skip


def _encoders(profile: Profile) -> Child:
    if profile.encoders is None:
        return None
    threads, worth = profile.encoders.threads, profile.encoders.worth
    return tag(
        "p",
        f"Beside the training {threads} encoders get done what {worth.p50:.2g} do with a core "
        f"each (p10 {worth.p10:.2g}, n {worth.n}).",
    )


CLASSES = {"moments": "optimizer moments", "other": "random state, positions and the like"}
"""Classes of tensors whose name says too little."""


def _state(profile: Profile) -> Child:
    rows = [
        (CLASSES.get(item.name, item.name), str(item.tensors), format_bytes(item.bytes),
         ", ".join(f"{name} {format_bytes(count)}" for name, count in item.dtypes.items()))
        for item in profile.state.classes
    ]  # fmt: skip
    if not rows:
        return None
    return join(
        tag("h3", "State of one rank"),
        tag("p", f"{format_bytes(profile.state.lazy_bytes)} are copied under the next forward and "
            f"backward, {format_bytes(profile.state.boundary_bytes)} inside the stall."),
        table(("class", "tensors", "bytes", "dtypes"), rows, caption="What a checkpoint holds",
              numbers=(1, 2)),
    )  # fmt: skip


def _gpus(profile: Profile) -> Child:
    """NVML's counters while the job was profiled."""
    rows = [
        (gpu.name, fraction(gpu.utilisation), _speed(gpu.pcie_tx_bytes_per_s),
         _speed(gpu.pcie_rx_bytes_per_s), _clock(gpu), _lost_memory(gpu),
         ", ".join(gpu.slowed_by) or "nothing" if gpu.slowed_by is not None else "\u2013")
        for gpu in profile.gpus
    ]  # fmt: skip
    if not rows:
        return None
    head = ("GPU", "busy", "PCIe sent", "PCIe received", "clock", "memory lost", "slowed by")
    return join(
        tag("h3", "GPUs"),
        table(head, rows, caption="As NVML tells, at one moment", numbers=(1, 2, 3, 4, 5)),
    )


def _speed(bytes_per_s: float | None) -> str:
    return "\u2013" if bytes_per_s is None else format_rate(bytes_per_s)


def _clock(gpu: GpuCounters) -> str:
    if gpu.sm_clock_hz is None:
        return "\u2013"
    most = f" of {gpu.sm_clock_most_hz / 1e9:.2f}" if gpu.sm_clock_most_hz else ""
    return f"{gpu.sm_clock_hz / 1e9:.2f}{most} GHz"


def _lost_memory(gpu: GpuCounters) -> str:
    if gpu.rows_remapped is None:
        return "\u2013"
    return f"{gpu.rows_remapped} rows{', no spare left' if gpu.remapping_failed else ''}"
