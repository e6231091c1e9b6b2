"""The online controller: tell it what happened, ask it whether the plan should change.

    observe(event) ...  propose(now, step) -> a proposal or None  ->  all ranks apply  ->
    observe(PlanChanged)  ->  watch  ->  keep or roll back

Asking changes nothing, so a proposal that was not applied may simply be asked for again; the same
events and questions give the same proposals.  A change passes gates that make it rare: predicted
gain, dead-band, dwell, no save under way.  A cost that jumped does not dwell, emergencies pass
fewer gates still.

Source: docs/concepts/policy.md, "Online re-tuning".
"""

from dataclasses import replace
from typing import Literal

from autockpt.policies.codec_speeds import CodecAtSpeed
from autockpt.policies.cost_model.costs import Costs
from autockpt.policies.cost_model.sensitivity import even_failures
from autockpt.policies.cost_model.waste import gain
from autockpt.policies.interval.choose import Intervals
from autockpt.policies.interval.short_lives import SURE, within_lives
from autockpt.policies.redundancy.link_speeds import ExchangeAtSpeed, SchemeBySpeed
from autockpt.tuner.online import backoff, rollback_check
from autockpt.tuner.online.controller_state import Change, Memory
from autockpt.tuner.online.estimates import WINDOW, Window
from autockpt.tuner.online.observed import KNOWN, Observed
from autockpt.tuner.online.outlook import Outlook
from autockpt.tuner.online.proposals import (
    Kind,
    PlanProposal,
    apart,
    digest_of,
    intervals_of,
    scaled,
    with_codec,
    with_intervals,
    written,
)
from autockpt.tuner.online.settings import ControllerSettings
from autockpt.tuner.online.turns.decisions import TURNED, next_turn, note_cost, note_switch
from autockpt.tuner.online.watches import codec, codec_speed, exchange, scheme, scheme_change, slots
from autockpt.tuner.online.watches.codec_speed import CodecWatch
from autockpt.tuner.online.watches.exchange import ExchangeWatch, meant_for
from autockpt.tuner.online.watches.scheme import SchemeWatch
from autockpt.tuner.online.watches.scheme_change import LINK_SLOWER, SchemeChange
from autockpt.values.decision_inputs import DecisionInputs
from autockpt.values.errors import ConfigError
from autockpt.values.failure import Life
from autockpt.values.goal import Goal
from autockpt.values.plan import CheckpointPlan, Expected, WriteWay
from autockpt.values.profile import FailureRates, RecoveryTimes
from autockpt.values.redundancy import is_placed_alike
from autockpt.values.telemetry import (
    Event,
    GenerationReplicated,
    PlanChanged,
    PlanChangeWithheld,
)
from autockpt.values.units import format_duration, format_fraction

BY_SPEED = "by_speed"
"""Number of a proposal that changes the codec because of the storage's speed."""
FELL = 3
"""Checkpoints that show how far a time until durable has fallen."""
UNSETTLED = ("back-off", "hurry", "calm", "codec", "redundancy", "scheme", "slots")
"""Changes that leave a jump of a cost to be answered."""
OFFERS = 8
"""Proposals that may still be applied: the first one since the last change, and the newest."""


def begin(
    *,
    plan: CheckpointPlan,
    failures: FailureRates,
    recovery: RecoveryTimes,
    prior: Costs | None = None,
    codecs: tuple[CodecAtSpeed, ...] = (),
    ways: tuple[WriteWay, ...] = (),
    exchange: ExchangeWatch | None = None,
    schemes: tuple[SchemeBySpeed, ...] = (),
    barren: tuple[Life, ...] = (),
) -> Memory:
    """A memory that has seen nothing; `prior`: costs from a profile, None without one.

    `codecs`: what to encode with on storage of other speeds than the profile's, without a codec.
    `ways`: of writing, the best of their kinds by the profile.
    `exchange`: of copies to other nodes, by the speed of the link; None: there are none.
    `schemes`: of these copies, with the one of the plan first.
    `barren`: the newest lives of which nothing was kept.
    """
    profiled_s = prior.persist_s if prior is not None else 0.0
    link = meant_for(exchange or ExchangeWatch(), plan.redundancy)
    return Memory(
        plan=plan,
        seen=Observed(failures=failures, recovery=recovery, prior=prior),
        codec=CodecWatch(table=codecs, profiled_s=profiled_s),
        ways=ways,
        exchange=link,
        # Where the rate is not for the link as profiled, the scheme may not be for it either.
        scheme=SchemeWatch(schemes=schemes, slower=1.0 if link.slower == 1.0 else 0.0),
        barren=barren,
    )


def go_on(former: Memory, new: Memory) -> Memory:
    """The memory of a process that goes on where another has ended: `new`, with its estimates.

    The costs of checkpoints and iterations belong to the job and stay.  Times and work under way
    belonged to the old process and go.  Estimates of bytes that were staged or encoded otherwise
    are none of this plan's.
    """
    was, now = former.plan, new.plan
    if was.staging != now.staging or was.tier("disk").codec != now.tier("disk").codec:
        new.seen.link = former.seen.link
        watch, other = _exchange_goes_on(former, new)
        return replace(new, exchange=watch, scheme=other)
    seen, (watch, other) = former.seen, _exchange_goes_on(former, new)
    seen.failures, seen.recovery, seen.prior = new.seen.failures, new.seen.recovery, new.seen.prior
    seen.next_process()
    return replace(
        new,
        seen=seen,
        dwell_from_sealed=seen.sealed,
        patience=former.patience,
        codec=replace(former.codec, table=new.codec.table, profiled_s=new.codec.profiled_s),
        exchange=watch,
        scheme=other,
        compared=former.compared,
        trial=former.trial,
    )


def _exchange_goes_on(former: Memory, new: Memory) -> tuple[ExchangeWatch, SchemeWatch]:
    """The link as the process before saw it; samples of another scheme tell its speed alone."""
    watch, other, seen = new.exchange, new.scheme, former.seen
    if former.plan.redundancy != new.plan.redundancy:
        seen.send = Window(rare=True)
        return watch, other
    found = next((at for at in watch.table if at.slower == former.exchange.slower), None)
    if found is None:
        return watch, other
    if new.seen.prior is not None:
        new.seen.prior = replace(new.seen.prior, peers=found.peers)
    was = former.scheme
    other = replace(other, slower=was.slower, barred=was.barred)
    return replace(watch, slower=found.slower), other


class Controller:
    """Decides when intervals and the schedule of copying change.  Pure: time is an argument."""

    def __init__(
        self, memory: Memory, *, goal: Goal, settings: ControllerSettings | None = None
    ) -> None:
        self.memory = memory
        self.goal = goal
        self.settings = settings or ControllerSettings()
        self.obstacle = ""
        """Why no interval satisfies the limits now, "" if one does; for the report."""
        self._outlook: Outlook | None = None

    @property
    def plan(self) -> CheckpointPlan:
        """The plan in force."""
        return self.memory.plan

    @property
    def seen(self) -> Observed:
        """The estimates."""
        return self.memory.seen

    @property
    def mode(self) -> Literal["on", "observe", "off"]:
        """Whether proposals are for applying, for the record only, or not made."""
        wishes = (self.plan.retune, self.goal.pins.retune)
        if False in wishes:
            return "off"
        return "observe" if "observe" in wishes else "on"

    # --- tell

    def observe(self, event: Event) -> None:
        """Take in one event of this run, oldest first."""
        sealed = self.seen.sealed
        self.seen.observe(event)
        self._outlook = None
        if isinstance(event, GenerationReplicated):
            self._note_exchange()
        self.memory.slots = slots.noted(self.memory.slots, event)
        if isinstance(event, PlanChanged) and event.plan_version > self.plan.version:
            self._applied(event)
        elif isinstance(event, PlanChangeWithheld):
            self._dwell(event)
        for decision in TURNED:
            note_cost(decision, self.memory)
        if self.seen.sealed > sealed:
            self._count_overhead()
            if self.seen.persist.n >= self.settings.jump_checkpoints:
                self.memory.codec = codec_speed.proves(self.memory.codec, self.seen.persist)
            self._end_watch()

    def expect(self, plan: CheckpointPlan, expected: Expected | None = None) -> None:
        """Offer a plan to all ranks that was decided elsewhere, e.g. from a whole profile."""
        self._offer(
            PlanProposal(plan=plan, kind="first", reason="decided elsewhere", expected=expected)
        )

    def interrupted(self, at_s: float, exposure_s: float) -> None:
        """This run was interrupted at `at_s`, `exposure_s` of training after the last time.

        A process that dies takes its controller along; this tells the next one of a burst.
        """
        steps = max(intervals_of(self.plan))
        if self.seen.iteration_s and exposure_s < steps * self.seen.iteration_s:
            self.memory.hurry_until_s = at_s + self.settings.hurry_s

    def _offer(self, proposal: PlanProposal) -> None:
        if proposal not in self.memory.offers:
            first, later = self.memory.offers[:1], self.memory.offers[1:]
            self.memory.offers = (*first, *later[2 - OFFERS :], proposal)

    def _offered(self, event: PlanChanged) -> PlanProposal:
        """Return the offer that was applied; a new one for a plan that was not offered here.

        Offers with other slots, rates or codecs have the same version and intervals.
        """
        steps = (event.memory_interval_steps, event.disk_interval_steps)
        offers = [o for o in reversed(self.memory.offers) if o.plan.version == event.plan_version]
        for offer in offers:
            if digest_of(offer.plan) == event.plan_digest:
                return offer
        for offer in offers:
            if intervals_of(offer.plan) == steps:
                return offer
        plan = replace(with_intervals(self.plan, *steps), version=event.plan_version)
        return PlanProposal(plan=plan, kind="foreign", reason=event.reason)

    def _applied(self, event: PlanChanged) -> None:
        memory, seen, offered = self.memory, self.seen, self._offered(event)
        judged = offered.kind in ("first", "retune")
        memory.change = Change(
            before=self.plan,
            sealed=seen.sealed,
            pace_s=seen.pace.mean,
            pace_error_s=seen.pace.error,
            expected_waste=offered.expected_waste if judged else None,
        )
        memory.watching = judged
        if offered.kind == "rollback":
            memory.patience = min(8.0, memory.patience * 2.0)
        memory.hurried_from = intervals_of(self.plan) if offered.kind == "hurry" else None
        note_switch(memory, self.plan.staging, offered.plan.staging)
        if offered.kind == "codec":
            self._recoded(offered)
        elif offered.kind == "redundancy":
            self._repaced(offered)
        elif offered.kind == "slots":
            memory.slots = slots.changed(memory.slots)
        if not is_placed_alike(self.plan.redundancy, offered.plan.redundancy):
            self._note_scheme(offered, event.at_s)
        memory.plan, memory.offers = offered.plan, ()
        self._dwell(event, settled=offered.kind not in UNSETTLED)

    def _recoded(self, offered: PlanProposal) -> None:
        """Note that the codec went or came back; earlier durable times no longer apply."""
        memory, durable, then = self.memory, self.seen.persist, offered.plan.tier("disk").codec
        if BY_SPEED in offered.numbers:
            memory.codec = codec_speed.changed(memory.codec, durable, encoded=bool(then))
            memory.trial = None
        elif memory.trial is not None:
            memory.trial = replace(memory.trial, over=bool(then))
        else:
            memory.trial = codec.CodecTrial(
                encoded=self.plan.tier("disk"), durable_s=durable.mean, error_s=durable.error
            )
        self.seen.persist = Window(rare=True, jumped=True)
        if (write := memory.compared.get("write")) is not None:
            memory.compared = {**memory.compared, "write": replace(write, cost_s=0.0)}

    def _repaced(self, offered: PlanProposal) -> None:
        """Note the speed that the rate is meant for.

        The time of an exchange follows from the observed speed, so intervals follow at once.
        Observed times replace it.
        """
        at = exchange.nearest(self.memory.exchange, offered.numbers[LINK_SLOWER])
        self._exchanges_as(at)

    def _note_exchange(self) -> None:
        memory = self.memory
        memory.scheme = scheme.exchanged(memory.scheme, self.seen.send.samples[-1])
        if memory.scheme.schemes and self.mode == "on" and self._ready():
            scheme_change.note_exchange(memory, self.outlook, self.settings)

    def _note_scheme(self, offered: PlanProposal, at_s: float) -> None:
        """The same after a change of the scheme, which is watched from now on."""
        memory, now, send = self.memory, offered.plan.redundancy, self.seen.send
        watch, found = memory.scheme, memory.scheme.of(now)
        slower = offered.numbers.get(LINK_SLOWER, watch.slower or memory.exchange.slower)
        memory.scheme = scheme.changed(
            watch, self.plan.redundancy, now, slower=slower, at_s=at_s, sealed=self.seen.sealed,
            sent_s=send.mean if send.n >= KNOWN else 0.0,
        )  # fmt: skip
        at = scheme.at_speed(found, slower) if found is not None else None
        if found is None or at is None:  # decided elsewhere: its exchanges will tell
            memory.exchange, self.seen.send = ExchangeWatch(), Window(rare=True)
            return
        memory.exchange = replace(memory.exchange, table=found.table)
        self._exchanges_as(at)

    def _exchanges_as(self, at: ExchangeAtSpeed) -> None:
        memory, seen = self.memory, self.seen
        memory.exchange = replace(memory.exchange, slower=at.slower)
        if seen.prior is not None:
            seen.prior = replace(seen.prior, peers=at.peers)
        expected = (at.peers.send_s,) * self.settings.jump_checkpoints
        seen.send = Window(samples=expected, rare=True, jumped=True)
        seen.send.jumps.restart(expected)

    def _dwell(self, event: Event, *, settled: bool = True) -> None:
        """The next change waits; an emergency step leaves a jump to be answered properly."""
        memory = self.memory
        memory.dwell_from_s, memory.dwell_from_sealed = event.at_s, self.seen.sealed
        memory.over_budget = 0
        if settled:
            self.seen.settle()

    def _end_watch(self) -> None:
        """A change is judged once its window is full, and then left alone."""
        memory = self.memory
        if memory.change is not None:
            watched = self.seen.sealed - memory.change.sealed
            memory.watching = memory.watching and watched < self.settings.watch_checkpoints + 2

    def _count_overhead(self) -> None:
        dear = backoff.too_dear(self.memory, self.outlook, self.settings)
        self.memory.over_budget = self.memory.over_budget + 1 if dear else 0

    # --- ask

    @property
    def outlook(self) -> Outlook:
        """The plan in force under today's estimates."""
        if self._outlook is None or self._outlook.plan is not self.plan:
            self._outlook = Outlook(seen=self.seen, goal=self.goal, plan=self.plan)
        return self._outlook

    def start(self) -> PlanProposal | None:
        """Return a better plan for a process that is about to train; call once, before any event.

        Failures and costs of the processes before it count at once: nothing dwells, and the
        dead-band alone keeps the plan.  After a life of which nothing was kept, intervals are at
        most a part of it (`short_lives`).
        """
        if self.mode == "off" or not intervals_of(self.plan)[1]:
            return None
        found = self._decided_anew()
        lives, then = self.memory.barren, intervals_of(found.plan if found else self.plan)
        shorter = then if self.outlook.pinned else within_lives(then, lives)
        if shorter != then:
            found = self._within(lives, shorter)
        found = self._other_scheme(found)
        if found is not None:
            self._offer(found)
        self.seen.settle()
        return found

    def _other_scheme(self, found: PlanProposal | None) -> PlanProposal | None:
        """With the redundancy for the link, the failures and the costs as they were seen."""
        if not self.memory.scheme.schemes or not self.seen.costed:
            return found
        other = scheme_change.at_start(self.memory, self.outlook, self.settings)
        if other is None:
            return found
        if found is None:
            return self._reschemed(other, "start", "decided at the start")
        plan = replace(found.plan, redundancy=other.redundancy)
        reason, numbers = f"{found.reason}; {other.why}", {**found.numbers, **other.numbers}
        return replace(found, plan=plan, reason=reason, numbers=numbers)

    def _decided_anew(self) -> PlanProposal | None:
        """By the waste, where the costs are known."""
        if not self.seen.costed:
            return None
        best, outlook = self._best(), self.outlook
        if best is None or (best.memory_steps, best.disk_steps) == outlook.intervals:
            return None
        forced = outlook.too_old(outlook.intervals) or outlook.crowded or self._too_costly()
        if self.goal.pins.interval_rule == "checkfreq":
            moved = self._worth(best)
        else:
            moved = not self._in_dead_band(best)
        return self._to(best, "start", "decided at the start") if forced or moved else None

    def promise(self) -> tuple[Expected, DecisionInputs] | None:
        """The promise of the plan in force by all that is known now; None: its costs are not."""
        if not self.seen.costed or not intervals_of(self.plan)[1]:
            return None
        return self.outlook.promised(self.outlook.intervals), self.outlook.inputs()

    def _within(self, lives: tuple[Life, ...], then: tuple[int, int]) -> PlanProposal:
        shortest_s = min(life.trained_s for life in lives if life.steps or len(lives) >= SURE)
        ended = f"{len(lives)} starts in a row" if len(lives) > 1 else "a start"
        why = (
            f"decided at the start: {ended} ended before a checkpoint, after "
            f"{format_duration(shortest_s)} of training at least, so one is due within a third "
            "of that"
        )
        if self.seen.costed:
            return self._proposal("start", then, why)
        before = written(intervals_of(self.plan))
        return PlanProposal(
            plan=with_intervals(self.plan, *then),
            kind="start",
            reason=f"{why}; intervals {before} -> {written(then)}",
        )

    def propose(self, now_s: float, step: int) -> PlanProposal | None:
        """A better plan, if there is one worth the change now; `step` is named in the reason.

        In mode "observe" the caller reports the answer with `PlanChangeWithheld`.
        """
        if self.mode == "off" or not self._ready() or self._said_so(now_s):
            return None
        found = (
            self._first(step)
            or self._rollback(now_s, step)
            or self._codec(step)
            or self._scheme(now_s, step)
            or self._redundancy(step)
            or self._slots(step)
            or self._turn(step)
            or (self._retune(now_s, step) if self.seen.jumped else None)
            or self._back_off(step)
            or self._hurry(now_s, step)
            or self._retune(now_s, step)
        )
        if found is not None:
            self._offer(found)
        return found

    def _ready(self) -> bool:
        least = self.settings.observe_only_checkpoints
        known = self.seen.prior is not None or self.seen.persisted >= least
        enough = self.seen.sealed >= least and known
        return enough and self.seen.iteration_s > 0 and intervals_of(self.plan)[1] > 0

    def _said_so(self, now_s: float) -> bool:
        """Where nothing is applied, the same would be proposed again and again."""
        said = self.mode == "observe" and self.memory.dwell_from_s is not None
        return said and not self._dwelt(now_s)

    def _first(self, step: int) -> PlanProposal | None:
        """The safe default plan gives way to the first measured one, without gates but the band."""
        best = self._best() if self.plan.version == 0 else None
        if best is None or self._in_dead_band(best):
            return None
        return self._to(best, "first", f"first measured plan, step {step}")

    def _turn(self, step: int) -> PlanProposal | None:
        """A comparison of settings begins, or has ended."""
        if self.mode != "on" or self.memory.hurried_from is not None:
            return None
        for decision in TURNED:
            turn = next_turn(decision, self.memory, self.outlook, self.settings)
            if turn is not None:
                why = f"step {step}: {turn.why}"
                return self._unmoved(turn.plan, turn.kind, why, turn.numbers)
        return None

    def _codec(self, step: int) -> PlanProposal | None:
        """Bytes as they are where encoding makes checkpoints late, and back where it did not."""
        trial, durable = self.memory.trial, self.seen.persist
        if self.memory.hurried_from is not None or self.plan.staging.compare_writes:
            return None
        sped = self._codec_for_speed(step)
        if sped is not None or self.memory.watching or self.memory.codec.raw_s is not None:
            return sped
        if trial is None and codec_speed.explains(self.memory.codec, durable):
            return None
        if trial is None:
            why = codec.late(self.plan, self.goal, durable, self.seen.prior)
            then = with_codec(self.plan, {})
        else:
            why, disk = codec.undone(trial, durable), trial.encoded
            then = with_codec(self.plan, disk.codec, chain=disk.chain)
        if not why:
            return None
        return self._unmoved(then, "codec", f"step {step}: {why}", {"durable_s": durable.mean})

    def _codec_for_speed(self, step: int) -> PlanProposal | None:
        """Encoding where the storage became slow, and none where it became fast."""
        watch, durable, plan = self.memory.codec, self.seen.persist, self.plan
        least = self.settings.jump_checkpoints if durable.jumped else WINDOW
        least = FELL if durable.fell else least
        if not watch.table or self.mode != "on" or durable.n < least or durable.doubtful:
            return None
        if plan.tier("disk").codec:
            why = codec_speed.refused(watch, durable) or codec_speed.given_up(watch, durable)
            then = with_codec(plan, {})
        else:
            at = codec_speed.taken_up(watch, durable)
            why = codec_speed.sentence(at, durable) if at is not None else ""
            then = with_codec(plan, at.codec if at is not None else {})
        if not why:
            return None
        numbers = {"durable_s": durable.mean, BY_SPEED: 1.0}
        return self._unmoved(then, "codec", f"step {step}: {why}", numbers)

    def _redundancy(self, step: int) -> PlanProposal | None:
        """Copies leave more slowly over a link that became slow, and faster once it is fast."""
        watch, link = self.memory.exchange, self.seen.link
        if self.mode != "on" or not scheme_change.link_is_clear(self.memory, self.settings):
            return None
        at = exchange.moved_off(watch, link)
        if at is None or at.rate_bytes_per_s == self.plan.redundancy.rate_bytes_per_s:
            return None
        why = f"step {step}: {exchange.sentence(watch, self.plan, at, link)}"
        numbers = {"link_s_per_gb": link.mean, LINK_SLOWER: at.slower}
        numbers |= {"rate_bytes_per_s": at.rate_bytes_per_s}
        return self._unmoved(exchange.paced(self.plan, at), "redundancy", why, numbers)

    def _scheme(self, now_s: float, step: int) -> PlanProposal | None:
        """Another scheme of copies where link or host changed, and back where it is worse."""
        if self.mode != "on" or not self.memory.scheme.schemes:
            return None
        other = scheme_change.due(
            self.memory, self.outlook, self.settings, now_s=now_s, dwell_s=self._dwell_s()
        )
        return None if other is None else self._reschemed(other, "scheme", f"step {step}")

    def _reschemed(self, other: SchemeChange, kind: Kind, when: str) -> PlanProposal:
        version = self.plan.version + 1
        plan = replace(self.plan, version=version, redundancy=other.redundancy)
        return self._unmoved(plan, kind, f"{when}: {other.why}", other.numbers)

    def _slots(self, step: int) -> PlanProposal | None:
        """One slot more where saves lack one."""
        plan = self.plan
        if self.mode != "on" or not self.outlook.memory_on:
            return None
        why = slots.more(self.memory.slots, plan, self.goal)
        if not why:
            return None
        then = replace(plan, version=plan.version + 1, slots=plan.slots + 1)
        numbers = {"slots": float(then.slots)}
        return self._unmoved(then, "slots", f"step {step}: {why}", numbers)

    def _back_off(self, step: int) -> PlanProposal | None:
        if self.memory.over_budget < backoff.IN_A_ROW or self.outlook.pinned:
            return None
        longer = scaled(self.outlook.intervals, self.settings.back_off)
        if self.outlook.too_old(longer):
            return None
        allowed = backoff.budget(self.memory, self.outlook, self.settings)
        why = (
            f"step {step}: three checkpoints in a row cost more than twice the budget of "
            f"{format_fraction(allowed)}"
        )
        return self._proposal("back-off", longer, why)

    def _hurry(self, now_s: float, step: int) -> PlanProposal | None:
        """Shorter intervals during a burst of failures, and back after it."""
        burst, before = now_s < self.memory.hurry_until_s, self.memory.hurried_from
        if burst and before is None and not self.outlook.pinned:
            shorter = scaled(self.outlook.intervals, 1.0 / self.settings.back_off)
            shorter = self.outlook.bounded(shorter)
            if shorter[1] >= self.outlook.intervals[1]:
                return None
            why = (
                f"step {step}: two failures within one interval, shorter for "
                f"{format_duration(self.settings.hurry_s)}"
            )
            return self._proposal("hurry", shorter, why)
        if not burst and before is not None:
            return self._proposal("calm", before, f"step {step}: the burst is over")
        return None

    def _rollback(self, now_s: float, step: int) -> PlanProposal | None:
        """Undo a change that turned out worse than it promised."""
        change = self.memory.change
        if change is None or not self.memory.watching or self._saving(now_s):
            return None
        if self.seen.sealed - change.sealed < self.settings.watch_checkpoints:
            return None
        why = rollback_check.regret(change, self.outlook, self.settings)
        back = intervals_of(change.before)
        if not why or self.outlook.breaks_limit(back):
            return None
        return self._proposal("rollback", back, f"step {step}: {why}")

    def _retune(self, now_s: float, step: int) -> PlanProposal | None:
        outlook = self.outlook
        urgent = outlook.too_old(outlook.intervals)
        hurried = self.memory.hurried_from is not None
        held = hurried or bool(self.plan.staging.compare_writes)
        if not urgent and (held or self._saving(now_s) or not self._dwelt(now_s)):
            return None
        best = self._best()
        if best is None or (best.memory_steps, best.disk_steps) == outlook.intervals:
            return None
        if not (urgent or outlook.crowded or self._too_costly() or self._worth(best)):
            return None
        return self._to(best, "retune", f"step {step}")

    # --- gates

    def _too_costly(self) -> bool:
        """Checkpoints cost more than the limit, and more than noise explains."""
        limit = self.goal.limits.overhead
        return limit is not None and self.outlook.overhead > limit + self.outlook.waste_error()

    def _worth(self, best: Intervals) -> bool:
        """The gain is outside the dead-band, more than nothing and more than noise.

        At a limit the waste is not flat, so the distance counts as well; where something else than
        the waste is wanted it alone does.  CheckFreq's interval is proportional to the cost and not
        to its root, so its band is squared.
        """
        checkfreq = self.goal.pins.interval_rule == "checkfreq"
        band = self.settings.dead_band ** (2 if checkfreq else 1)
        if apart(self.outlook.intervals, (best.memory_steps, best.disk_steps)) <= band:
            return False
        if checkfreq or self.goal.objective != "goodput":
            return True
        settings, gained = self.settings, gain(self.outlook.parts, best.waste)
        sigmas = settings.jump_sigmas if self.seen.jumped else settings.gain_sigmas
        noise = sigmas * self.outlook.gain_error(best)
        return gained >= max(settings.gain_floor, noise) and not self._in_dead_band(best)

    def _in_dead_band(self, best: Intervals) -> bool:
        """The plan wastes no more than intervals `dead_band` times off the best would."""
        band, tiers = self.settings.dead_band, self.outlook.tiers
        allowed = (band + 1.0 / band) / 2.0
        now = tiers.tunable(*self.outlook.intervals)
        return now <= allowed * tiers.tunable(best.memory_steps, best.disk_steps)

    def _saving(self, now_s: float) -> bool:
        """A save is under way; ignored where one nearly always is, or nothing could change."""
        disk_s = self.outlook.periods_s[1]
        return self.seen.busy_saving(now_s) and self.seen.persist.mean < disk_s / 2.0

    def _dwelt(self, now_s: float) -> bool:
        """Long enough since the last change, or a cost has jumped since."""
        settings, memory = self.settings, self.memory
        # A budget is kept by a mean of several samples.
        budget = self.goal.limits.overhead is not None
        falls = not budget and self.goal.pins.interval_rule != "checkfreq"
        if self.seen.jumped and self.seen.known(settings.jump_checkpoints, falls=falls):
            return True
        since_s = memory.dwell_from_s if memory.dwell_from_s is not None else self.seen.first_s
        long_enough = since_s is not None and now_s - since_s >= self._dwell_s()
        enough = self.seen.sealed - memory.dwell_from_sealed >= settings.dwell_checkpoints
        return long_enough and enough and self.seen.known(settings.jump_checkpoints)

    def _dwell_s(self) -> float:
        """Least time between changes."""
        settings, patience = self.settings, self.memory.patience
        dwell_s = settings.dwell_s
        if settings.run_s is not None:
            dwell_s = min(dwell_s, settings.dwell_fraction * settings.run_s)
        failures_per_s = self.outlook.rates.total_per_s
        if failures_per_s > 0 and patience == 1.0:  # no change was undone
            dwell_s = min(dwell_s, settings.dwell_mtbf / failures_per_s)
        return dwell_s * patience

    # --- proposals

    def _best(self) -> Intervals | None:
        """The best intervals now; None (and `obstacle`) if the limits cannot be kept."""
        try:
            best = self.outlook.best(overhead_aim=self.settings.overhead_aim)
        except ConfigError as error:
            self.obstacle = str(error)
            return None
        self.obstacle = ""
        return best

    def _to(self, best: Intervals, kind: Kind, when: str) -> PlanProposal:
        why = f"{when}: {self.outlook.sentence()}"
        if best.binding:
            why += f"; {best.binding} decides"
        then = (best.memory_steps, best.disk_steps)
        return self._proposal(kind, then, why, binding=best.binding)

    def _unmoved(
        self, plan: CheckpointPlan, kind: Kind, why: str, numbers: dict[str, float]
    ) -> PlanProposal:
        """Another schedule or codec; the intervals stay."""
        expected = self.outlook.promised(intervals_of(plan))
        inputs = self.outlook.inputs()
        return PlanProposal(
            plan=plan, kind=kind, reason=why, numbers=numbers, expected=expected, inputs=inputs
        )

    def _proposal(
        self, kind: Kind, then: tuple[int, int], why: str, *, binding: str = ""
    ) -> PlanProposal:
        outlook, costs = self.outlook, self.outlook.costs
        expected = outlook.promised(then)
        numbers = {
            "iteration_s": costs.iteration_s,
            "stall_s": costs.stall_s,
            "persist_s": costs.persist_s,
            "failures_per_s": outlook.rates.total_per_s,
            "waste_before": outlook.waste,
        }
        even = even_failures(outlook.tiers, then, outlook.intervals)
        if even is not None:
            numbers["even_at_failures_times"] = even
        return PlanProposal(
            plan=with_intervals(self.plan, *then),
            kind=kind,
            reason=(
                f"{why}; intervals {written(outlook.intervals)} -> {written(then)}, "
                f"expected waste {format_fraction(expected.waste)}"
            ),
            numbers=numbers,
            binding=binding,
            expected=expected,
            inputs=outlook.inputs(),
        )
