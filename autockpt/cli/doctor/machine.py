"""Memory limits, GPUs, versions and settings of the environment."""

import os
import resource
from collections.abc import Mapping
from functools import partial

from autockpt.cli.doctor.finding import Finding
from autockpt.cli.shared.versions import versions
from autockpt.executors.linux import memcpy_threshold
from autockpt.executors.linux.cores import quota_cores, usable_cores
from autockpt.profiles.probes.copies import copy_gain
from autockpt.profiles.probes.host import memory_headroom, read_text
from autockpt.profiling.facts.job_step import memory_end_here
from autockpt.values.units import format_bytes

SMALL_SHM_BYTES = 10**9
STORE_SETTING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check() -> list[Finding]:
    """All findings about the machine and the environment."""
    found = [_memory(), _huge_pages(), _memlock(), _shm(), _gpus(), _versions(), _store(os.environ)]
    found += [
        _cpu(os.environ),
        *_pod(os.environ),
        *_job(os.environ),
        *_threads(os.environ),
        *_copies(os.environ),
    ]
    return found


def _memory() -> Finding:
    room = memory_headroom()
    host = (
        f"{format_bytes(room.host_available_bytes)} of {format_bytes(room.host_total_bytes)} "
        "host memory available"
    )
    if room.cgroup_limit_bytes is None:
        return Finding(id="limits.memory", status="ok", what=f"{host}; no cgroup limit")
    left = room.cgroup_available_bytes or 0
    what = (
        f"{host}; the cgroup allows {format_bytes(room.cgroup_limit_bytes)}, "
        f"{format_bytes(left)} are left"
    )
    if left < room.cgroup_limit_bytes / 4:
        return Finding(
            id="limits.memory",
            status="warning",
            what=what,
            fix="beyond a cgroup limit processes are killed, not refused: raise the limit (docker "
            "--memory, Slurm --mem) by 2 to 3 times the state of the ranks of this node",
        )
    return Finding(id="limits.memory", status="ok", what=what)


def _pod(environ: Mapping[str, str]) -> list[Finding]:
    """The finding of a pod; [] outside of one."""
    if "KUBERNETES_SERVICE_HOST" not in environ:
        return []
    return [
        Finding(
            id="launcher.pod",
            status="note",
            what="this is a pod of Kubernetes: memory goes with its container, so checkpoints in "
            "memory serve restarts within the container alone",
            fix="a volume for the run directory, terminationGracePeriodSeconds above the time of "
            "one checkpoint, a memory limit of 2 to 3 states (docs/howto/launch/kubernetes.md)",
        )
    ]


def _job(environ: Mapping[str, str]) -> list[Finding]:
    """The finding of a Slurm job; [] outside of one."""
    if "SLURM_JOB_ID" not in environ:
        return []
    step = environ.get("SLURM_STEP_ID", "batch script")
    job = f"this is job {environ['SLURM_JOB_ID']} of Slurm, step {step}"
    if memory_end_here() == "node":
        what = f"{job}: keepers stay behind when a step ends"
        return [Finding(id="launcher.slurm", status="ok", what=what)]
    return [
        Finding(
            id="launcher.slurm",
            status="note",
            what=f"{job}: Slurm ends every process of a step with it, keepers and their memory too",
            fix="one launcher a node restarts ranks within the step: srun --ntasks-per-node=1 "
            "autockpt run --nproc-per-node N (docs/howto/launch/slurm.md)",
        )
    ]


def _huge_pages() -> Finding:
    """Report huge pages of shared memory; brackets mark the chosen value."""
    setting = read_text("/sys/kernel/mm/transparent_hugepage/shmem_enabled") or "[unknown]"
    chosen = setting.partition("[")[2].partition("]")[0]
    if chosen in ("always", "within_size", "advise", "force"):
        return Finding(
            id="limits.huge_pages", status="ok", what=f"slots get huge pages at once ({chosen})"
        )
    return Finding(
        id="limits.huge_pages",
        status="note",
        what=f"shared memory gets small pages (shmem_enabled: {chosen}); slots are gathered into "
        "huge ones in the background, where no GPU has registered them and the kernel can "
        "(Linux 6.1): copies and direct writes are slower until then",
        fix="echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
    )


def _memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding(id="limits.memlock", status="ok", what="locked memory is unlimited")
    return Finding(
        id="limits.memlock",
        status="warning" if _gpu_names() else "note",
        what=f"locked memory is limited to {format_bytes(soft)}; RDMA and some pinning need more",
        fix="ulimit -l unlimited (docker --ulimit memlock=-1, Slurm PropagateResourceLimits)",
    )


def _shm() -> Finding:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        return Finding(
            id="limits.shm",
            status="warning",
            what=f"/dev/shm: {error.strerror}; DataLoader workers need it, autockpt does not",
            fix="mount a tmpfs there",
        )
    size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
    what = f"/dev/shm: {format_bytes(free)} of {format_bytes(size)} free"
    if size < SMALL_SHM_BYTES:
        return Finding(
            id="limits.shm",
            status="warning",
            what=f"{what}; DataLoader workers fail when it is full (autockpt does not use it)",
            fix="docker --shm-size=8g; in a pod mount an emptyDir with medium: Memory at /dev/shm",
        )
    return Finding(id="limits.shm", status="ok", what=f"{what} (autockpt does not use it)")


def _gpu_names() -> list[str]:
    """As NVML knows them; [] without a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(count)]
        return [str(pynvml.nvmlDeviceGetName(handle)) for handle in handles]
    except Exception:
        return []


def _gpus() -> Finding:
    names = _gpu_names()
    if not names:
        return Finding(id="gpu.nvml", status="note", what="no GPU (NVML finds no driver)")
    shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if "+cpu" in versions()["torch"]:
        return Finding(
            id="gpu.nvml",
            status="warning",
            what=f"{shown}, but torch {versions()['torch']} was built without CUDA",
            fix="install the CUDA build of torch (https://pytorch.org/get-started)",
        )
    return Finding(id="gpu.nvml", status="ok", what=shown)


def _versions() -> Finding:
    known = versions()
    shown = ", ".join(f"{name} {known[name]}" for name in ("autockpt", "python", "torch"))
    kernel = (read_text("/proc/sys/kernel/osrelease") or "?").strip()
    return Finding(id="versions", status="ok", what=f"{shown}, Linux {kernel}")


def _store(environ: Mapping[str, str]) -> Finding:
    if environ.get(STORE_SETTING) == "1":
        return Finding(
            id="torchrun.store", status="ok", what="restarts under torchrun use a fresh store"
        )
    return Finding(
        id="torchrun.store",
        status="warning",
        what="under plain torchrun, restarted gloo ranks may read addresses of dead ones "
        "(torch 2.13: 8 of 11 restarts failed); `autockpt run` sets what prevents it",
        fix=f"export {STORE_SETTING}=1 wherever torchrun is started directly",
    )


def _cpu(environ: Mapping[str, str]) -> Finding:
    """The processors, and the quota of a container, which sees every processor of its host."""
    visible, quota = len(os.sched_getaffinity(0)), quota_cores()
    if quota is None or quota >= visible:
        what = f"{visible} processors; no cgroup limits their time"
        return Finding(id="limits.cpu", status="ok", what=what)
    what = f"the cgroup allows the time of {quota:g} processors, of {visible} that are visible"
    named = environ.get("OMP_NUM_THREADS", "")
    threads = int(named) if named.isdecimal() else 0
    if 1 <= threads <= max(1, quota):
        return Finding(id="limits.cpu", status="ok", what=what)
    more = f"OMP_NUM_THREADS={threads} is more than that"
    every = "torch starts a thread for each visible one"
    return Finding(
        id="limits.cpu",
        status="warning",
        what=f"{what}; {more if threads else every}, and all threads stand still for the rest of a "
        "period once the time is used",
        fix=f"export OMP_NUM_THREADS={usable_cores()}, or fewer with several ranks; or raise the "
        "limit (docker --cpus, resources.limits.cpu of a pod)",
    )


def _threads(environ: Mapping[str, str]) -> list[Finding]:
    cores = usable_cores()
    if cores > 4 or environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE":
        return []
    what = f"{cores} cores: OpenMP threads that spin while idle take time from background copies"
    fix = "export OMP_WAIT_POLICY=PASSIVE"
    return [Finding(id="environment.openmp", status="note", what=what, fix=fix)]


def _copies(environ: Mapping[str, str]) -> list[Finding]:
    bound = memcpy_threshold.threshold_bytes()
    if bound is None or bound <= memcpy_threshold.PIECE_BYTES:
        return []
    gain = partial(copy_gain, piece_bytes=memcpy_threshold.PIECE_BYTES)
    wanted = memcpy_threshold.chosen(environ, gain)
    if not wanted:
        return []
    name, value = next(iter(wanted.items()))
    return [
        Finding(
            id="environment.copies",
            status="note",
            what=f"glibc copies past the caches from {format_bytes(bound)} on only; pieces of a "
            "checkpoint are smaller and faster with the lower bound that `autockpt run` sets",
            fix=f"export {name}={value} wherever training is started directly",
        )
    ]
