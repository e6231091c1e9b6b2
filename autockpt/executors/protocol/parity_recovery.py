"""Which lost shards the parities of a generation bring back, and out of what.  Pure.

A member of a set is *left* when its shard and its parity are both still in memory somewhere; with
as many lost as the set stands, what is left gives back the shard of every lost one.  All pieces are
of one generation and have the roots that the parities were made of, or they add up to nothing.
"""

from collections.abc import Iterator, Mapping, Sequence

from autockpt.executors.protocol.messages import ParityOf, ShardCopy, ShardSource


def rebuilt(
    rank: int, shards: Mapping[int, ShardCopy], parities: Sequence[ShardCopy]
) -> Iterator[ShardSource]:
    """Sources that rebuild the shard of `rank`, one for every set of it that can.

    `shards`: by rank, `parities`: in any order; all of one generation.
    """
    for made_of in dict.fromkeys(parity.shard.parity for parity in parities):
        if made_of is None or made_of.member(rank) is None:
            continue
        held = {p.shard.rank: p for p in parities if p.shard.parity == made_of}
        left = [r for r in _left(made_of, shards) if r in held and r != rank]
        if left and is_enough(made_of, len(left)):
            shard = held[left[0]].shard.of_member(rank)
            pieces = (*(shards[r] for r in left), *(held[r] for r in left))
            yield ShardSource(kind="parity", shard=shard, pieces=pieces, root=shard.root)


def is_enough(made_of: ParityOf, left: int) -> bool:
    """Whether so many members of a set give back the others."""
    return len(made_of.members) - left <= made_of.losses


def _left(made_of: ParityOf, shards: Mapping[int, ShardCopy]) -> list[int]:
    """Members whose shard is there as the parity was made of it."""
    return [
        member.rank
        for member in made_of.members
        if member.rank in shards and shards[member.rank].shard.root == member.root
    ]
