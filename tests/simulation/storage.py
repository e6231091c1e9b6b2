"""A keeper's storage work: one small step per action, so that anything may come between."""

from dataclasses import replace
from typing import Any

from autockpt.executors.protocol import messages as m
from autockpt.executors.protocol.coordinator.choosing import HOPELESS_STARTS
from autockpt.values.generation import Generation
from tests.simulation.actors import Commit, Content, Keeper, Trainer
from tests.simulation.trainers import UNANSWERED, Trainers

LONGEST = 3
"""Files that one shard is put together from, at most."""


def is_replaced(trainer: Trainer, by: m.Incarnation) -> bool:
    """It is of an earlier round of that launch."""
    own = trainer.incarnation
    return own.launch_id == by.launch_id and own.restart_round < by.restart_round


class Storage(Trainers):
    """Shard files, commits, claims, decisions, deletions."""

    def do_StartPersist(self, keeper: Keeper, do: m.StartPersist) -> None:
        base = self._base(keeper, do) if self.differences else None
        name = (do.rank, do.generation, do.attempt)
        if name in keeper.names:
            self.oracle.fail(f"shard file name {name} used twice")
        keeper.names.add(name)
        keeper.jobs.append(["persist", 0, do, base])
        trainer = self.find(keeper, do.rank, term=do.generation.term)
        if trainer is not None:
            trainer.persisting.add(do.generation)

    def _base(self, keeper: Keeper, do: m.StartPersist) -> Generation | None:
        """The newest durable shard of the rank, while it is still in its slot."""
        base = keeper.bases.get(do.rank)
        if base is None or base >= do.generation or self.rng.random() >= self.differences:
            return None
        there = self.nodes[keeper.node].slots.items()
        held = {c.generation for (rank, _), c in there if c and c.sealed and rank == do.rank}
        return base if base in held else None

    def do_AbortPersist(self, keeper: Keeper, do: m.AbortPersist) -> None:
        keeper.jobs = [
            job
            for job in keeper.jobs
            if job[0] != "persist" or (job[2].rank, job[2].generation) != (do.rank, do.generation)
        ]

    def do_FetchShard(self, keeper: Keeper, do: m.FetchShard) -> None:
        shard = do.shard
        self._replicas(keeper.node, parity=shard.parity is not None)[shard.rank, do.slot] = Content(
            generation=shard.generation, history=0, rank=shard.rank
        )
        keeper.jobs.append(["fetch", 0, do])

    def do_AbortFetch(self, keeper: Keeper, do: m.AbortFetch) -> None:
        keeper.jobs = [
            job
            for job in keeper.jobs
            if job[0] != "fetch"
            or (job[2].shard.rank, job[2].slot) != (do.rank, do.slot)
            or (job[2].shard.parity is not None) != do.parity
        ]

    def do_FreeReplicas(self, keeper: Keeper, do: m.FreeReplicas) -> None:
        replicas = self._replicas(keeper.node, parity=do.parity)
        for key in [key for key in replicas if key[0] == do.rank]:
            del replicas[key]

    def _replicas(self, node: int, *, parity: bool) -> dict[tuple[int, int], Content]:
        return self.nodes[node].parities if parity else self.nodes[node].replicas

    def job_fetch(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.FetchShard = job[2]
        mixes = do.shard.parity is not None and self.runtime.mixes
        found = [self._sealed_at(keeper.node, source, mixes=mixes) for source in do.sources]
        flaky = not self.peace and self.rng.random() < self.flaky
        if not self._goes_on(do, whole=None not in found and not flaky, equal=True):
            return self._fetch_failed(do, final=None in found)
        if job[1] == 0:
            job.append(found)
            return None
        if not self.peace and self.rng.random() < 0.4:
            self.to_node(keeper, self._coming(do, mark=job[1]))
            return None
        # Of several sources each was read at its own time; none may have changed since.
        pieces = [c for c, before in zip(found, job[3], strict=True) if c and c is before]
        whole = len(pieces) == len(do.sources) and not any(c.corrupt for c in pieces)
        content = self._added_up(do, pieces, whole=whole)
        if content is None:
            return self._fetch_failed(do, final=None in found or any(c.corrupt for c in pieces))
        parity = do.shard.parity is not None
        self._replicas(keeper.node, parity=parity)[do.shard.rank, do.slot] = content
        assert content.shard is not None
        return m.ShardFetched(shard=content.shard)

    def _goes_on(self, do: m.FetchShard, *, whole: bool, equal: bool) -> bool:
        """All came and is what it was to be; without that only a rebuild may have a bad habit."""
        rebuild = do.shard.parity is None and len(do.sources) > 1
        return (whole and equal) or (rebuild and self.runtime.rebuilds_from_fewer)

    def _added_up(self, do: m.FetchShard, pieces: list[Content], *, whole: bool) -> Content | None:
        """A copy, a parity or a shard that is rebuilt, None when its digests are others."""
        shard = replace(do.shard, slot=do.slot, copied=do.shard.parity is None)
        if shard.parity is not None:
            sums = {piece.rank: piece.history for piece in pieces}
            sealed = replace(shard, root=f"parity of {sorted(sums.items())}")
            made = Content(
                generation=shard.generation, history=0, rank=shard.rank, step=shard.step,
                world=shard.world_size, sealed=True, shard=sealed, sums=sums,
            )  # fmt: skip
            return made if whole else None
        history = self._sum(shard.rank, pieces) if whole else 0
        equal = f"{history}:{shard.rank}" == shard.root
        if not self._goes_on(do, whole=whole, equal=equal):
            return None
        return Content(
            generation=shard.generation, history=history, rank=shard.rank, step=shard.step,
            world=shard.world_size, sealed=True, shard=shard,
        )  # fmt: skip

    @staticmethod
    def _sum(rank: int, pieces: list[Content]) -> int:
        """The history of what the pieces add up to; 0: of nothing that ever was."""
        histories: dict[int, int] = {}
        for piece in pieces:
            for member, history in (piece.sums or {piece.rank: piece.history}).items():
                if histories.setdefault(member, history) != history:
                    return 0
        return histories.get(rank, 0)

    def _sealed_at(self, node: int, source: m.ShardCopy, *, mixes: bool) -> Content | None:
        """What the other node has of it, if it can be asked."""
        there, wanted = self.nodes[source.node], source.shard
        if there.keeper is None or (node, source.node) in self.blocked:
            return None
        contents = [*there.slots.items(), *there.replicas.items()]
        if wanted.parity is not None:
            contents = list(there.parities.items())
        for (rank, _), content in contents:
            if content is None or not content.sealed or content.shard is None:
                continue
            if rank == wanted.rank and (mixes or content.shard.root == wanted.root):
                return content
        return None

    def _coming(self, do: m.FetchShard, *, mark: int) -> m.ShardComing:
        return m.ShardComing(
            rank=do.shard.rank,
            generation=do.shard.generation,
            slot=do.slot,
            mark=mark,
            parity=do.shard.parity is not None,
        )

    def _fetch_failed(self, do: m.FetchShard, *, final: bool) -> m.FetchFailed:
        return m.FetchFailed(
            rank=do.shard.rank,
            generation=do.shard.generation,
            slot=do.slot,
            reason="not to be had",
            final=final,
            parity=do.shard.parity is not None,
        )

    def do_AnnounceDurable(self, keeper: Keeper, do: m.AnnounceDurable) -> None:
        for trainer in self.trainers_of(keeper):
            trainer.persisting -= {g for g in trainer.persisting if g <= do.generation}
        commit = self.disk.commits.get(do.generation)
        if commit is None and do.generation in self.oracle.durable:
            self.oracle.fail(f"{do.generation} called durable, no COMMIT on disk")
        chains = [] if commit is None else [self.files_for(r, (c,)) for r, c in self._own(commit)]
        if commit is not None and max(map(len, chains), default=LONGEST) < LONGEST:
            keeper.bases.update({rank: do.generation for rank, _ in self._own(commit)})

    def do_AnnounceDropped(self, keeper: Keeper, do: m.AnnounceDropped) -> None:
        for trainer in self.trainers_of(keeper):
            trainer.persisting.discard(do.generation)

    def trainers_of(self, keeper: Keeper) -> list[Trainer]:
        """Who hears what it announces."""
        return [trainer for trainer in self.trainers if trainer.node == keeper.node]

    def _own(self, commit: Commit) -> list[tuple[int, m.Record]]:
        """The files of a commit, by rank, where the world is as large as today."""
        records = commit.entry.records
        return list(enumerate(records)) if len(records) == self.world else []

    def do_ClaimTerm(self, keeper: Keeper, do: m.ClaimTerm) -> None:
        keeper.jobs.append(["claim", 0, do])

    def do_WithdrawClaim(self, keeper: Keeper, do: m.WithdrawClaim) -> None:
        claims = [job for job in keeper.jobs if job[0] == "claim"]
        if keeper.claimed > do.term or any(job[1] > 0 for job in claims):
            return  # one was made, or is being made
        keeper.jobs = [job for job in keeper.jobs if job[0] != "claim"]
        self.to_coordinator(keeper, m.ClaimWithdrawn(incarnation=do.incarnation))

    def do_WriteDecision(self, keeper: Keeper, do: m.WriteDecision) -> None:
        known = keeper.nan | self.oracle.seen_nan | self.oracle.marked[do.term]
        if do.generation in known:
            self.oracle.fail(f"term {do.term} restores {do.generation}, which is suspect")
        for rank, generation, _ in keeper.coordinator.state.struck:
            if (do.term, rank, generation) not in self.unread:
                self.oracle.durable.discard(generation)
                self.oracle.forget_memory()
        for generation, starts in keeper.coordinator.state.failed.items():
            if starts >= HOPELESS_STARTS:
                self.oracle.forget_up_to(generation)
                self.oracle.protected.pop(generation, None)
        keeper.jobs.append(["decide", 0, do, keeper.coordinator.state.attaches[0].fresh])

    def do_WriteCommit(self, keeper: Keeper, do: m.WriteCommit) -> None:
        keeper.jobs.append(["commit", 0, do])

    def do_VerifyGeneration(self, keeper: Keeper, do: m.VerifyGeneration) -> None:
        keeper.jobs.append(["verify", 0, do])

    def do_DeleteGenerations(self, keeper: Keeper, do: m.DeleteGenerations) -> None:
        if do.term == self.disk.term:
            self.oracle.let_go(self.disk, do.generations, self.retention.keep_last)
        keeper.jobs.append(["delete", 0, do])

    def do_DropOptimizerState(self, keeper: Keeper, do: m.DropOptimizerState) -> None:
        keeper.jobs.append(["drop", 0, do])

    def do_TrashGeneration(self, keeper: Keeper, do: m.TrashGeneration) -> None:
        self._trash(do.generation)

    def _trash(self, generation: Generation) -> None:
        if generation not in self.disk.commits:
            for name in [n for n, c in self.disk.files.items() if c.generation == generation]:
                del self.disk.files[name]

    def do_MarkEverCommitted(self, keeper: Keeper, do: m.MarkEverCommitted) -> None:
        self.disk.marked = True

    def do_Report(self, keeper: Keeper, do: m.Report) -> None:
        if do.kind == "violation":
            self.oracle.fail(do.detail)
        if "report no memory" in do.detail:
            self.oracle.forget_memory()

    def work(self) -> None:
        """Some storage job takes its next small step."""
        keepers = [keeper for keeper in self.keepers() if keeper.jobs]
        if keepers:
            keeper = keepers[int(self.rng.random() * len(keepers))]
            self.step_job(keeper, keeper.jobs[int(self.rng.random() * len(keeper.jobs))])

    def step_job(self, keeper: Keeper, job: list[Any]) -> None:
        """One step; a finished job leaves the list before its answer is handled."""
        if all(job is not other for other in keeper.jobs):
            return
        if self.hung and job[0] != "fetch":
            if job[0] == "persist":
                self._hang(keeper, job[2])
            return
        answer = getattr(self, "job_" + job[0])(keeper, job)
        job[1] += 1
        if answer is not None:
            keeper.jobs.remove(job)
            if answer and job[0] in ("persist", "fetch"):
                self.to_node(keeper, answer)
            elif answer:
                self.to_coordinator(keeper, answer)

    def job_persist(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.StartPersist = job[2]
        content = self.nodes[keeper.node].slots.get((do.rank, do.slot))
        if content is None or content.generation != do.generation:
            self.oracle.fail(f"slot of {do.generation} rank {do.rank} overwritten while persisted")
        assert content is not None
        if content.sealed and not self.peace and self.rng.random() < self.hangs:
            return self._stalls(keeper, do)
        if not content.sealed or (not self.peace and self.rng.random() < 0.4):
            return None
        name = f"{do.generation}-{do.rank}-{do.attempt}"
        if content.corrupt:  # digests of chunks are compared on the way out
            return m.PersistFailed(
                rank=do.rank,
                generation=do.generation,
                attempt=do.attempt,
                reason="digest differs",
                retryable=False,
            )
        failed = not self.peace and self.rng.random() < self.flaky
        if failed or name in self.disk.files:
            return m.PersistFailed(
                rank=do.rank,
                generation=do.generation,
                attempt=do.attempt,
                reason="no space",
                retryable=self.rng.random() < 0.8,
            )
        self.disk.files[name] = Content(
            generation=do.generation,
            history=content.history,
            rank=do.rank,
            sealed=True,
            nan=content.nan,
            world=content.world,
        )
        record = {"file": name, "root": f"{content.history}:{do.rank}"}
        if job[3] is not None:
            record["base"] = job[3].name
        return m.ShardPersisted(
            rank=do.rank, generation=do.generation, attempt=do.attempt, record=record
        )

    def _hang(self, keeper: Keeper, do: m.StartPersist) -> None:
        """Nothing is written; what waits for that with its slot gets to hear it."""
        content = self.nodes[keeper.node].slots.get((do.rank, do.slot))
        if content is None or content.generation != do.generation:
            self.oracle.fail(f"slot of {do.generation} rank {do.rank} overwritten while persisted")
        elif content.sealed:
            self._stalls(keeper, do)

    def _stalls(self, keeper: Keeper, do: m.StartPersist) -> None:
        """The storage takes nothing of it for now."""
        stalled = m.PersistStalled(rank=do.rank, generation=do.generation, attempt=do.attempt)
        self.to_node(keeper, stalled)

    def job_commit(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.WriteCommit = job[2]
        term = do.generation.term
        if job[1] == 0 and self.runtime.fenced_before_commit(self.disk, term):
            return self.fenced(do)
        if job[1] in (0, 3) and self.disk.claim < term:
            return m.CommitFailed(generation=do.generation, reason="the claim is gone")
        if job[1] == 1:
            return self.link(do)
        if job[1] == 2:
            gone = do.generation not in self.disk.commits  # a newer term's retention was here
            if gone or (not self.peace and self.rng.random() < self.flaky):
                return m.CommitFailed(generation=do.generation, reason="fsync failed")
            self.disk.commits[do.generation].synced = True
        if job[1] == 3:
            if self.runtime.fenced_after_commit(self.disk, term):
                return self.fenced(do)
            self.promise_durable(do)
            return m.CommitWritten(generation=do.generation, created_s=self.now_s)
        return None

    def fenced(self, do: m.WriteCommit) -> m.CommitFailed:
        """Only a newer term ends a training."""
        if do.generation.term == self.disk.term:
            self.oracle.fail(f"{do.generation} counts as fenced, and nobody has claimed since")
        return m.CommitFailed(generation=do.generation, reason="newer term", fenced=True)

    def job_renew(self, keeper: Keeper, job: list[Any]) -> Any:
        """The claim is gone: the directory is made again under it."""
        term = keeper.coordinator.state.term
        if self.disk.claim >= term or keeper.coordinator.state.phase != "running":
            return False
        if any(other[0] in ("commit", "decide") for other in keeper.jobs):
            return None  # one thread does them all, one after the other
        if job[1] == 0:
            return m.DirectoryGone(term=term, reason="nothing is mounted") if self.flaky else None
        self.disk.claim = term
        self.disk.decisions[term] = keeper.coordinator.state.parents[term]
        return m.DirectoryRenewed(term=term)

    def link(self, do: m.WriteCommit) -> Any:
        """COMMIT appears, if its directory is still there."""
        contents = [self.disk.files.get(record["file"]) for record in do.records]
        if any(f is None or f.weights for f in self.files_of(do.records)):
            return m.CommitFailed(generation=do.generation, reason="its base is gone")
        if do.generation in self.disk.commits or any(c is None for c in contents):
            return m.CommitFailed(generation=do.generation, reason="directory is gone")
        whole = [(c.generation, c.rank) for c in contents if c is not None]
        if whole != [(do.generation, rank) for rank in range(do.world_size)]:
            self.oracle.fail(f"{do.generation} committed with shards {whole}")
        entry = m.CatalogueEntry(
            generation=do.generation,
            step=do.step,
            world_size=do.world_size,
            parent=do.parent,
            records=do.records,
            layout_digests=do.layout_digests,
            created_s=self.now_s,
            health=do.health,
            reshardable=True,
        )
        self.disk.commits[do.generation] = Commit(entry=entry)
        return None

    def promise_durable(self, do: m.WriteCommit) -> None:
        """From now on it must not be lost."""
        self.oracle.commits += 1
        self.oracle.ever = self.disk.marked = True
        files = self.files_of(do.records)
        if any(f is None for f in files):
            self.oracle.fail(f"{do.generation} called durable, and is a difference to nothing")
        if do.health != "good" or any(f is None or f.corrupt for f in files):
            return  # nobody promised anything about rotten bytes
        limits = self.oracle.lineage(max(self.oracle.decided))
        if not self.oracle.on(do.generation, limits):
            self.oracle.fail(f"{do.generation} called durable after it was abandoned")
        self.oracle.durable.add(do.generation)

    def promise_restored(self, keeper: Keeper, generation: Generation | None) -> None:
        """What is restored from files stays, whoever called it durable or did not."""
        commit = self.disk.commits.get(generation) if generation else None
        choice = keeper.coordinator.state.choice
        if commit is None or choice is None or generation in self.oracle.nan:
            return
        files = self.files_of(commit.entry.records)
        if all(source.kind in ("disk", "reshard") for source in choice.sources) and all(
            file is not None and not file.corrupt for file in files
        ):
            self.oracle.durable.add(choice.generation)

    def job_claim(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.ClaimTerm = job[2]
        if job[1] == 0 and not self.peace and self.away.random() < self.silent / 4:
            return m.TermRefused(incarnation=do.incarnation, reason=UNANSWERED, failed=True)
        if job[1] == 0 and keeper.machine.state.incarnation not in (None, do.incarnation):
            return m.TermRefused(incarnation=do.incarnation, reason="replaced")
        if job[1] == 0 and do.term is None:
            seen = (t for t in self.trainers if t.running and not t.unseen)
            launches = {t.incarnation.launch_id for t in seen}
            if launches - {do.incarnation.launch_id}:
                return m.TermRefused(incarnation=do.incarnation, reason="held by another launch")
            term = max(self.disk.claim, do.after) + 1
            if self.runtime.reads_before_claim:
                job.append(self.read_catalogue(do, term))
                return None
            self.claim(keeper, do.incarnation, term)
            job.append(term)
            return None
        if self.runtime.reads_before_claim and do.term is None:
            if job[3].term != max(self.disk.claim, do.after) + 1:
                return m.TermRefused(incarnation=do.incarnation, reason="somebody was faster")
            self.claim(keeper, do.incarnation, job[3].term)
            return job[3]
        if do.term is not None:
            if do.term < self.disk.claim:
                return m.TermRefused(incarnation=do.incarnation, reason="newer term")
            self.disk.claim = keeper.claimed = do.term
            job.append(do.term)
        return self.read_catalogue(do, job[3])

    def claim(self, keeper: Keeper, claimer: m.Incarnation, term: int) -> None:
        """A number that nobody uses, also where the directory has forgotten all.

        Trainers of an earlier round do not count: all keepers know the claimer, and refuse them.
        """
        if term <= self.disk.term:
            living = [t for t in self.trainers if not t.refused and not is_replaced(t, claimer)]
            running = [t.term for t in living]
            self.oracle.begin_anew(term, running, self.nodes)
        self.disk.claim = self.disk.term = keeper.claimed = term
        self.shapes[term] = keeper.coordinator.state.nodes

    def read_catalogue(self, do: m.ClaimTerm, term: int) -> m.TermClaimed:
        """What the claimer sees; reading makes it durable."""
        for commit in self.disk.commits.values():
            commit.synced = True
        self.oracle.basis[term] = self.oracle.eligible(term)
        self.oracle.emptied[term] = any(
            e < term and e not in self.disk.decisions for e in self.oracle.decided
        )
        self.oracle.known[term] = self.oracle.ever
        self.oracle.marked.setdefault(term, {g for g in self.disk.commits if self.is_marked(g)})
        parents = tuple(
            m.TermParent(term=e, parent=p) for e, p in sorted(self.disk.decisions.items())
        )
        return m.TermClaimed(
            incarnation=do.incarnation,
            term=term,
            committed=tuple(commit.entry for commit in self.disk.commits.values()),
            parents=parents,
            ever_committed=self.disk.marked,
        )

    def job_decide(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.WriteDecision = job[2]
        newer = self.disk.claim > do.term
        if self.disk.claim < do.term:
            return m.DecisionFailed(term=do.term, attempt=do.attempt, reason="the claim is gone")
        if newer and job[1] in (0, 2):
            return m.DecisionFailed(
                term=do.term, attempt=do.attempt, reason="newer term", fenced=True
            )
        if job[1] == 0 and not self.peace and self.rng.random() < self.flaky / 4:
            return m.DecisionFailed(term=do.term, attempt=do.attempt, reason="no space")
        if job[1] == 1:
            if newer:  # it is fenced behind the write: no rank restores by it
                self.oracle.decided[do.term] = do.generation
            else:
                self.oracle.decision(do.term, do.generation, asked=job[3], told=self.told(keeper))
            self.disk.decisions[do.term] = do.generation
            self.promise_restored(keeper, do.generation)
        if job[1] == 2:
            suspect = do.generation is not None and self.is_marked(do.generation)
            if suspect:
                self.oracle.marked[do.term].add(do.generation)
            if self._unfinished(do.term):
                keeper.jobs.append(["sweep", 0, do.term])
            return m.DecisionWritten(term=do.term, attempt=do.attempt, suspect=suspect)
        return None

    def told(self, keeper: Keeper) -> dict[int, Generation | None]:
        """Decisions before this one: those on disk, and those that keepers remember."""
        links = [link for r in keeper.coordinator.state.inventory.values() for link in r.lineage]
        told = {link.term: link.parent for link in links} | self.disk.decisions
        return {e: parent for e, parent in told.items() if e < keeper.coordinator.state.term}

    def _unfinished(self, term: int) -> list[Generation]:
        """Of earlier terms, without a COMMIT."""
        found = {content.generation for content in self.disk.files.values()}
        return sorted(g for g in found - set(self.disk.commits) if g.term < term)

    def job_sweep(self, keeper: Keeper, job: list[Any]) -> Any:
        for generation in self._unfinished(job[2])[:1]:
            self._trash(generation)
            return None
        return False

    def is_marked(self, generation: Generation) -> bool:
        """The directory calls it suspect."""
        commit = self.disk.commits.get(generation)
        return commit is not None and commit.entry.health != "good"

    def job_verify(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.VerifyGeneration = job[2]
        commit = self.disk.commits.get(do.generation)
        if commit is None:
            return False
        files = self.files_of(commit.entry.records)
        ok = all(f is not None and not f.corrupt for f in files)
        own = [self.disk.files.get(record["file"]) for record in commit.entry.records]
        nan = any(f is not None and f.nan for f in own)
        entry = replace(commit.entry, verified=ok, corrupt=not ok)
        if nan and self.rng.random() < self.unmarked:
            entry = commit.entry  # the directory takes no mark
        elif nan:
            entry = replace(entry, health="suspect")
        commit.entry = entry
        if nan:
            keeper.nan.add(do.generation)
            keeper.bases = {r: g for r, g in keeper.bases.items() if g != do.generation}
            self.oracle.found_suspect(do.generation)
        health: m.Health = "suspect" if nan else "good"
        return m.GenerationVerified(generation=do.generation, ok=ok, health=health)

    def job_drop(self, keeper: Keeper, job: list[Any]) -> Any:
        """New files, the COMMIT that names them, and then the old files go."""
        do: m.DropOptimizerState = job[2]
        commit = self.disk.commits.get(do.generation)
        if job[1] == 0:
            old = () if commit is None else commit.entry.records
            job += [old, [self.disk.files.get(record["file"]) for record in old]]
            failed = not self.peace and self.rng.random() < self.flaky
            if failed or not old or None in self.files_of(old) or old[0].get("weights_only"):
                return m.OptimizerStateDropped(
                    term=do.term, generation=do.generation, reason="no space"
                )
            return None
        old, files = job[3], job[4]
        new = tuple({"file": f"{r['file']}-w", "root": "", "weights_only": True} for r in old)
        if job[1] == 1:
            for record, content in zip(new, files, strict=True):
                self.disk.files[record["file"]] = replace(content, weights=True)
        elif job[1] == 2:
            there = all(record["file"] in self.disk.files for record in new)
            fenced = self.disk.claim != do.term
            if fenced or not there or commit is None or commit.entry.records != old:
                for record in new:
                    self.disk.files.pop(record["file"], None)
                return m.OptimizerStateDropped(
                    term=do.term, generation=do.generation, reason="replaced"
                )
            self._replace_commit(commit, new)
        else:
            for record in old:
                self.disk.files.pop(record["file"], None)
            return m.OptimizerStateDropped(term=do.term, generation=do.generation, records=new)
        return None

    def _replace_commit(self, commit: Commit, records: tuple[m.Record, ...]) -> None:
        self.oracle.reduced(self.disk, commit.entry.generation)
        commit.entry = replace(commit.entry, records=records, layout_digests=(), reshardable=False)
        for generation in self.oracle.durable & set(self.disk.commits):
            files = self.files_of(self.disk.commits[generation].entry.records)
            if any(f is None or f.weights for f in files):
                self.oracle.fail(f"weights only take what {generation} is a difference to")

    def job_delete(self, keeper: Keeper, job: list[Any]) -> Any:
        do: m.DeleteGenerations = job[2]
        if self.disk.claim != do.term:
            return False
        if job[1] == 0:
            return None
        self.oracle.deleted(self.disk, do.generations, self.retention.keep_last)
        for generation in do.generations:
            self.disk.commits.pop(generation, None)
        for generation in self.oracle.durable & set(self.disk.commits):
            if None in self.files_of(self.disk.commits[generation].entry.records):
                self.oracle.fail(f"retention deletes what {generation} is a difference to")
        return False
