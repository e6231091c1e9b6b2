"""Facts of a profile about job and machine that need no timing; cheap, used by runs too."""

import contextlib
import os
import sys

import psutil
import torch

import autockpt
from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.linux.cores import usable_cores
from autockpt.executors.network.discovery import listen_host
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.state.live_state import LiveState
from autockpt.profiles.assemble import JobFacts
from autockpt.profiles.estimators import inventory
from autockpt.profiles.probes import gpu, host
from autockpt.profiling.facts.failure_domains import job_domains
from autockpt.profiling.facts.failure_history import failure_history
from autockpt.profiling.facts.ranks import Ranks
from autockpt.profiling.measure.movers import restored_bytes, tensor_facts
from autockpt.run_directory import RunDirectory, utc_now
from autockpt.values.arguments import without_secrets
from autockpt.values.errors import AutockptError
from autockpt.values.policy_keys.paths import is_store_url
from autockpt.values.profile import Fingerprint, StateInventory


def fingerprint(*, layout_digest: str, storage_dir: str, ranks: Ranks | None = None) -> Fingerprint:
    """Return the fingerprint: if it differs, a profile is of another job or machine."""
    ranks = ranks or Ranks.find()
    return Fingerprint(
        host=host.host_identity(),
        cpu=host.cpu_name(),
        cores=usable_cores(),
        gpus=host.gpu_names(),
        world_size=ranks.world_size,
        nodes=ranks.nodes,
        torch_version=str(torch.__version__),
        layout_digest=layout_digest,
        storage=_storage_name(storage_dir),
        autockpt_version=autockpt.__version__,
    )


def _storage_name(storage_dir: str) -> str:
    """Return the mount below a directory, or the bucket of an object store."""
    if is_store_url(storage_dir):
        scheme, _, rest = storage_dir.partition("://")
        return f"{scheme}://{rest.partition('/')[0]}"
    return str(host.mount_of(storage_dir))


def interface(ranks: Ranks) -> str | None:
    """The network interface that the training's traffic takes, None where it uses no network.

    It is the interface that torch's back ends are set to, else the one with the address that
    keepers listen on.
    """
    named = [os.environ.get(name, "") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")]
    known = psutil.net_if_addrs()
    for name in (part.lstrip("=") for text in named for part in text.split(",")):
        if name in known:
            return name
    if ranks.nodes < 2:
        return None
    with contextlib.suppress(AutockptError):
        host = listen_host(os.environ, one_host=False)
        return next((n for n, entries in known.items() if host in (e.address for e in entries)), "")
    return ""


def state_inventory(
    state: LiveState,
    layout: Layout,
    *,
    changed: set[str] | None = None,
    place: Place | None = None,
) -> StateInventory:
    """Bytes by class of what this rank would save in this layout.

    `changed` names tensors that were seen to change behind the fence; `place`: of this rank.
    """
    return inventory(
        tensor_facts(state, layout, changed or set(), place),
        layout_digest=layout.digest,
        extra_bytes=layout.extra_bytes,
        restored_bytes=restored_bytes(state, layout, place) if place is not None else 0,
    )


def host_facts(
    run_dir: str,
    *,
    state: StateInventory,
    storage_dir: str,
    device: torch.device | None = None,
    ranks: Ranks | None = None,
) -> JobFacts:
    """Everything of a profile that needs no stop-watch."""
    ranks = ranks or Ranks.find()
    failures, recovery = failure_history(run_dir, nodes=ranks.nodes)
    domains, warnings = job_domains(os.environ, ranks.nodes)
    return JobFacts(
        fingerprint=fingerprint(
            layout_digest=state.layout_digest, storage_dir=storage_dir, ranks=ranks
        ),
        created=utc_now(),
        command=_command(run_dir),
        state=state,
        memory=host.memory_headroom(device=device),
        failures=failures,
        recovery=recovery,
        gpus=gpu.gpu_counters(),
        domains=domains,
        warnings=warnings,
    )


def storage_directory(run_dir: str) -> str:
    """Where the checkpoints of this run will stand."""
    return RunDirectory(run_dir).checkpoints()


def _command(run_dir: str) -> str:
    with contextlib.suppress(AutockptError):
        info = RunDirectory(run_dir).read_info()
        if info is not None:
            return info.command
    return " ".join(without_secrets(sys.argv))
