"""The profile as a walk over the iterations of a script that does not know.

    warm-up -> quiet -> blocking probes -> settle -> interference rounds -> write, stop

The number of iterations of each stage follows from times that all ranks agreed on, so all ranks
stop at the same step.  Everything happens inside hooks of the optimizer, on the training thread.
"""

import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from autockpt import new_files
from autockpt.console.progress import Progress
from autockpt.executors.image.container import chunk_digest
from autockpt.executors.state import own_hooks
from autockpt.executors.state.live_state import LiveState
from autockpt.launch.termination import exit_now
from autockpt.profiles.assemble import Measurements, assemble
from autockpt.profiles.probes.interference import (
    CopyWork,
    EncodeWork,
    InterferenceProbe,
    PersistWork,
    Quiet,
    Work,
    WriteWork,
)
from autockpt.profiles.probes.iteration import CudaTicker, PhaseTimer
from autockpt.profiles.probes.proof import ChangeProof
from autockpt.profiles.probes.windows.traffic import TrafficProbe
from autockpt.profiles.schedule import (
    DEVICE_WORK,
    ENCODE_WORK,
    PEER_WORK,
    SCHEDULE_WORKS,
    WORKS,
    ProfileSettings,
    Unit,
    interference_units,
    persist_fits,
    quiet_iterations,
)
from autockpt.profiling.facts import discovered_state, facts
from autockpt.profiling.facts.ranks import Ranks
from autockpt.profiling.measure import movers
from autockpt.profiling.measure.idle_windows import WindowProbe
from autockpt.profiling.measure.node_probes import NodeProbes
from autockpt.profiling.pass_through import PassThroughSession
from autockpt.run_directory import RunDirectory
from autockpt.values.errors import ConfigError
from autockpt.values.units import format_bytes, format_duration

STOP_RAISES = 3
"""Raises that a script may swallow before its process is ended."""
STOP_GRACE_S = 10.0
LEAST_STEPS = 2
"""The first iteration has no beginning, so a profile needs a second one."""


class StopTraining(BaseException):
    """The profile is complete.  Not an Exception: `except Exception` must not swallow it."""


class Conductor:
    """One profile of one process."""

    def __init__(self, run_dir: str, settings: ProfileSettings) -> None:
        self.run_dir, self.settings = run_dir, settings
        self.measured = Measurements()
        self.timer = PhaseTimer(
            on_fence=self._fence, on_boundary=self._boundary, around_call=own_hooks.around_call
        )
        self._began_s = time.monotonic()
        self._stage: Callable[[], None] = self._warm_up
        self._complete = False
        self._raises = 0
        self._session = PassThroughSession(None, None)
        """The object that attach gave to the script; unused if the script never attached."""
        self._roots: list[torch.nn.Module] = []
        self._state: LiveState | None = None
        self._probes: NodeProbes | None = None
        self._proof: ChangeProof | None = None
        self._changed: set[str] = set()
        self._interference: InterferenceProbe | None = None
        self._works: dict[str, Work] = {}
        self._windows = WindowProbe()
        self._traffic: TrafficProbe | None = None
        self._quiet_left = self._quiet_total = 0
        self._until_s = 0.0
        self._known_ranks: Ranks | None = None
        self._known_progress: Progress | None = None

    def adopt(self, session: PassThroughSession, **declared: Any) -> None:
        """The state as the script declares it.  Raises ConfigError naming a bad entry."""
        state = LiveState.of(**declared)
        state.dry_encode()
        self._state, self._session = state, session

    def finish(self) -> None:
        """The script ended by itself: writes what there is, with a warning.

        Raises ConfigError when there is nothing to write.
        """
        if self._complete:
            return
        self._complete = True
        if self._interference is not None:
            self._interference.abandon()
        self.timer.flush()
        if not self.timer.samples:
            roots = self._roots or (self.timer.finder.roots if self.timer.finder else [])
            seen = discovered_state.describe_seen(roots, self.timer.steps, LEAST_STEPS)
            raise ConfigError(f"{sys.argv[0]}: cannot be profiled: {seen}")
        self._warn(
            f"the script ended after {self.timer.steps} iterations, before the profile was "
            "complete; give it more steps and rerun `autockpt profile`"
        )
        self._count_traffic()
        if self._probes is None:
            self._blocking_probes()
        self._write()

    def close(self) -> None:
        """Takes the hooks away; for tests, not from inside a hook."""
        self._complete = True
        self._windows.detach()
        self._count_traffic()
        self.timer.close()

    # -- hooks ------------------------------------------------------------------------------

    def _boundary(self) -> None:
        """After the step that ends an iteration."""
        self._windows.boundary()
        if not self._complete:
            self._stage()
        if self._complete:
            self._stop()

    def _fence(self, optimizer: torch.optim.Optimizer) -> None:
        """Before every optimizer step."""
        self._windows.step_began()
        if self._interference is not None and not self._complete:
            self._interference.fence()
        if self._proof is not None and self._state is not None:
            proof, self._proof = self._proof, None
            changed = proof.changed(movers.proof_tensors(self._state))
            self._changed |= changed & self._state.lazy

    # -- stages: each runs at a boundary and names the next -----------------------------------

    def _warm_up(self) -> None:
        step = self.timer.steps
        if step == 1:
            self._roots = self.timer.settle_roots()
            if self._device.type == "cuda":
                self.timer.ticker = CudaTicker()
            self._begin_stage(f"warm-up: {self.settings.warmup_steps} iterations")
        self._progress.at(step, self.settings.warmup_steps)
        if step == self.settings.warmup_steps - 1:
            self._prove()
        if step >= self.settings.warmup_steps:
            self._begin_quiet()

    def _begin_quiet(self) -> None:
        self.timer.flush()
        shortest_s = min((s.iteration_s for _, s in self.timer.samples), default=0.0)
        (iteration_s,) = self._ranks.largest([max(shortest_s, 1e-6)])
        self._quiet_total = self._quiet_left = quiet_iterations(
            iteration_s, self.settings, steps_left=self._session.steps_left()
        )
        self._begin_stage(
            f"{self._quiet_total} baseline iterations of {format_duration(iteration_s)}"
        )
        self.timer.label = "quiet"
        self._until_s = time.monotonic() + self.settings.quiet_limit_s
        self._windows.attach(self._roots, late=self._device.type == "cuda")
        if self._ranks.writes:
            self._traffic = TrafficProbe(
                facts.interface(self._ranks), gpus=self._device.type == "cuda"
            )
        self._stage = self._quiet

    def _quiet(self) -> None:
        self._quiet_left -= 1
        self._progress.at(self._quiet_total - self._quiet_left, self._quiet_total)
        enough = self._quiet_total - self._quiet_left >= self.settings.quiet_steps
        if self._quiet_left == 0 or (enough and self._late(self._until_s)):
            self.timer.label = None
            self._windows.detach()
            self._count_traffic()
            self._blocking_probes()
            self._prove()
            self._stage = self._settle

    def _count_traffic(self) -> None:
        """Measure the traffic of the links during the quiet iterations."""
        if self._traffic is not None:
            self.measured.traffic = self._traffic.stop()
            self.measured.warnings += self._traffic.missing
            self._traffic = None

    def _settle(self) -> None:
        """The iteration after the blocking probes found cold caches: it does not count."""
        self._plan_interference()
        self._stage = self._interfere
        self._interfere()

    def _interfere(self) -> None:
        probe = self._interference
        if probe is not None and probe.boundary():
            if probe.rounds < self.settings.rounds_min or not self._late(self._until_s):
                self._progress.at(probe.fraction * probe.iterations, probe.iterations)
                return
            probe.abandon()
        elif self._ranks.world_size > 1:
            # Another rank may still be writing, or fetching from this node.
            self._ranks.largest([0.0])
        self._complete = True
        self._write()

    # -- what stages do -----------------------------------------------------------------------

    def _find_state(self) -> LiveState:
        """The state as attached, else as the hooks saw it.  Raises ConfigError for a bad entry."""
        if self._state is None:
            seen = discovered_state.seen_state(self._roots, self.timer.optimizers)
            self._state = LiveState.of(**seen)
        return self._state

    def _prove(self) -> None:
        self._proof = ChangeProof(movers.proof_tensors(self._find_state()), chunk_digest)

    def _blocking_probes(self) -> None:
        self.timer.flush()
        self._roots = self._roots or self.timer.settle_roots()
        state = self._find_state()
        self._probes = probes = NodeProbes(
            self.measured,
            state=state,
            progress=self._session.progress,
            directory=facts.storage_directory(self.run_dir),
            device=self._device,
            settings=self.settings,
        )
        probes.take_memory()
        probes.meet(self._ranks)
        if self._ranks.probes_node:
            probes.run(self._begin_stage)
            probes.remember(self.timer.steps)

    def _plan_interference(self) -> None:
        """Every rank computes the same rounds from the slowest rank's numbers."""
        assert self._probes is not None
        wait_s = [s.phases_s["data_wait"] for label, s in self.timer.samples if label == "quiet"]
        self._windows.bring_home(self.measured, self._ranks, wait_s)
        quiet = [s.iteration_s for label, s in self.timer.samples if label == "quiet"]
        alike, writes = self._ranks.local_world_size, self._ranks.probes_node
        (iteration_s, persist_s, named, no_memory, peers, windows, devices, encodes) = (
            self._ranks.largest(
                [
                    statistics.median(quiet),
                    self._probes.expected_persist_s(alike) if writes else 0.0,
                    float(self._probes.named),
                    float(self._probes.snapshot.arena is None),
                    float(self._probes.copier() is not None),
                    float(self._windows.idles),
                    float(self._probes.device_copier() is not None),
                    float(self._probes.encodes()),
                ]
            )
        )
        self._probes.named = bool(named)
        if no_memory:
            self._warn("interference: not measured, no memory was left for a snapshot")
            return
        works: tuple[str, ...] = WORKS
        if not persist_fits(iteration_s, persist_s, self.settings):
            works = tuple(work for work in WORKS if work != "persist")
            self._warn(
                f"persist: not measured as a whole, it takes about {format_duration(persist_s)} "
                "each time; it is predicted from copy and write"
            )
        if peers:
            works = (*works, PEER_WORK)
        if devices:
            works = (*works, DEVICE_WORK)
        if encodes:
            works = (*works, ENCODE_WORK)
        if windows:
            works = (*works, *SCHEDULE_WORKS)
        units = interference_units(
            iteration_s,
            persist_s=persist_s,
            works=works,
            settings=self.settings,
            steps_left=self._session.steps_left(),
        )
        rounds = 1 + max(unit.round for unit in units)
        self._begin_stage(f"{rounds} rounds with background work")
        self._works = self._background(units)
        self._until_s = time.monotonic() + 1.5 * self.settings.interference_s
        self._interference = InterferenceProbe(units, self._works, clock=self._clock())

    def _background(self, units: tuple[Unit, ...]) -> dict[str, Work]:
        """The work beside the iterations.

        Samples are written by one rank of a node only; a save is, as in a run, of all ranks.
        """
        assert self._probes is not None
        probes, snapshot = self._probes, self._probes.snapshot
        write = probes.writer() if self._ranks.probes_node else None
        works: dict[str, Work] = {"snapshot_copy": CopyWork(snapshot)}
        copies = {PEER_WORK: probes.copier(), DEVICE_WORK: probes.device_copier()}
        for name, copy in copies.items():
            works[name] = Quiet() if copy is None else WriteWork(movers.giving_way(copy))
        if any(unit.work in SCHEDULE_WORKS for unit in units):
            stages = self._windows.hold_back(self._ranks.rank, snapshot.device)
            works["snapshot_windows"] = CopyWork(movers.InWindows(snapshot, lambda: stages.gate))
            works["snapshot_blocking"] = CopyWork(movers.AtBoundary(snapshot))
        if any(unit.work == ENCODE_WORK for unit in units):
            works[ENCODE_WORK] = EncodeWork(
                [movers.giving_way(encode) for encode in probes.encoders()]
            )
        works["persist"] = PersistWork(snapshot, movers.giving_way(probes.persister()))
        if write is None:
            works["storage_write"] = Quiet()
            return works
        limit = probes.writes_per_unit(sum(unit.work == "storage_write" for unit in units))
        works["storage_write"] = WriteWork(movers.giving_way(write), limit=limit)
        return works

    def _late(self, until_s: float) -> bool:
        """Whether a stage may end early: ranks that train together must end it at one step."""
        return self._ranks.world_size == 1 and time.monotonic() > until_s

    def _clock(self) -> Callable[[], float]:
        if self._device.type != "cuda":
            return time.perf_counter

        def after_device() -> float:
            torch.cuda.synchronize(self._device)
            return time.perf_counter()

        return after_device

    def _gather(self) -> None:
        """Brings home what timer and interference probe hold."""
        self.timer.flush()
        quiet = [s for label, s in self.timer.samples if label == "quiet"]
        self.measured.iterations = quiet or [s for _, s in self.timer.samples]
        if not quiet:
            self._warn("iteration time: from warm-up iterations, which are slower")
        if self._interference is None:
            return
        errors = self._interference.errors
        for name, error in errors.items():
            self._warn(f"slow-down under {name}: not measured: {error}")
        idle = {name for name, work in self._works.items() if isinstance(work, Quiet)}
        self.measured.units = [
            u for u in self._interference.samples if u.work not in idle | errors.keys()
        ]

    def _write(self) -> None:
        """Writes the profile on rank 0; every rank lets go of its memory."""
        self._gather()
        self._windows.detach()
        assert self._probes is not None
        assert self._state is not None
        if self._complete and self._ranks.probes_node:
            self._probes.differences(self.timer.steps)
        self._changed |= self._probes.snapshot.changed
        if self._changed:
            self._warn(
                f"state: changed between boundary and optimizer step, so copied inside the stall: "
                f"{', '.join(sorted(self._changed)[:5])}"
                + (f" and {len(self._changed) - 5} more" if len(self._changed) > 5 else "")
            )
        self._probes.close()
        if self._ranks.writes:
            self._write_file(self._state)
        self._progress.close()

    def _write_file(self, state: LiveState) -> None:
        assert self._probes is not None
        layout = self._probes.snapshot.layout
        inventory = facts.state_inventory(
            state, layout, changed=self._changed, place=self._ranks.place
        )
        directory = facts.storage_directory(self.run_dir)
        job = facts.host_facts(
            self.run_dir,
            state=inventory,
            storage_dir=directory,
            device=self._device,
            ranks=self._ranks,
        )
        new_files.make_directory(self.run_dir)
        run = RunDirectory(self.run_dir)
        run.write_profile(assemble(job, self.measured))
        self._progress.close()
        self._say(
            f"{run.profile_path} written: {format_bytes(inventory.total_bytes)} of state, "
            f"{self.timer.steps} iterations, "
            f"{format_duration(time.monotonic() - self._began_s)} in all"
        )

    def _stop(self) -> NoReturn:
        """Ends the script: by an exception if it lets that through, else at once."""
        self._raises += 1
        if self._raises == 1:
            watchdog = threading.Timer(STOP_GRACE_S, _leave)
            watchdog.daemon = True
            watchdog.start()
        if self._raises > STOP_RAISES:
            _leave()
        raise StopTraining("the profile is complete")

    @property
    def _ranks(self) -> Ranks:
        if self._known_ranks is None:
            self._known_ranks = Ranks.find()
        return self._known_ranks

    @property
    def _progress(self) -> Progress:
        if self._known_progress is None:
            # The script prints on this terminal, too: a line that is redrawn would break its own.
            self._known_progress = Progress(
                "profile", unit="iterations", enabled=self._ranks.writes, beside_script=True
            )
        return self._known_progress

    def _begin_stage(self, text: str) -> None:
        """Say what comes next, and begin its progress."""
        self._say(text)
        self._progress.stage(f"profile: {text}", unit="iterations")

    def _say(self, text: str) -> None:
        """One line for the user, on the rank that writes."""
        if self._ranks.writes:
            seconds = time.monotonic() - self._began_s
            with contextlib.suppress(OSError, ValueError):
                print(f"autockpt profile: {seconds:5.1f} s  {text}", file=sys.stderr, flush=True)

    @property
    def _device(self) -> torch.device:
        return discovered_state.device_of(self.timer.optimizers)

    def _warn(self, sentence: str) -> None:
        if sentence not in self.measured.warnings:
            self.measured.warnings.append(sentence)


def _leave() -> NoReturn:
    """The script swallowed the stop, or takes too long to end: nothing of it runs any more."""
    exit_now(0)
