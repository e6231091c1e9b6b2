"""Whether one node reads from an object store what several nodes need, or each reads it.

Of S bytes that N nodes need, once takes S / (N R) + S (N - 1) / (N L), and each S / R.  A node
reads R bytes from the store in a second, and sends L to another node.  So once is shorter where
L > R, for every N.  It also costs a store and its link N times fewer bytes.
"""

from autockpt.values.goal import Goal
from autockpt.values.plan import Choice
from autockpt.values.profile import Profile
from autockpt.values.units import format_bytes


def choose_read_once(profile: Profile, goal: Goal) -> Choice | None:
    """As `disk.read_once` says, else once unless the link is known to be slower.

    None where no node shares a store with another one.
    """
    if profile.failures.nodes < 2 or not goal.is_in_store:
        return None
    pin, link = goal.pins.read_once, profile.link("host_to_peer")
    reads = [m.bytes_per_s.p50 for m in profile.storage if m.operation == "read"]
    numbers: dict[str, float] = {"nodes": float(profile.failures.nodes)}
    known = link is not None and link.between_nodes and bool(reads)
    once = True
    reason = "one node reads what several need: no link between nodes was measured to be slower"
    if known and link is not None:
        numbers |= {"link_bytes_per_s": link.bytes_per_s, "read_bytes_per_s": max(reads)}
        once = link.bytes_per_s >= max(reads)
        rates = (
            f"a node sends {format_bytes(link.bytes_per_s)}/s to another one, and reads "
            f"{format_bytes(max(reads))}/s from the store"
        )
        how = "one node reads what several need" if once else "each node reads what it needs"
        reason = f"{how}: {rates}"
    if pin is not None:
        once = pin
        reason = f"pinned by disk.read_once: {str(pin).lower()}"
    return Choice(
        name="read_once",
        chosen="once" if once else "each",
        reason=reason,
        numbers=numbers,
        runner_up="each" if once else "once",
        binding="" if pin is None else "disk.read_once",
    )
