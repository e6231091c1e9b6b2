"""An end that is announced: a signal, a launcher that died, or the script's own wish.

All ranks agree on the coming boundary (the plan's two phases), make the last checkpoint there and
leave.  The grace may be too short, ranks may be lost, or the boundary may not come.  Then the
keepers alone make the newest checkpoint in memory durable.  Two threads meet here: the training
thread at its boundaries, and one that counts the grace and ends the process with it.
"""

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from autockpt.executors.linux import late_threads, own_group
from autockpt.executors.protocol import messages as p
from autockpt.launch import owner
from autockpt.launch.rank_env import allocation_left_s
from autockpt.launch.termination import Stopped, TerminationWatch, ToldToEnd
from autockpt.policies.restart.announced import DEFAULT_GRACE_S, Answer, Pace, answer, grace_s
from autockpt.session.base import RankState
from autockpt.session.endings import lost_output
from autockpt.session.endings.closing import Closing
from autockpt.session.endings.last_checkpoint import LastCheckpoint
from autockpt.session.endings.loader_workers import LoaderWorkers
from autockpt.session.job import ATTACHES, Job
from autockpt.session.saving import Saver
from autockpt.session.tuning.plan_switch import PlanSwitch
from autockpt.values.exit_codes import REPLACED

AGREE_S = 5.0
"""Ranks that live agree within milliseconds; a node that has just been lost is known by then."""
LET_GO_S = 1.5
"""So long the loop may take to reach a boundary when nothing is waited for any more.  A survivor
that stays would hold torchelastic's restart for 30 seconds (measured)."""
FOREVER_S = 1e9
"""For a wish of the script, which nothing hurries."""


@dataclass(slots=True)
class Announcement:
    """The announcement, and the state of the answer to it."""

    number: int
    """The number of the signal; 0: the script's own wish, which is in no hurry."""
    name: str
    began_s: float
    answer: Answer
    agreed: bool = False
    """A boundary is agreed on."""
    refused: str = ""
    """Why none is."""
    lost: bool = False
    """Ranks are lost: a launcher that starts all ranks anew waits for the remaining ones."""

    def left_s(self, until_s: float) -> float:
        """Until so long after the announcement."""
        return self.began_s + until_s - time.monotonic()


class Stopper:
    """Hears of the end, and meets it."""

    def __init__(
        self,
        rank: RankState,
        saver: Saver,
        last: LastCheckpoint,
        closing: Closing,
        switch: PlanSwitch,
    ) -> None:
        self._rank, self._job, self._client = rank, rank.job, rank.client
        self._saver, self._last, self._closing, self._switch = saver, last, closing, switch
        launcher = rank.job.launcher_pid if _ends_with_launcher(rank.job, os.environ) else None
        self.watch = TerminationWatch(
            self._on_signal, self._on_second_signal, launcher=launcher,
            launcher_ended=self._on_launcher_ended,
        )  # fmt: skip
        self._workers = LoaderWorkers(lambda: self.watch.has_interrupted)
        self._announced: Announcement | None = None
        self._announcing = threading.Lock()
        self._at_last = threading.Event()
        """The training thread is at the boundary where it stops."""
        self._gone = threading.Event()
        """It has left the loop."""
        self.is_leaving = False
        """It leaves at the next boundary, whichever that is."""
        self.has_stopped = False
        """The training has ended before its last step, because that was asked for."""

    def start(self) -> None:
        """The session is in force, and hears of its end."""
        self.watch.start()
        self._workers.start()

    def close(self) -> None:
        """What ends the process is no concern of ours any more."""
        self.watch.close()
        self._workers.close()

    def note_last(self) -> None:
        """The training thread makes the last checkpoint, or has made it."""
        self._at_last.set()

    def note_end(self) -> None:
        """The session has ended."""
        self._gone.set()
        if self._announced is None:
            self.close()

    def request_stop(self, reason: str = "the script asked for a stop") -> None:
        """As `Session.request_stop`; callable from any thread."""
        if self._announced is None and not self._rank.is_closed:
            late_threads.start(lambda: self._announce(0, reason), "autockpt-wish")

    def _on_signal(self, number: int) -> None:
        self._announce(number, signal.Signals(number).name)

    def _on_launcher_ended(self) -> None:
        """End this rank, which no other process would end."""
        pid = self._job.launcher_pid
        self._announce(signal.SIGTERM, f"the launcher (process {pid}) is gone")
        if signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.alarm(int(self._grace_s()) + 1)

    def _announce(self, number: int, name: str, left_s: float | None = None) -> None:
        """On any thread; `left_s`: what another rank knows of the grace."""
        with self._announcing:
            if self._announced is not None or self._rank.is_closed:
                return
            self._announced = said = Announcement(
                number, name, time.monotonic(), self._answer(number, left_s)
            )
        lost_output.forgive()
        if not self._rank.plan.snapshot_interval_steps:
            said.refused = "the plan makes no checkpoints"
        elif said.answer.saves == "memory":
            said.refused = said.answer.reason
        if not said.refused:
            self._say_announced(said)
            if self._job.world_size == 1 or self._at_last.is_set():
                said.agreed = True
            elif left_s is None:
                left = min(said.answer.leave_s, FOREVER_S)
                payload = {"stop": number, "name": name, "left_s": left}
                self._client.send(p.PlanProposed(version=p.STOP_VERSION, payload=payload))
        late_threads.start(lambda: self._see_out(said), "autockpt-ending")

    def _answer(self, number: int, left_s: float | None) -> Answer:
        if not number:
            return Answer(saves="boundary", give_up_s=FOREVER_S, leave_s=FOREVER_S, reason="")
        what = answer(self._grace_s() if left_s is None else left_s, self._pace())
        # Ranks whose measures differ do the same: that of the first.
        return what if left_s is None else replace(what, saves="boundary", leave_s=left_s)

    def _say_announced(self, said: Announcement) -> None:
        # A launcher ends the other ranks of one that has died in the same way.
        if_all = ", if all ranks come to it," if self._job.world_size > 1 else ""
        what = f"makes a checkpoint of the coming step{if_all} and stops"
        if self._at_last.is_set():
            what = "waits for the last checkpoint and stops"
        within = f", within {said.answer.leave_s:.0f} s; a second signal ends it at once"
        self._rank.say(f"{said.name}: {what}{within if said.number else ''}")

    def _on_second_signal(self, number: int) -> None:
        self._rank.say(f"{signal.Signals(number).name}: ends at once; {self._durable_text()}")
        if number != signal.SIGINT or not self.watch.interrupt(LET_GO_S):
            _end_process(128 + number)

    def hear(self, message: p.PreparePlan | p.ApplyPlan | p.AbortPlan) -> None:
        """On the listening thread."""
        if message.version < p.STOP_VERSION:
            return
        if isinstance(message, p.PreparePlan) and self._announced is None:
            payload: Mapping[str, Any] = message.payload
            self._announce(int(payload["stop"]), str(payload["name"]), float(payload["left_s"]))
        said = self._announced
        if said is not None and isinstance(message, p.PreparePlan | p.ApplyPlan):
            said.agreed, said.refused = True, ""
        if said is not None and isinstance(message, p.AbortPlan):
            said.agreed, said.refused, said.lost = False, message.reason, True

    @property
    def is_stopping(self) -> bool:
        """A boundary may be the last one: keep its inputs behind every step."""
        said = self._announced
        return said is not None and not said.refused

    def stops_at(self, step: int) -> bool:
        """The boundary of `step` is the agreed one, or behind it."""
        if not self.is_stopping:
            return False
        if self._job.world_size == 1:
            return True
        agreed = self._switch.stop_step
        return agreed is not None and step >= agreed

    def make_last(self, before: tuple[Any, Any] | None) -> None:
        """The checkpoint of this boundary, which is the last one."""
        said = self._announced
        assert said is not None
        self._at_last.set()
        self.is_leaving = True
        self._rank.open = 0
        self._saver.fence()
        left_s = max(0.0, said.left_s(said.answer.leave_s))
        last = self._last
        last.patience_s, last.wait_s = min(last.patience_s, left_s), min(last.wait_s, left_s)
        self._last.make(before=before, always=True)

    def _is_followed(self) -> bool:
        """Another rank of this very start has attached to the run again, as this one will."""
        own, said = self._job.incarnation, self._client.fenced
        launch, _, number = said.removeprefix("replaced by ").rpartition("#")
        if launch != own.launch_id or not number.isdigit() or len(set(self._job.nodes)) > 1:
            return False
        return int(number) // ATTACHES == own.restart_round // ATTACHES

    def leave(self) -> None:
        """Fenced by a newer incarnation, or told to go: leaves at a boundary."""
        if self._is_followed():
            self._closing.end("finished")
            return
        said = self._announced
        if self._client.fenced:
            self._rank.say(f"this process is replaced: {self._client.fenced}")
            self._closing.end("error")
            raise SystemExit(REPLACED)
        assert said is not None
        self._rank.say(f"{said.name}: stopped at step {self._rank.step}; {self._durable_text()}")
        self.has_stopped = True
        self._closing.end("signal" if said.number else "finished")
        if said.number == signal.SIGINT:
            raise Stopped(128 + said.number)
        if said.number:
            raise ToldToEnd(128 + said.number, all_durable=self._is_all_durable())

    def _is_all_durable(self) -> bool:
        durable = self._client.saves.durable
        return (
            durable is not None
            and self._client.saves.has_begun(durable)
            and durable.step >= self._rank.step
        )

    def _durable_text(self) -> str:
        """Return the checkpoint that a restart finds, as far as it is known now."""
        saves = self._client.saves
        durable, newest = saves.durable, saves.memory_committed
        if durable is not None and saves.has_begun(durable):
            lost = self._rank.step - durable.step
            behind = f", {lost} step{'s' * (lost > 1)} before" if lost > 0 else ""
            text = f"the checkpoint of step {durable.step}{behind} is durable"
        elif durable is not None:
            text = f"the newest durable checkpoint is {durable}"
        else:
            text = f"nothing newer than step {self._rank.start_step}, where it began, is durable"
        if newest is not None and newest in saves.writing and saves.has_begun(newest):
            text += f"; that of step {newest.step} is still being written"
        return text

    def _see_out(self, said: Announcement) -> None:
        """Falls back on what is in memory, and ends the process in time."""
        what = said.answer
        if not said.refused:
            agreed_by_s = min(AGREE_S, what.give_up_s)
            self._wait(lambda: said.agreed or bool(said.refused), said.left_s(agreed_by_s))
            if not said.agreed and not said.refused:
                said.refused = "not all ranks have answered"
        if not said.number:
            self._give_up_wish(said)
            return
        if not said.refused:
            self._wait(lambda: bool(said.refused), said.left_s(what.give_up_s))
        if self._gone.is_set():
            return
        if self._rank.plan.snapshot_interval_steps:
            self._fall_back(said)
        if not said.lost:
            self._wait(self._is_memory_durable, said.left_s(what.leave_s) - LET_GO_S)
        if self._at_last.is_set():
            self._gone.wait(max(0.0, said.left_s(what.leave_s)))
        self.is_leaving = True
        if self._gone.wait(max(0.0, min(LET_GO_S, said.left_s(what.leave_s)))):
            return
        self._rank.say(
            f"{said.name}: leaves within the iteration after step {self._rank.step}; "
            f"{self._durable_text()}", always=True,
        )  # fmt: skip
        if said.number != signal.SIGINT or not self.watch.interrupt(LET_GO_S):
            _end_process(128 + said.number)

    def _give_up_wish(self, said: Announcement) -> None:
        """The script's own wish is in no hurry: it may ask again."""
        if said.refused and not self._at_last.is_set():
            self._rank.report_degraded("stop", f"{said.refused}; the script may ask again")
            self._announced = None

    def _fall_back(self, said: Announcement) -> None:
        self._client.send(p.BreakpointRequested(reason=said.name))
        if self._at_last.is_set():
            return  # the one that is being made may be as early
        saves = self._client.saves
        newest = saves.memory_committed
        if newest is None or saves.is_durable(newest):
            text = f"nothing newer is in memory; {self._durable_text()}"
        else:
            of = f"that of step {newest.step}" if saves.has_begun(newest) else f"{newest}"
            text = f"the newest checkpoint in memory, {of}, is being made durable"
        why = f" ({said.refused})" if said.refused else ""
        self._rank.say(f"{said.name}: no checkpoint of the coming step{why}; {text}")

    def _is_memory_durable(self) -> bool:
        newest = self._client.saves.memory_committed
        settled = newest is None or self._client.saves.is_over(newest)
        return self._gone.is_set() or (settled and not self._at_last.is_set())

    def _wait(self, done: Any, timeout_s: float) -> None:
        """Until `done()`, the loop is left, or time is up.  The grace may have no end."""
        deadline = time.monotonic() + timeout_s
        while not (done() or self._gone.is_set()) and time.monotonic() < deadline:
            with self._client.news:
                self._client.news.wait(min(0.1, max(0.0, deadline - time.monotonic())))

    def _grace_s(self) -> float:
        environ = os.environ
        ours = "AUTOCKPT_LAUNCHER_PID" in environ or "TORCHELASTIC_RUN_ID" not in environ
        return grace_s(
            notice_s=self._job.goal.failures.notice_s,
            allocation_left_s=allocation_left_s(environ, time.time()),
            launcher_s=None if ours else DEFAULT_GRACE_S,
        )

    def _pace(self) -> Pace:
        took = self._rank.clock.newest_s
        since = time.monotonic() - self._rank.clock.boundary_s
        durable_s = None
        if self._client.saves.took_s:
            ordered = sorted(self._client.saves.took_s)
            durable_s = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
        elif self._job.decision is not None:
            durable_s = self._job.decision.expected.persist_s
        return Pace(
            iteration_s=None if took is None else max(0.0, took - since),
            stall_s=self._saver.newest_stall_s, durable_s=durable_s,
        )  # fmt: skip


def _end_process(code: int) -> NoReturn:
    """End within the loop, and the loaders' workers with it."""
    own_group.end_workers(parent=os.getpid())
    os._exit(code)


def _ends_with_launcher(job: Job, environ: Mapping[str, str]) -> bool:
    """Whether a live launcher that looks after its ranks has started these.

    Other parents are shells, which may end long before what they have started.
    """
    ours = "AUTOCKPT_LAUNCHER_PID" in environ or "TORCHELASTIC_RUN_ID" in environ
    return ours and job.launcher_pid != os.getpid() and owner.is_alive(job.launcher_pid)
