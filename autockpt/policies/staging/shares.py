"""Whether each node stores what data-parallel ranks hold alike, or the job stores it once.

Of b bytes that the ranks of k further nodes hold as well, the job stores b where nodes store
(k + 1) b.  Each node copies, keeps, digests and writes b / (k + 1) of them.  The price is a
restart from memory: a node then takes from other nodes what it does not store.

`auto` is `node`.  With `job` every checkpoint is cheaper.  But every failure waits for the network,
and no run of many nodes has measured that.
"""

from dataclasses import dataclass, replace

from autockpt.policies.cost_model.costs import ranks_per_node
from autockpt.policies.redundancy.peer_costs import way_of
from autockpt.values.goal import Goal
from autockpt.values.plan import Choice
from autockpt.values.profile import Distribution, Profile, StateInventory
from autockpt.values.units import format_bytes, format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class SharesChoice:
    """The profile of the job as it would store its state, and the choice."""

    profile: Profile
    choice: Choice | None
    """None where no other node holds the same."""


def choose_shares(profile: Profile, goal: Goal) -> SharesChoice:
    """As `staging.shares` says, else by node."""
    pin, state = goal.pins.shares, profile.state
    of_job = pin == "job"
    binding = "" if pin is None else "staging.shares"
    if profile.failures.nodes < 2:
        return SharesChoice(profile=_unshared(profile), choice=None)
    if not state.elsewhere and of_job:
        choice = Choice(name="shares", chosen="job", reason=_as_known(profile), binding=binding)
        return SharesChoice(profile=_shared_already(profile), choice=choice)
    if not state.elsewhere:
        return _measured_with_job(profile, binding)
    alone, once = (ranks_per_node(profile) * n for n in (state.total_bytes, once_bytes(state)))
    fetch_s = _fetch_s(profile, alone - once)
    reason = (
        f"each node stores the {format_bytes(alone)} of its ranks; with staging.shares: job it "
        f"would store {format_bytes(once)}, and fetch the rest from other nodes at a restart, in "
        f"{format_duration(fetch_s)} or more"
    )
    if of_job:
        reason = (
            f"the job stores once what its nodes hold alike: {format_bytes(once)} a node instead "
            f"of {format_bytes(alone)}; a restart from memory fetches the rest from other nodes, "
            f"in {format_duration(fetch_s)} or more"
        )
    choice = Choice(
        name="shares",
        chosen="job" if of_job else "node",
        reason=reason,
        numbers={
            "nodes": float(profile.failures.nodes),
            "node_bytes": float(alone),
            "job_bytes": float(once),
            "fetch_s": fetch_s,
        },
        runner_up="node" if of_job else "job",
        binding=binding,
    )
    if of_job:
        profile = _fetching(_storing(profile, once_bytes(state)), fetch_s)
    return SharesChoice(profile=profile, choice=choice)


def as_stored(profile: Profile, goal: Goal) -> Profile:
    """The profile of the job as it stores its state."""
    return choose_shares(profile, goal).profile


def once_bytes(state: StateInventory) -> int:
    """The mean bytes of a rank where the job stores once what nodes hold alike."""
    saved = (held.bytes * len(held.nodes) / (len(held.nodes) + 1) for held in state.elsewhere)
    return state.total_bytes - int(sum(saved))


def _measured_with_job(profile: Profile, binding: str) -> SharesChoice:
    """Each node is to store its own, and the profile may be of a job that stored once."""
    whole = _unshared(profile)
    if whole is profile:
        return SharesChoice(profile=profile, choice=None)
    now, then = (ranks_per_node(profile) * p.state.total_bytes for p in (whole, profile))
    choice = Choice(
        name="shares",
        chosen="node",
        reason=(
            f"each node stores the {format_bytes(now)} of its ranks; the profile was measured "
            f"with staging.shares: job and {format_bytes(then)} a node, so copies and writes are "
            "reckoned up"
        ),
        numbers={
            "nodes": float(profile.failures.nodes),
            "node_bytes": float(now),
            "job_bytes": float(then),
        },
        runner_up="job",
        binding=binding,
    )
    return SharesChoice(profile=whole, choice=choice)


def _as_known(profile: Profile) -> str:
    stored = format_bytes(ranks_per_node(profile) * profile.state.total_bytes)
    if profile.state.restored_bytes:
        return f"the job stores once what its nodes hold alike, as measured: {stored} a node"
    return f"nothing is known to be held alike by several nodes: each stores {stored}"


def _shared_already(profile: Profile) -> Profile:
    """Measured so; only the fetch of a restart is added, and added once."""
    state = profile.state
    rest = state.restored_bytes - state.total_bytes
    if rest <= 0:
        return profile
    fetching = _fetching(profile, _fetch_s(profile, ranks_per_node(profile) * rest))
    return replace(fetching, state=replace(state, restored_bytes=state.total_bytes))


def _unshared(profile: Profile) -> Profile:
    """The profile of a job that stored once, as if each node stored what its ranks hold.

    A restart from memory stays as slow as it was measured.
    """
    restored = profile.state.restored_bytes
    return _storing(profile, restored) if restored > profile.state.total_bytes else profile


def _fetch_s(profile: Profile, nbytes: int) -> float:
    way = way_of(profile, "host")
    return way.alpha_s + nbytes / way.bytes_per_s


def _storing(profile: Profile, nbytes: int) -> Profile:
    """The profile of the same job with so many bytes a rank; copy and write grow with them.

    The stall stays: how much of it forward and backward would hide is not known.
    """
    state = profile.state
    factor = nbytes / max(1, state.total_bytes)
    return replace(
        profile,
        state=replace(
            state,
            total_bytes=nbytes,
            lazy_bytes=max(0, nbytes - state.boundary_bytes),
            classes=tuple(replace(one, bytes=int(one.bytes * factor)) for one in state.classes),
            elsewhere=(),
            restored_bytes=0,
        ),
        snapshot_s=_scaled(profile.snapshot_s, factor),
        persist_s=_scaled(profile.persist_s, factor),
    )


def _fetching(profile: Profile, fetch_s: float) -> Profile:
    """A restore from memory waits for other nodes, too; measured ones have."""
    memory = profile.recovery.restore_memory
    if memory.source == "measured":
        return profile
    memory = replace(memory, value_s=memory.value_s + fetch_s)
    return replace(profile, recovery=replace(profile.recovery, restore_memory=memory))


def _scaled(measured: Distribution | None, factor: float) -> Distribution | None:
    if measured is None:
        return None
    return Distribution(
        n=measured.n, mean=measured.mean * factor, p10=measured.p10 * factor,
        p50=measured.p50 * factor, p90=measured.p90 * factor, p95=measured.p95 * factor,
    )  # fmt: skip
