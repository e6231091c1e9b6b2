"""Find the lost shards that a generation's parities bring back, and their sources.  Pure.

A member of a set is *left* when its shard and its parity are both still in memory.  Up to the set's
tolerated losses, the members left give back the shard of every lost one.  All pieces are of one
generation and have the roots that the parities were made of, or they add up to nothing.
"""

from collections.abc import Iterable, Iterator, Mapping

from autockpt.executors.protocol.messages import ParityOf, ShardCopy, ShardSource


class ParitySets:
    """The parities of one generation, by the set that they are of."""

    def __init__(self, parities: Iterable[ShardCopy]) -> None:
        self._held: dict[ParityOf, dict[int, ShardCopy]] = {}
        self._of_rank: dict[int, list[ParityOf]] = {}
        for parity in parities:
            made_of = parity.shard.parity
            if made_of is None:
                continue
            if made_of not in self._held:
                self._held[made_of] = {}
                for member in made_of.members:
                    self._of_rank.setdefault(member.rank, []).append(made_of)
            self._held[made_of][parity.shard.rank] = parity

    def of(self, rank: int) -> Iterator[tuple[ParityOf, dict[int, ShardCopy]]]:
        """Every set that has the shard of `rank`, with its parities by the rank that holds them."""
        yield from ((made_of, self._held[made_of]) for made_of in self._of_rank.get(rank, ()))


def rebuilt(
    rank: int, shards: Mapping[int, ShardCopy], parities: ParitySets
) -> Iterator[ShardSource]:
    """Sources that rebuild the shard of `rank`, one for every set of it that can.

    `shards`: by rank; all of one generation.
    """
    for made_of, held in parities.of(rank):
        left = [r for r in _unchanged_members(made_of, shards) if r in held and r != rank]
        if left and is_enough(made_of, len(left)):
            shard = held[left[0]].shard.of_member(rank)
            pieces = (*(shards[r] for r in left), *(held[r] for r in left))
            yield ShardSource(kind="parity", shard=shard, pieces=pieces, root=shard.root)


def is_enough(made_of: ParityOf, left: int) -> bool:
    """Whether so many members of a set give back the others."""
    return len(made_of.members) - left <= made_of.losses


def _unchanged_members(made_of: ParityOf, shards: Mapping[int, ShardCopy]) -> list[int]:
    """Return the members whose shard is as it was when the parity was made."""
    return [
        member.rank
        for member in made_of.members
        if member.rank in shards and shards[member.rank].shard.root == member.root
    ]
