"""One thread for everything that may hang: the keeper's loop never touches the file system."""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable

from autockpt.executors.protocol import messages as p
from autockpt.executors.protocol.retention import unpinned, with_bases
from autockpt.executors.storage.catalogue import VerifyResult, verify_generation
from autockpt.executors.storage.directory.directory import CheckpointDirectory
from autockpt.executors.storage.directory.records import CommitFile
from autockpt.executors.storage.file_reuse import is_tight
from autockpt.executors.storage.guard import check_deletions, check_reduction
from autockpt.executors.storage.rewriting.commits import (
    forget_rewritten,
    remove_replaced,
    replace_commit,
    require_held,
)
from autockpt.executors.storage.rewriting.weights_only import missing_room, write_weights
from autockpt.executors.throttle.rate_limit import RateLimiter
from autockpt.values.errors import AutockptError, GuardError, StorageError
from autockpt.values.generation import Generation
from autockpt.values.policy_keys.paths import is_store_url

SCRUB_BYTES_PER_S = 100e6
"""Pace of a scrub: about 1.5 % of a core, at every moment; in bursts the training feels it."""
SCRUB_HURRIED_BYTES_PER_S = 400e6
"""When it has to end: about 6 % of a core, and most of the disk stays free."""
SCRUB_WAITING = 3
"""So many unread generations hurry the one that is read: each of them is a state on disk."""
AGAIN_CHECK_S = 600.0
SCRUB_AGAIN_S = 86400.0
"""A generation read back this long ago is read again, one generation at a time, the longest ago
first.  By the wall clock: a jump makes it sooner or later, and nothing else."""


class _Claims:
    """The claims that may still be linked: the one thread makes them, the other withdraws them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ordered = self._withdrawn = 0
        """Numbers of the newest of each."""
        self._is_linking = False

    def order(self) -> int:
        """The number of one more."""
        with self._lock:
            self._ordered += 1
            return self._ordered

    def begin(self, number: int) -> bool:
        """False: it is withdrawn.  Else it may stand from now on."""
        with self._lock:
            self._is_linking = number > self._withdrawn
            return self._is_linking

    def end(self) -> None:
        """It stands, or does not, and the directory knows."""
        with self._lock:
            self._is_linking = False

    def is_withdrawn(self, number: int) -> bool:
        """It was not made, and no answer is expected."""
        with self._lock:
            return number <= self._withdrawn

    def withdraw(self) -> bool:
        """All that were ordered so far; False: it is too late for one."""
        with self._lock:
            if not self._is_linking:
                self._withdrawn = self._ordered
            return not self._is_linking


class DiskWorker:
    """Carries out directory instructions in order and posts the answers.

    Verification runs on a thread of its own: it is long and must not delay a commit.  Of several
    generations that wait for it only the newest is read: once that is verified the others may go.
    Reading back costs as much CPU as the save did, so it goes slowly.  It never lets more than a
    few generations wait, because they stay on disk meanwhile.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        run_id: str,
        post: Callable[[Callable[[], None]], None],
        answer: Callable[[object], None],
        deleted: Callable[[Generation, int, int], None],
        scrubbed: Callable[[VerifyResult, float], None] = lambda result, scrub_s: None,
        replaced: Callable[[p.Incarnation], bool] = lambda incarnation: False,
    ) -> None:
        """`deleted` and `scrubbed` receive, on a thread of ours, the generations removed and read
        back.

        `replaced` says there whether this keeper has admitted another incarnation since.
        """
        self._directory = directory
        self._run_id = run_id
        self._post = post
        self._answer = answer
        self._deleted = deleted
        self._scrubbed = scrubbed
        self._replaced = replaced
        self.scrub_gate = RateLimiter(SCRUB_BYTES_PER_S)
        """The limit that a scrub waits for before each chunk."""
        self._jobs: queue.Queue[Callable[[], None]] = queue.Queue()
        self._pulses: queue.Queue[Callable[[], None]] = queue.Queue()
        self._scrubs: queue.SimpleQueue[Generation] = queue.SimpleQueue()
        self._rewrites: queue.Queue[Callable[[], None]] = queue.Queue()
        self._reducing: set[tuple[int, Generation]] = set()
        """Term and generation of each order to drop optimizer state that has no answer yet."""
        self._claims = _Claims()
        self._asked = False
        """This keeper is the one that reads back."""
        self._tried_s: dict[Generation, float] = {}
        """When a generation was last taken to be read again, seconds since 1970."""
        threading.Thread(
            target=_drain, args=(self._jobs, self._tell), name="autockpt-disk", daemon=True
        ).start()
        threading.Thread(target=self._scrub, name="autockpt-scrub", daemon=True).start()
        threading.Thread(
            target=_drain, args=(self._rewrites, self._tell), name="autockpt-weights", daemon=True
        ).start()
        threading.Thread(
            target=_drain, args=(self._pulses, self._tell), name="autockpt-heartbeat", daemon=True
        ).start()

    @property
    def idle(self) -> bool:
        """True when nothing waits (a job may still run)."""
        return self._jobs.unfinished_tasks == 0

    def submit(self, job: Callable[[], None]) -> None:
        """Runs `job` after all earlier ones."""
        self._jobs.put(job)

    def execute(self, instruction: p.Instruction) -> None:
        """Carries out one directory instruction."""
        if isinstance(instruction, p.VerifyGeneration):
            self._scrubs.put(instruction.generation)
            if self._scrubs.qsize() >= SCRUB_WAITING:
                self.scrub_gate.bytes_per_s = SCRUB_HURRIED_BYTES_PER_S
            return
        if isinstance(instruction, p.DropOptimizerState):
            key = (instruction.term, instruction.generation)
            if key not in self._reducing:  # else one answer serves both
                self._reducing.add(key)
                self._rewrites.put(lambda: self._drop_optimizer_state(instruction))
            return
        if isinstance(instruction, p.ClaimTerm):
            number = self._claims.order()
            self._jobs.put(lambda: self._claim(instruction, number))
            return
        work: dict[type, Callable[..., None]] = {
            p.WriteDecision: self._decide,
            p.WriteCommit: self._commit,
            p.TrashGeneration: self._trash,
            p.DeleteGenerations: self._delete,
            p.MarkEverCommitted: self._mark_ever,
        }
        self._jobs.put(lambda: work[type(instruction)](instruction))

    def withdraw_claims(self, term: int) -> bool:
        """True: no claim that was ordered so far stands above `term`, and none ever will."""
        return self._directory.claimed_term <= term and self._claims.withdraw()

    def beat(self, term: int) -> None:
        """Shows that the holder of `term` lives, and makes the directory again where it is gone;
        that not while an earlier job is at work."""
        if self.idle:
            self._jobs.put(lambda: self._beat(term))
        elif self._pulses.unfinished_tasks == 0:
            self._pulses.put(lambda: self._pulse(term))

    def _pulse(self, term: int) -> None:
        """Pulse beside a long job, such as the deletion of a large checkpoint.

        Without a heartbeat, a launch on another machine takes the holder for dead.
        """
        with contextlib.suppress(AutockptError, OSError):
            if self._directory.holds(term):
                self._directory.heartbeat(term)

    def _beat(self, term: int) -> None:
        try:
            if self._directory.renew(term):
                self._tell(p.DirectoryRenewed(term=term))
            self._directory.heartbeat(term)
        except GuardError:
            return  # the next commit finds out, too, and says so
        except AutockptError as error:
            self._tell(p.DirectoryGone(term=term, reason=str(error)))

    def _tell(self, event: object) -> None:
        self._post(lambda: self._answer(event))

    def _claim(self, order: p.ClaimTerm, number: int) -> None:
        who = order.incarnation
        try:
            if self._replaced(who):
                raise GuardError(f"{who} was replaced before it could claim {self._directory.path}")
            if order.term is None:
                term = self._directory.claim(
                    self._run_id, who.launch_id, who.restart_round, force=False, after=order.after,
                    is_wanted=lambda: self._claims.begin(number),
                )  # fmt: skip
            else:
                term = order.term
                self._directory.go_on(term, self._run_id, who.launch_id, who.restart_round)
            event: object = p.TermClaimed(
                incarnation=who,
                term=term,
                committed=self._directory.catalogue(self._run_id),
                parents=self._directory.parents(),
                ever_committed=self._directory.ever_committed(),
            )
        except (AutockptError, OSError) as error:
            if self._claims.is_withdrawn(number):
                return
            failed = isinstance(error, StorageError | OSError)
            event = p.TermRefused(incarnation=who, reason=str(error), failed=failed)
        finally:
            self._claims.end()
        self._tell(event)

    def _decide(self, order: p.WriteDecision) -> None:
        try:
            self._directory.write_decision(
                order.term, order.attempt, order.generation, order.reason
            )
            chosen = order.generation
            event: object = p.DecisionWritten(
                term=order.term,
                attempt=order.attempt,
                suspect=chosen is not None and self._directory.is_suspect(chosen),
            )
            # Behind the answer, for which a restart waits.
            self._jobs.put(lambda: self._directory.trash_unfinished(order.term))
            self._jobs.put(lambda: remove_replaced(self._directory, term=order.term))
        except (AutockptError, OSError) as error:
            event = p.DecisionFailed(
                term=order.term,
                attempt=order.attempt,
                reason=str(error),
                fenced=isinstance(error, GuardError),
            )
        self._tell(event)

    def _commit(self, order: p.WriteCommit) -> None:
        try:
            created_s = self._directory.write_commit(
                self._run_id, order.generation, step=order.step, world_size=order.world_size,
                parent=order.parent, records=order.records, health=order.health,
            )  # fmt: skip
            event: object = p.CommitWritten(generation=order.generation, created_s=created_s)
        except (AutockptError, OSError) as error:
            event = p.CommitFailed(
                generation=order.generation,
                reason=str(error),
                fenced=isinstance(error, GuardError),
            )
        self._tell(event)

    def _trash(self, order: p.TrashGeneration) -> None:
        with contextlib.suppress(AutockptError, OSError):
            self._directory.trash(order.generation)
        self._say_removal_warning()

    def _say_removal_warning(self) -> None:
        if warning := self._directory.take_warning():
            self._tell(StorageError(warning))

    def _delete(self, order: p.DeleteGenerations) -> None:
        catalogue = self._directory.catalogue(self._run_id)
        steps = {entry.generation: entry.step for entry in catalogue}
        present = unpinned(catalogue, (g for g in order.generations if g in steps))
        try:
            if not self._directory.holds(order.term):
                return
            check_deletions(catalogue, present)
            staying: frozenset[Generation] = frozenset()
            for generation in sorted(present, reverse=True):  # bases after what is stored on them
                if generation in staying:
                    continue
                try:
                    freed = self._directory.delete(generation)
                except GuardError:  # pinned since the look
                    staying |= with_bases([generation], catalogue)
                else:
                    self._deleted(generation, steps[generation], freed)
        except (AutockptError, OSError) as error:
            self._tell(error)
        self._say_removal_warning()

    def _drop_optimizer_state(self, order: p.DropOptimizerState) -> None:
        """Write the new shards beside everything else; the COMMIT in turn with other commits."""
        directory, generation = self._directory, order.generation
        try:
            require_held(directory, order.term)
            check_reduction(directory.catalogue(self._run_id), generation)
            if missing := missing_room(directory, generation):
                self._say_dropped(order, reason=missing, later=True)
                return
            gate = RateLimiter(SCRUB_BYTES_PER_S)
            commit, records = write_weights(directory, generation, gate, term=order.term)
        except (AutockptError, OSError) as error:
            self._say_dropped(order, reason=str(error))
        except BaseException as error:
            self._say_dropped(order, reason=repr(error))
            raise
        else:
            self._jobs.put(lambda: self._replace_commit(order, commit, records))

    def _replace_commit(
        self, order: p.DropOptimizerState, commit: CommitFile, records: tuple[p.Record, ...]
    ) -> None:
        generation = order.generation
        try:
            if commit.records != records:
                check_reduction(self._directory.catalogue(self._run_id), generation)
                replace_commit(self._directory, commit, records, term=order.term)
        except (AutockptError, OSError) as error:
            forget_rewritten(self._directory, generation, records, term=order.term)
            self._say_dropped(order, reason=str(error))
        else:
            self._say_dropped(order, records=records)

    def _say_dropped(
        self,
        order: p.DropOptimizerState,
        *,
        records: tuple[p.Record, ...] = (),
        reason: str = "",
        later: bool = False,
    ) -> None:
        self._reducing.discard((order.term, order.generation))
        self._tell(
            p.OptimizerStateDropped(
                term=order.term, generation=order.generation, records=records, reason=reason,
                later=later,
            )
        )  # fmt: skip

    def _mark_ever(self, _: p.MarkEverCommitted) -> None:
        self._directory.mark_ever_committed()

    def _scrub(self) -> None:
        while True:
            generation = self._newest_waiting()
            try:
                generation = generation or self._longest_unread()
                if generation is not None:
                    self._verify(generation)
            except Exception as error:  # the thread must live
                self._tell(error)

    def _newest_waiting(self) -> Generation | None:
        """The newest waiting generation; None when none comes for long.

        A keeper that was never asked waits on.
        """
        try:
            newest = self._scrubs.get(timeout=AGAIN_CHECK_S if self._asked else None)
        except queue.Empty:
            return None
        self._asked = True
        with contextlib.suppress(queue.Empty):
            while True:
                newest = max(newest, self._scrubs.get_nowait())
        return newest

    def _longest_unread(self) -> Generation | None:
        """Of those whose last reading back is older than SCRUB_AGAIN_S: media rot.

        One that cannot be read, or marked, has its turn once in that time like the others.  An
        object store looks after its media itself.
        """
        if is_store_url(self._directory.path):
            return None
        found = []
        for entry in self._directory.catalogue(self._run_id):
            mark = os.path.join(self._directory.generation_path(entry.generation), "VERIFIED")
            read_s = entry.created_s  # where newer ones were read in its place
            with contextlib.suppress(OSError):
                read_s = os.stat(mark).st_mtime
            if not entry.corrupt:
                read_s = max(read_s, self._tried_s.get(entry.generation, 0.0))
                found.append((read_s, entry.generation))
        read_s, generation = min(found, default=(time.time(), None))
        if generation is None or time.time() - read_s <= SCRUB_AGAIN_S:
            return None
        self._tried_s[generation] = time.time()
        return generation

    def _verify(self, generation: Generation) -> None:
        began = time.monotonic()
        gate = self.scrub_gate
        hurried = is_tight(self._directory.path)  # what it verifies lets others go
        gate.bytes_per_s = SCRUB_HURRIED_BYTES_PER_S if hurried else SCRUB_BYTES_PER_S
        result = verify_generation(self._directory.path, generation.name, gate=gate)
        detail = "; ".join(result.problems[:3]) or result.sick
        self._scrubbed(result, time.monotonic() - began)
        if not result.ok and not result.damaged:
            # The storage does not answer: that says nothing about the checkpoint.
            self._tell(StorageError(f"{generation}: not verified: {detail}"))
            return
        if result.sick and not self._directory.mark(generation, "SUSPECT"):
            told = "cannot be marked SUSPECT, so it is not marked VERIFIED either"
            self._tell(StorageError(f"{generation}: {result.sick}, and {told}"))
        else:
            self._directory.mark(generation, "VERIFIED" if result.ok else "CORRUPT")
        self._tell(
            p.GenerationVerified(
                generation=generation, ok=result.ok, detail=detail,
                health="suspect" if result.sick else "good",
            )
        )  # fmt: skip


def _drain(jobs: "queue.Queue[Callable[[], None]]", tell: Callable[[object], None]) -> None:
    while True:
        job = jobs.get()
        try:
            job()
        except Exception as error:  # the thread must live: every later commit runs on it
            tell(error)
        finally:
            jobs.task_done()
