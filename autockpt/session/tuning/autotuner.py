"""The thread on rank 0 that thinks: profiles the first iterations, decides, and re-tunes.

Wires telemetry (what this run measures of itself) to the pure parts: profiles -> policies.decide
for a run that came without a profile, tuner.Controller afterwards.  The training thread only
appends to a queue here; everything else happens beside it, and a failure leaves the plan as it is.
The controller's inputs and answers are recorded, so that every change can be replayed.
"""

import contextlib
import math
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Protocol

from autockpt.executors.image.layout.plan import Layout
from autockpt.executors.image.layout.room import RESERVE_BYTES
from autockpt.executors.keeper.client.saves import SaveHandle
from autockpt.executors.linux.memory import headroom, swing_bytes
from autockpt.executors.snapshot.replica_shares import Place
from autockpt.executors.state.live_state import LiveState
from autockpt.policies.cost_model.inputs import decided_again
from autockpt.policies.decide import decide
from autockpt.profiles.assemble import profile_from_run
from autockpt.profiles.samples import RunSamples
from autockpt.profiling.facts.facts import host_facts, state_inventory
from autockpt.profiling.facts.start_decision import knows_more, undecided, write_memory
from autockpt.run_directory import RunDirectory
from autockpt.session.job import Job
from autockpt.session.tuning.recorder import Recorder
from autockpt.tuner.online.controller import Controller
from autockpt.tuner.online.proposals import PlanProposal, digest_of, intervals_of
from autockpt.tuner.online.recording import RecordedController
from autockpt.tuner.online.watches.scheme_change import LINK_SLOWER
from autockpt.values import telemetry as t
from autockpt.values.plan import CheckpointPlan, Choice, Decision
from autockpt.values.redundancy import said
from autockpt.values.units import format_bytes, format_duration

THINK_S = 0.25
ANSWER_S = 5.0
"""A proposal may be on its way to all ranks for so long before it is made again."""
LENGTH_TOLERANCE = 0.05
"""The controller gets the expected length of the run again when it changed by this fraction."""
SIZE_TOLERANCE = 1.25
"""A profile of a state larger or smaller by this factor is of another job."""
OBSERVED_CHECKPOINTS = 3
"""Durable checkpoints before a run without a profile is planned for."""
OBSERVED_BLOCKS = 3
"""Telemetry blocks of iterations; the first holds the warm-up and is dropped."""
NOTE_S = 10.0
"""The host's memory is looked at this often,"""
NOTED_CHANGE = 1.25
"""and noted when it has changed by this factor, or is less than the reserve."""
REMEMBER_S = (1.0, 30.0)
"""The controller's observations are written down this often, if there are new ones: at first, and
at the end of a long life."""
REMEMBER_PART = 0.25
"""In between, when so much of this process's life is new in them."""


class TunerHost(Protocol):
    """The session, as its tuner sees it; used on the tuner's thread."""

    @property
    def layout(self) -> Layout | None:
        """Of the newest checkpoint; None: there is none."""

    @property
    def slots_made(self) -> tuple[int, int]:
        """(slots of this rank, bytes of one)."""

    def propose(self, plan: CheckpointPlan) -> None:
        """To all ranks."""

    def report_degraded(self, what: str, reason: str) -> None:
        """Part of the session does not work, and the training goes on."""

    def emit(self, event: t.Event) -> None:
        """Into the telemetry."""


class AutoTuner:
    """Rank 0's planner.  Calls that bring it news are cheap, from any thread."""

    def __init__(
        self,
        job: Job,
        state: LiveState,
        host: TunerHost,
    ) -> None:
        self._job = job
        self._state = state
        self._host = host
        self._files = RunDirectory(job.run_directory)
        self._queue: deque[t.Event] = deque()
        self._applied: deque[CheckpointPlan] = deque()
        self._samples = _Samples()
        self._measuring = job.profile_in_place
        self._compared = job.decision is None or job.profile is None
        """Whether the profile that was decided from is known to be of a state of this size."""
        self._offers: dict[str, PlanProposal] = {}
        """By digest of the plan."""
        self._decision = job.decision
        self._proposed_s = -ANSWER_S
        self._unasked = False
        """A block of iterations ended, or the last answer may not have been followed: a question
        takes a millisecond, so one a second is enough."""
        self._step = 0
        self._new = False
        """It has received news that the next process should know."""
        self._run_s = 0.0
        self.total: int | None = None
        """Steps of the whole run, where the loop says so."""
        self._closed = threading.Event()
        self._recorder = Recorder(self._files.controller)
        self._began_s = self._remembered_s = time.monotonic()
        self._note_s = 0.0
        self._noted: t.HostMemoryNoted | None = None
        start = job.start or undecided(job.plan, nodes=len(set(job.nodes)))
        self._controller = RecordedController(
            Controller(start.memory, goal=job.goal), self._recorder
        )
        self.started_with = self._start()
        before = self._decision if self.started_with is None else None
        self._stale = before is not None and knows_more(start.memory.seen, before)
        """The promise is of an earlier start: failures and costs since then are not in it."""
        if job.restart_count and len(failures := self._files.failures()) >= 2:
            self._controller.interrupted(time.monotonic(), failures[-1].exposure_s)
        self._thread = threading.Thread(target=self._think, name="autockpt-tuner", daemon=True)
        self._thread.start()

    def _start(self) -> PlanProposal | None:
        """Return the proposal behind this start's plan; None: the plan is the one before."""
        proposal = self._controller.start()
        if proposal is None or self._controller.observing:
            if proposal is not None:
                self._withhold(proposal, time.monotonic())
            return None
        self._offers[digest_of(proposal.plan)] = proposal
        if proposal.plan.version != self._job.plan.version:
            self._proposed_s = time.monotonic()
            self._host.propose(proposal.plan)  # the ranks had no way to agree on it before
            return None
        self._applied.append(proposal.plan)
        return proposal

    # ------------------------------------------------------------------ told

    def observe(self, event: t.Event) -> None:
        """An event of this rank; called on the training thread."""
        self._queue.append(event)

    def note_durable(self, save: SaveHandle) -> None:
        """The keeper's news of a save, as a telemetry event; one for memory alone shows no time."""
        now = time.monotonic()
        if save.disk and save.began_s is not None:
            self._queue.append(
                t.CheckpointDurable(
                    at_s=now, rank=-1, generation=str(save.generation), step=save.step, bytes=0,
                    stored_bytes=0, latency_s=now - save.began_s, write_s=0.0,
                )
            )  # fmt: skip

    def note_replicated(self, save: SaveHandle, nbytes: int, moving_s: float) -> None:
        """The keeper's news that other nodes hold copies of a save."""
        now = time.monotonic()
        if save.began_s is not None:
            self._queue.append(
                t.GenerationReplicated(
                    at_s=now, rank=-1, generation=str(save.generation), step=save.step,
                    latency_s=now - save.began_s, bytes=nbytes, moving_s=moving_s,
                )
            )  # fmt: skip

    def note_discarded(self, save: SaveHandle, reason: str) -> None:
        """The keeper's news that a save will not be durable: it is under way no more."""
        if save.disk:
            self._queue.append(
                t.PersistFailed(
                    at_s=time.monotonic(), rank=-1, generation=str(save.generation),
                    step=save.step, reason=reason,
                )
            )  # fmt: skip

    def reason(self, plan: CheckpointPlan) -> str:
        """Why a plan was proposed."""
        offer = self._offers.get(digest_of(plan))
        return "decided before a restart" if offer is None else offer.reason

    def applied(self, plan: CheckpointPlan) -> None:
        """All ranks follow `plan` now; kept for the next start."""
        self._applied.append(plan)

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=5)
        self._recorder.close()

    def disown(self) -> None:
        """In a forked child: thread and recording are the parent's."""
        self._recorder.disown()

    # ------------------------------------------------------------------ thinks

    def _think(self) -> None:
        while not self._closed.wait(THINK_S):
            try:
                self._drain()
                self._note_memory()
                self._consider()
                self._remember()
            except Exception as error:  # the plan stays as it is, the training goes on
                self._host.report_degraded("planning", f"{type(error).__name__}: {error}")
                self._measuring = False
                if self._closed.wait(60.0):
                    return

    def _drain(self) -> None:
        if self._stale:
            self._stale = False
            self._promise_anew()
        while self._applied:
            self._write_down(self._applied.popleft())
            self._remembered_s, self._new = -math.inf, True
        while self._queue:
            event = self._queue.popleft()
            if isinstance(event, t.IterationsTimed):
                self._unasked, self._step = True, event.step
                self._expect_end(event)
            self._new = self._new or isinstance(event, t.SnapshotSealed | t.CheckpointDurable)
            self._samples.observe(event)
            self._controller.observe(event)

    def _note_memory(self) -> None:
        """For the number of slots."""
        now = time.monotonic()
        if now < self._note_s:
            return
        self._note_s = now + NOTE_S
        (slots, slot_bytes), left = self._host.slots_made, headroom()
        if not slots or not is_news(self._noted, slots, left.available_bytes):
            return
        self._noted = t.HostMemoryNoted(
            at_s=now, rank=self._job.rank, available_bytes=left.available_bytes,
            reserve_bytes=RESERVE_BYTES, room_bytes=left.beside_reserve(swing_bytes=swing_bytes()),
            slots=slots, slot_bytes=slot_bytes, ranks=self._job.nodes.count(self._job.node),
        )  # fmt: skip
        self._host.emit(self._noted)

    def _remember(self) -> None:
        """For the next process, which may come at any time: at once behind a change of the plan.

        A memory of another plan than the newest would be of other costs.
        """
        at_s, (least_s, most_s) = time.monotonic(), REMEMBER_S
        wait_s = min(max(least_s, REMEMBER_PART * (at_s - self._began_s)), most_s)
        if self._new and at_s - self._remembered_s >= wait_s:
            self._remembered_s, self._new = at_s, False
            with contextlib.suppress(OSError):
                write_memory(self._files, self._controller.memory)

    def _expect_end(self, event: t.IterationsTimed) -> None:
        """A run of known length dwells on a plan for a part of it, not for an hour."""
        if self.total is None or not event.count:
            return
        run_s = self.total * (event.total_s + event.checkpoint_s) / event.count
        if abs(run_s - self._run_s) > LENGTH_TOLERANCE * self._run_s:
            self._run_s = run_s
            self._controller.lasts(run_s)

    def _consider(self) -> None:
        now = time.monotonic()
        if not self._unasked or now - self._proposed_s < ANSWER_S:
            return
        if not self._compared:
            self._compare_state()
        if self._measuring:
            if self._samples.enough():
                self._measuring = False
                self._plan_from_profile(now)
            return
        proposal = self._controller.propose(now, self._step)
        self._unasked = proposal is not None
        if proposal is not None and self._controller.observing:
            self._withhold(proposal, now)
        elif proposal is not None:
            self._offer(proposal, now)

    def _compare_state(self) -> None:
        """A plan for a state of another size does not hold: the run is measured anew."""
        layout, profile = self._host.layout, self._job.profile
        if layout is None or profile is None:
            return
        self._compared = True
        measured, here = profile.state.total_bytes, state_inventory(self._state, layout).total_bytes
        if max(measured, here) > SIZE_TOLERANCE * min(measured, here):
            self._measuring = True
            self._host.report_degraded(
                "profile",
                f"it was measured with a state of {format_bytes(measured)} per rank, this job has "
                f"{format_bytes(here)}; the plan is made anew from the first iterations",
            )

    def _offer(self, proposal: PlanProposal, now: float) -> None:
        self._offers[digest_of(proposal.plan)] = proposal
        self._proposed_s = now
        self._host.propose(proposal.plan)

    def _withhold(self, proposal: PlanProposal, now: float) -> None:
        """The policy only observes: report the change that would have been made."""
        memory, disk = intervals_of(proposal.plan)
        self._host.emit(
            t.PlanChangeWithheld(
                at_s=now, rank=self._job.rank, step=self._step, kind=proposal.kind,
                memory_interval_steps=memory, disk_interval_steps=disk, reason=proposal.reason,
            )
        )  # fmt: skip

    def _write_down(self, plan: CheckpointPlan) -> None:
        """plan.yaml and decision.json say what is in force and why, also after a restart."""
        if self._decision is None:
            self._files.write_plan(plan)
            return
        decision, offer = replace(self._decision, plan=plan), self._offers.get(digest_of(plan))
        if offer is not None:
            choices = tuple(_renewed(choice, offer) for choice in decision.choices)
            decision = replace(decision, choices=choices)
            if offer.expected is not None and offer.inputs is not None:
                decision = decided_again(
                    decision, plan, choices, offer.expected, offer.inputs, self._job.goal
                )
        self._decide(decision)

    def _promise_anew(self) -> None:
        """The plan stays, and its promise is of now."""
        promised, decision = self._controller.promise(), self._decision
        if promised is not None and decision is not None:
            self._decide(
                decided_again(decision, decision.plan, decision.choices, *promised, self._job.goal)
            )

    def _decide(self, decision: Decision) -> None:
        # Not at the top: every restart would wait for YAML and the reader of policies.
        from autockpt.policies.policy_file import plan_to_yaml

        self._decision = decision
        self._files.write_decision(decision, plan_text=plan_to_yaml(decision))

    def _plan_from_profile(self, now: float) -> None:
        """The first iterations were the profile: decide as `autockpt plan` would."""
        layout = self._host.layout
        if layout is None:
            return
        shares = self._job.plan.staging.shares
        place = Place(rank=self._job.rank, nodes=tuple(self._job.nodes), among=shares)
        facts = host_facts(
            self._job.run_directory,
            state=state_inventory(self._state, layout, place=place),
            storage_dir=self._job.checkpoints,
        )
        profile = profile_from_run(self._samples.run_samples(), facts)
        decision = decide(profile, self._job.goal)
        plan = replace(decision.plan, version=self._controller.plan.version + 1)
        decision = replace(decision, plan=plan)
        self._files.write_profile(profile)
        self._decide(decision)
        interval = decision.choice("disk.interval")
        reason = "measured in the first iterations"
        if interval is not None:
            reason = f"measured in the first iterations: {interval.reason}"
        self._controller.expect(plan, decision.expected)
        self._offer(
            PlanProposal(plan=plan, kind="first", reason=reason, expected=decision.expected), now
        )


def is_news(before: t.HostMemoryNoted | None, slots: int, available_bytes: int) -> bool:
    """Whether to note the host's memory again: also each time that it is or was below the reserve.

    Without that, the newest note could show too little for ever.
    """
    if before is None or before.slots != slots:
        return True
    amounts = (before.available_bytes, available_bytes)
    return max(amounts) > NOTED_CHANGE * min(amounts) or min(amounts) < RESERVE_BYTES


def _renewed(choice: Choice, offer: PlanProposal) -> Choice:
    """Return the re-tuned choice, with the reason and numbers of the change."""
    if choice.name == "staging":
        return _rescheduled(choice, offer)
    if choice.name == "codec":
        return _recoded(choice, offer)
    if choice.name == "slots":
        return _renumbered(choice, offer)
    if choice.name == "redundancy":
        return _repaced(choice, offer)
    if offer.kind == "write":  # the staging's alone
        return choice
    tier = choice.name.removesuffix(".interval")
    steps = offer.plan.tier(tier).interval_steps
    if tier == choice.name or choice.chosen.split(" ", 1)[0] == str(steps):
        return choice
    return Choice(
        name=choice.name,
        chosen=f"{steps} steps",
        reason=offer.reason,
        numbers=offer.numbers,
        runner_up=f"{choice.chosen.split(' (', 1)[0]}, as before",
        runner_up_waste=offer.numbers.get("waste_before"),
        chosen_waste=None if offer.expected is None else offer.expected.waste,
        binding=offer.binding,
    )


def _rescheduled(choice: Choice, offer: PlanProposal) -> Choice:
    """The staging after a comparison: predictions stay beside observations."""
    if offer.kind == "write":
        return _rewritten(choice, offer)
    if offer.kind != "schedule":
        return choice
    before, _, rest = choice.chosen.partition(",")
    schedule = offer.plan.staging.schedule
    predicted = ", ".join(
        f"{name} {format_duration(choice.numbers[f'{name}_cost_s'])}"
        for name in ("windows", "lazy", "blocking")
        if f"{name}_cost_s" in choice.numbers and f"{name}_observed_s" in offer.numbers
    )
    return replace(
        choice,
        chosen=f"{schedule},{rest}",
        reason=offer.reason + (predicted and f"; expected were {predicted}"),
        numbers={**choice.numbers, **offer.numbers},
        runner_up=choice.runner_up if before == schedule else f"{before}, as before",
    )


def _rewritten(choice: Choice, offer: PlanProposal) -> Choice:
    """The staging after ways of writing were compared."""
    before, _, former = choice.chosen.rpartition(", ")
    way = str(offer.plan.staging.write_way)
    return replace(
        choice,
        chosen=f"{before}, {way}" if before else way,
        reason=offer.reason,
        numbers={**choice.numbers, **offer.numbers},
        runner_up=choice.runner_up if way == former else f"{former}, as before",
    )


def _recoded(choice: Choice, offer: PlanProposal) -> Choice:
    """The codec after a change; the expectations of the codecs stay in the numbers."""
    if offer.kind != "codec":
        return choice
    codec = offer.plan.tier("disk").codec
    return replace(
        choice,
        chosen=", ".join(f"{name}: {kind}" for name, kind in codec.items()) or "none",
        reason=offer.reason,
        numbers={**choice.numbers, **offer.numbers},
        runner_up=f"{choice.chosen}, as before",
    )


def _renumbered(choice: Choice, offer: PlanProposal) -> Choice:
    """The slots after their number changed."""
    if offer.kind != "slots":
        return choice
    return replace(
        choice, chosen=str(offer.plan.slots), reason=offer.reason,
        numbers={**choice.numbers, **offer.numbers}, runner_up=f"{choice.chosen}, as before",
    )  # fmt: skip


def _repaced(choice: Choice, offer: PlanProposal) -> Choice:
    """The redundancy after a change of its rate, or of its scheme."""
    if LINK_SLOWER not in offer.numbers:
        return choice
    now = offer.plan.redundancy
    scheme, path, same = said(now), f"{now.path} to {now.path}", offer.kind == "redundancy"
    return replace(
        choice,
        chosen=choice.chosen if same else f"{scheme}, {path}",
        reason=offer.reason,
        numbers={**choice.numbers, **offer.numbers, "rate_bytes_per_s": now.rate_bytes_per_s},
        runner_up=choice.runner_up if same else f"{choice.chosen}, as before",
    )


class _Samples:
    """The measurements from the first iterations of a run."""

    def __init__(self) -> None:
        self.quiet: list[float] = []
        self.busy: list[float] = []
        self.stalls: list[float] = []
        self.copies: list[float] = []
        self.persists: list[float] = []
        self._blocks = 0

    def observe(self, event: t.Event) -> None:
        """Takes one event in; memory is bounded by `enough`."""
        if len(self.quiet) > 1000 or len(self.stalls) > 1000:
            return
        if isinstance(event, t.IterationsTimed):
            self._blocks += 1
            if self._blocks > 1:
                self.quiet += [event.quiet_s] if event.quiet_s else []
                self.busy += [event.busy_s] if event.busy_s else []
        elif isinstance(event, t.SnapshotSealed):
            self.stalls.append(event.boundary_stall_s + event.fence_stall_s)
            self.copies.append(event.copy_s)
        elif isinstance(event, t.CheckpointDurable):
            self.persists.append(event.latency_s)

    def enough(self) -> bool:
        """Enough to plan from."""
        return (
            self._blocks >= OBSERVED_BLOCKS
            and len(self.persists) >= OBSERVED_CHECKPOINTS
            and bool(self.quiet or self.busy)
        )

    def run_samples(self) -> RunSamples:
        """The samples; a job whose every iteration was busy is timed by those."""
        return RunSamples(
            quiet_s=tuple(self.quiet or self.busy),
            busy_s=tuple(self.busy) if self.quiet else (),
            stalls_s=tuple(self.stalls),
            copies_s=tuple(self.copies),
            persists_s=tuple(self.persists),
        )
