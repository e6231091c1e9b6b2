"""How long the protocol waits, and how often it repeats itself.  Every wait ends here."""

from dataclasses import dataclass

from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Tuning constants of both machines, in seconds of the keeper's monotonic clock."""

    resend_s: float = 5.0
    """Unanswered messages are repeated this often; longer than any healthy round trip."""
    attach_s: float = 600.0
    """First to last trainer of an incarnation; above torch's rendezvous and import times."""
    knock_s: float = 15.0
    """Another launch is refused only if the holder still lives after this: its last words may
    still be on their way."""
    claim_s: float = 5.0
    """So long a restart waits for the storage to take its claim.  Then it goes on in the term that
    it has, if all of its memory is there."""
    inventory_s: float = 30.0
    """Keepers answer from memory; a silent one counts as empty after this."""
    restore_s: float = 1800.0
    """A rank that neither verified nor failed by then has a hung source.  A copy in memory is
    struck out; where it is storage, the start is refused and may be tried again."""
    seal_s: float = 300.0
    """First to last rank sealed; a snapshot takes at most a few iterations."""
    commit_s: float = 1800.0
    """First to last vote of a durable save; slow shared storage at full state size."""
    copies_s: float = 120.0
    """A round of copies to other nodes of which nothing more comes; one that goes on may take any
    time.  Slots are kept meanwhile, so saves may be skipped."""
    plan_s: float = 10.0
    """First to last rank prepared; trainers may be held this long at worst, so it is short."""
    plan_margin_steps: int = 3
    """Boundaries between the furthest rank and the switch; covers one round trip."""
    persist_attempts: int = 3
    """Files tried per shard before the durable save is given up."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ConfigError(f"deadline {name} = {getattr(self, name)}: must be positive")
