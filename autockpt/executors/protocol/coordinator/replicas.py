"""Whether ranks that hold the same state still do, from what their seals say of it.

A seal tells a digest of names and of a few elements of each tensor.  It also tells digests of every
byte of the share that its rank stores, and of shares that others store.  A difference where the
same bytes were once equal in this term is a dispute: memory, a link or a device changed them.
Without that it is none: such ranks hold different things (local SGD), and share nothing any more.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autockpt.executors.protocol import messages as m

NAMED = 8
"""Ranks of a difference that a message names: every node gets it."""

_Share = tuple[str, int, int]
"""(group, number of members, share)."""


@dataclass(frozen=True, slots=True)
class _Difference:
    share: _Share
    section: int
    outvoted: frozenset[int]
    """Ranks that most of the others contradict; without a majority all that read it."""
    decided: bool


class ReplicaComparison:
    """Compares the seals of each generation of the open term."""

    def __init__(self) -> None:
        self._term = 0
        self._equal: dict[tuple[_Share, int], int] = {}
        """By share and rank a bit for each section that was equal to another rank's."""
        self._open: dict[tuple[_Share, int], m.Dispute] = {}
        """By share and section what is disputed, until its ranks agree there again."""

    def compare(
        self, term: int, nodes: Sequence[int], shards: Iterable[m.HeldShard]
    ) -> m.Dispute | str | None:
        """None where all agree; a text where ranks are no replicas; `nodes`: by rank."""
        if term != self._term:
            self._term, self._equal, self._open = term, {}, {}
        shards = list(shards)
        stopped = _incomplete(shards)
        if stopped:
            self._open.clear()
            return stopped
        compared, differences = self._differences(shards)
        if not differences:
            verdict = self._few_elements(nodes, shards)
            return next(iter(self._open.values()), None) if verdict is None else verdict
        decided = [one for one in differences if one.decided]
        known = all(
            self._equal.get((one.share, rank), 0) >> one.section & 1
            for one in differences
            for rank in one.outvoted
        )
        first, ranks = differences[0], _ranks(decided or differences)
        if not known or (not decided and 2 * len(differences) > compared):
            self._open.clear()  # they are no replicas, and nothing of them is compared any more
            return _odd(min(ranks), ranks)
        first = (decided or differences)[0]
        dispute = _dispute(
            nodes, ranks, named=bool(decided), share=first.share, section=first.section
        )
        self._open |= dict.fromkeys(((one.share, one.section) for one in differences), dispute)
        return dispute

    def _differences(self, shards: list[m.HeldShard]) -> tuple[int, list[_Difference]]:
        """(number of sections with two or more readings, differences among them)."""
        read: dict[_Share, dict[int, tuple[str, ...]]] = {}
        for shard in shards:
            for proof in shard.replicas:
                for reading in proof.readings:
                    share = (proof.group, proof.members, reading.share)
                    read.setdefault(share, {})[shard.rank] = reading.digests
        compared, differences = 0, []
        for share, by_rank in read.items():
            for section in range(max(map(len, by_rank.values()))):
                said = {
                    r: d[section] for r, d in by_rank.items() if section < len(d) and d[section]
                }
                if len(said) < 2:
                    continue
                compared += 1
                if len(set(said.values())) > 1:
                    differences.append(_vote(share, section, said))
                    continue
                settled = self._open.get((share, section))
                if settled is not None and not said.keys().isdisjoint(settled.ranks):
                    del self._open[share, section]
                for rank in said:
                    self._equal[share, rank] = self._equal.get((share, rank), 0) | 1 << section
        return compared, differences

    def _few_elements(
        self, nodes: Sequence[int], shards: list[m.HeldShard]
    ) -> m.Dispute | str | None:
        """By the few elements of each tensor that every seal tells of."""
        said: dict[tuple[str, int], dict[int, list[m.ReplicaProof]]] = {}
        for shard in shards:
            for proof in shard.replicas:
                among = said.setdefault((proof.among, proof.members), {})
                among.setdefault(shard.rank, []).append(proof)
        for (_, members), proofs in said.items():
            values = {r: "-".join(sorted(one.digest for one in p)) for r, p in proofs.items()}
            if len(set(values.values())) < 2:
                continue
            vote = _vote(("", members, 0), 0, values)
            groups = {proof.group for each in proofs.values() for proof in each}
            known = {(share[0], rank) for share, rank in self._equal}
            if vote.decided and all((g, rank) in known for g in groups for rank in vote.outvoted):
                return _dispute(nodes, set(vote.outvoted), named=True)
            odd = min(vote.outvoted if vote.decided else set(values) - {min(values)})
            return _odd(odd, values)
        return None


def _incomplete(shards: Sequence[m.HeldShard]) -> str:
    """That some of a group share no more: the parts of the others need theirs.  Empty: none."""
    said: dict[tuple[str, int], set[int]] = {}
    for shard in shards:
        for proof in shard.replicas:
            said.setdefault((proof.among, proof.members), set()).add(shard.rank)
    unknown = sum(not shard.proofs_known for shard in shards)
    for (_, members), ranks in said.items():
        if len(ranks) + unknown < members:
            named = sorted(ranks)[:NAMED]
            more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
            return f"of {members} ranks that shared state only ranks {named}{more} still do"
    return ""


def _odd(rank: int, ranks: Iterable[int]) -> str:
    """That a rank differs from these; of many ranks the first ones are named."""
    others = sorted({*ranks} - {rank})
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    return f"rank {rank} holds other values than ranks {others[:NAMED]}{more}"


def _vote(share: _Share, section: int, said: dict[int, str]) -> _Difference:
    most, count = Counter(said.values()).most_common(1)[0]
    decided = 2 * count > len(said)
    outvoted = frozenset(rank for rank, digest in said.items() if not decided or digest != most)
    return _Difference(share, section, outvoted, decided)


def _ranks(differences: Iterable[_Difference]) -> set[int]:
    return {rank for one in differences for rank in one.outvoted}


def _dispute(
    nodes: Sequence[int], ranks: set[int], *, named: bool, share: _Share | None = None,
    section: int = 0,
) -> m.Dispute:  # fmt: skip
    known = [rank for rank in sorted(ranks) if rank < len(nodes)]
    group, count, number = share if share is not None else ("", 0, 0)
    return m.Dispute(
        ranks=tuple(sorted(ranks)), named=named, nodes=tuple(sorted({nodes[r] for r in known})),
        group=group, members=count, share=number, section=section,
    )  # fmt: skip
