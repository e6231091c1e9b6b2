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
    if profile.failures.nodes < 2:
        return SharesChoice(profile=profile, choice=None)
    pin, state = goal.pins.shares, profile.state
    of_job = pin == "job"
    binding = "" if pin is None else "staging.shares"
    if not state.elsewhere:
        if not of_job:
            return SharesChoice(profile=profile, choice=None)
        choice = Choice(name="shares", chosen="job", reason=_as_measured(profile), binding=binding)
        rest = max(0, state.restored_bytes - state.total_bytes)
        fetch_s = _fetch_s(profile, ranks_per_node(profile) * rest) if rest else 0.0
        return SharesChoice(profile=_fetching(profile, fetch_s), choice=choice)
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
    return SharesChoice(
        profile=_stored_once(profile, fetch_s) if of_job else profile, choice=choice
    )


def as_stored(profile: Profile, goal: Goal) -> Profile:
    """The profile of the job as it stores its state."""
    return choose_shares(profile, goal).profile


def once_bytes(state: StateInventory) -> int:
    """The mean bytes of a rank where the job stores once what nodes hold alike."""
    saved = (held.bytes * len(held.nodes) / (len(held.nodes) + 1) for held in state.elsewhere)
    return state.total_bytes - int(sum(saved))


def _as_measured(profile: Profile) -> str:
    stored = format_bytes(ranks_per_node(profile) * profile.state.total_bytes)
    return f"the job stores once what its nodes hold alike, as measured: {stored} a node"


def _fetch_s(profile: Profile, nbytes: int) -> float:
    way = way_of(profile, "host")
    return way.alpha_s + nbytes / way.bytes_per_s


def _stored_once(profile: Profile, fetch_s: float) -> Profile:
    """The profile of the same job with fewer bytes a rank; copy and write shrink with them.

    The stall stays: how much of it forward and backward would hide is not known.
    """
    state = profile.state
    factor = once_bytes(state) / max(1, state.total_bytes)
    return replace(
        _fetching(profile, fetch_s),
        state=replace(
            state,
            total_bytes=once_bytes(state),
            lazy_bytes=max(0, once_bytes(state) - state.boundary_bytes),
            classes=tuple(replace(one, bytes=int(one.bytes * factor)) for one in state.classes),
            elsewhere=(),
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
