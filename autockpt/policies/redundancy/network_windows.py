"""Whether copies to other nodes wait for the windows of the network: bytes against gaps.

        room   = B / (1 + margin) * sum max(0, g_j - alpha)      bytes of one iteration, p10 g_j
        share  = room * iterations / (S x sent)                  fraction of a node's traffic, 0..1

`iterations` is the number a copy may take.  The rank with the least room decides.  `auto` waits
for windows where snapshots do.  It also waits where an exchange slows the training so that the rate
would be cut, if windows take a tenth of it.  Source: Gemini (SOSP'23) for the partition of traffic;
docs/concepts/bubbles.md.
"""

from dataclasses import replace

from autockpt.policies.redundancy.choose import RedundancyChoice
from autockpt.policies.redundancy.peer_costs import crossing_bytes, way_of
from autockpt.policies.staging.idle_windows import MARGINS, WORTH
from autockpt.values.goal import Goal
from autockpt.values.plan import Staging
from autockpt.values.profile import Profile
from autockpt.values.redundancy import PeerSchedule, Redundancy, copy_iterations
from autockpt.values.units import format_bytes, format_fraction


def scheduled(
    profile: Profile, goal: Goal, shared: RedundancyChoice, staging: Staging, interval_steps: int
) -> RedundancyChoice:
    """The same redundancy, with when its copies leave and why; unchanged where there are none."""
    redundancy, choice = shared.redundancy, shared.choice
    if redundancy.scheme == "none" or choice is None:
        return shared
    schedule, why = _schedule(profile, goal, redundancy, staging, interval_steps)
    numbers = {"peer_window_share": window_share(profile, redundancy, interval_steps)}
    return replace(
        shared,
        redundancy=replace(redundancy, schedule=schedule),
        choice=replace(
            choice,
            reason=f"{choice.reason}; copies leave {_WORDS[schedule]}: {why}",
            numbers={**choice.numbers, **numbers},
        ),
    )


_WORDS: dict[PeerSchedule, str] = {
    "paced": "beside the training",
    "windows": "in its network's windows",
}


def window_share(profile: Profile, redundancy: Redundancy, interval_steps: int) -> float:
    """Fraction of the bytes a node sends that its network windows take in time, 0..1."""
    by_rank: dict[int, float] = {}
    way = way_of(profile, "host")
    for gap in profile.bubbles:
        if gap.what == "network":
            usable_s = max(0.0, gap.length_s.p10 - way.alpha_s)
            by_rank[gap.rank] = by_rank.get(gap.rank, 0.0) + usable_s
    sent = crossing_bytes(profile, redundancy)
    if not by_rank or not sent:
        return 0.0
    margin = min(max(MARGINS[0], 2 * way.spread), MARGINS[1])
    room = way.bytes_per_s / (1 + margin) * min(by_rank.values())
    return min(1.0, room * copy_iterations(interval_steps) / sent)


def _schedule(
    profile: Profile, goal: Goal, redundancy: Redundancy, staging: Staging, interval_steps: int
) -> tuple[PeerSchedule, str]:
    wish = goal.redundancy.schedule
    if redundancy.path == "device":
        return "paced", "through the devices they have gates of their own"
    if wish is not None:
        return wish, "redundancy.schedule is set"
    if profile.fingerprint.gpus:
        return "paced", "when collectives of a device end is not known during a run"
    if staging.schedule == "windows":
        return "windows", "snapshots wait for windows too"
    share = window_share(profile, redundancy, interval_steps)
    sent = format_bytes(crossing_bytes(profile, redundancy))
    steps = copy_iterations(interval_steps)
    fits = f"windows take {format_fraction(share)} of {sent} in {steps} steps"
    if not redundancy.rate_bytes_per_s or goal.redundancy.rate_bytes_per_s:
        return "paced", "no exchange slows the training so much that its rate is cut"
    return ("windows" if share >= WORTH else "paced"), fits
