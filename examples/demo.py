"""The whole loop on a small job: measure, plan, train, kill twice, recover, re-tune, compare.

    make demo                               # or: python examples/demo.py --seed 7

Two ranks train the GPT of `gpt/train.py` under a policy that declares a failure about every minute.
One trainer is killed, then all trainers and the keeper.  The training must end with the digest of
an undisturbed run of the bare script.  Every printed figure is read from the run's files
(telemetry, failure log, status, report).  Exit code 0: everything held.  Everything is bounded by
deadlines, and started processes are ended one by one.
"""

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a checkout that is not installed serves as well

from autockpt.executors.keeper.launch import keeper_status  # noqa: E402
from autockpt.run_directory import RunDirectory  # noqa: E402
from autockpt.values import telemetry as t  # noqa: E402
from autockpt.values.units import format_bytes, format_duration  # noqa: E402

E = TypeVar("E", bound=t.Event)
R = TypeVar("R")

SCRIPT = "examples/gpt/train.py"
JOB = ("--size", "1m", "--batch", "2", "--accumulation", "1", "--threads", "1")
RANKS = 2
TRAINING_S = 26.0
"""The training is as many steps as fit into this time by the profile: twice that is trained."""
STEPS = (240, 1000)
FIRST_KILL = (0.25, 0.45)
SECOND_KILL = (0.60, 0.80)
"""Parts of the training in which the instants are drawn."""
SAVE_S = 3.0
"""A save may take this long until it counts, on a machine that does other things as well."""
STAGE_S = 150.0
"""No stage may take longer; all of them together take about two minutes on an idle machine."""
MARK = "DEMO_OF_AUTOCKPT"
"""In the environment of everything that is started here, and so of nothing else."""

POLICY = """\
# What this job's owner knows: something fails about once a minute (it is a demo), and half of the
# failures leave the memory of the machine alive.  Everything else is left to autockpt.
version: 1
extends: builtin:auto
failures: {mtbf: 1 min, process_share: 50 %}
keep: {last: 3}
"""


class Failed(Exception):
    """Something did not hold: what, and where to look."""


# ---------------------------------------------------------------------------- telling


class Story:
    """Prints the narration: chapters, facts in two columns, quotes of the tools' output."""

    def __init__(self) -> None:
        self.began_s = time.monotonic()
        self.colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.width = min(96, shutil.get_terminal_size((96, 24)).columns)
        self._lock = threading.Lock()
        self._number = 0

    def chapter(self, title: str, text: str = "") -> None:
        """A new numbered chapter."""
        self._number += 1
        elapsed = f"{time.monotonic() - self.began_s:.0f} s"
        head = f"{self._number}  {title}"
        self._print("")
        self._print(
            self._style("1", head) + self._style("2", elapsed.rjust(self.width - len(head)))
        )
        self.say(text)

    def say(self, text: str) -> None:
        """A paragraph."""
        for line in wrap(text, self.width - 3):
            self._print(f"   {line}")

    def fact(self, name: str, text: str) -> None:
        """One line of two columns, the second wrapped."""
        lines = wrap(text, self.width - 21) or [""]
        for column, line in zip(itertools.chain([name], itertools.repeat("")), lines, strict=False):
            self._print(f"   {column:<18}{line}")

    def command(self, argv: Sequence[str]) -> None:
        """Print a command as a user would type it."""
        lines = textwrap.wrap(" ".join(argv), self.width - 7, break_on_hyphens=False)
        for prefix, line in zip(itertools.chain("$", itertools.repeat(" ")), lines, strict=False):
            self._print(self._style("36", f"   {prefix} {line}"))

    def quote(self, line: str) -> None:
        """A line that a tool printed."""
        for part in wrap(line, self.width - 7, subsequent_indent="  "):
            self._print(self._style("2", f"   | {part}"))

    def blow(self, text: str) -> None:
        """A kill."""
        self._print("   " + self._style("1;31", f"* {text}"))

    def good(self, text: str) -> None:
        """Something held."""
        self._print("   " + self._style("1;32", text))

    def _style(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour else text

    def _print(self, line: str) -> None:
        with self._lock:
            print(line.rstrip(), flush=True)


def wrap(text: str, width: int, **options: Any) -> list[str]:
    """Lines of at most `width`; a number stays with its unit."""
    kept = re.sub(r"(?<=[0-9]) (?=(?:[numk]?s|min|h|d|%|steps|[kMG]?B)\b)", "\u00a0", text)
    return [line.replace("\u00a0", " ") for line in textwrap.wrap(kept, width, **options)]


# ---------------------------------------------------------------------------- processes


class Child:
    """A command in the background: its output goes to a file, and telling lines to the story."""

    def __init__(self, argv: Sequence[str], log: Path, quote: Callable[[str], None] | None) -> None:
        self.log = log
        self._quote = quote
        environment = {
            **os.environ,
            MARK: str(log.parent),
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).strip(":"),
        }
        # Idle OpenMP threads sleep instead of spinning; two ranks share the cores.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment.setdefault("OMP_NUM_THREADS", "1")
        self.process = subprocess.Popen(
            [sys.executable, *argv], cwd=ROOT, env=environment, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with open(self.log, "w", buffering=1) as log:
            for line in self.process.stdout:
                log.write(line)
                self.lines.append(line.rstrip("\n"))
                if self._quote is not None:
                    self._quote(line.rstrip("\n"))

    def succeed(self, what: str, within_s: float = STAGE_S) -> list[str]:
        """Its output, once it has ended with code 0."""
        try:
            code = self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            raise Failed(f"{what} did not end within {within_s:.0f} s; see {self.log}") from None
        self._reader.join(timeout=10)
        if code != 0:
            tail = "\n      ".join(self.lines[-8:])
            raise Failed(f"{what} ended with exit code {code}; {self.log} ends:\n      {tail}")
        return self.lines


def end_everything(folder: Path) -> None:
    """Kill, by process id, what carries this demo's mark: launcher, ranks, keeper, torchrun."""
    wanted = f"{MARK}={folder}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


# ---------------------------------------------------------------------------- watching a run


class Run:
    """A run that is under way, seen through the files that it writes."""

    def __init__(self, path: Path, child: Child) -> None:
        self.files = RunDirectory(path)
        self.child = child

    def events(self, kind: type[E], *, since_s: float = 0.0) -> list[E]:
        """Events of one kind, oldest first."""
        events = self.files.events() if self.files.telemetry.is_dir() else []
        return [e for e in events if isinstance(e, kind) and e.at_s >= since_s]

    def wait_for(self, what: str, look: Callable[[], R | None], within_s: float = STAGE_S) -> R:
        """What `look` returns, as soon as it returns something."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            found = look()
            if found is not None:
                return found
            if self.child.process.poll() is not None:
                found = look()
                if found is not None:
                    return found
                self.child.succeed("the run")
                raise Failed(f"the run ended before {what} was seen; see {self.child.log}")
            time.sleep(0.1)
        raise Failed(
            f"{what} was not seen within {within_s:.0f} s; see {self.child.log} and "
            f"{self.files.telemetry}"
        )

    def trainers(self) -> dict[int, int]:
        """Process of every rank, as the newest incarnation reported it."""
        return {event.rank: event.pid for event in self.events(t.RunStarted)}

    def keeper(self) -> int | None:
        """Process of the keeper."""
        status = keeper_status(str(self.files.path), 0)
        return None if status is None else status.pid

    def reached(self, step: int) -> int | None:
        """The newest step that telemetry knows, once it is at least `step`."""
        newest = self.files.newest_step() or 0
        return newest if newest >= step else None


def kill(pids: Sequence[int]) -> float:
    """SIGKILL all of them at once; when."""
    at_s = time.monotonic()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at_s


def recovery(
    story: Story, run: Run, killed_s: float, source: str, committed: type[t.Event]
) -> t.Restored:
    """Wait until all ranks are back, check what they came back with, and print it."""

    def look() -> dict[int, t.Restored] | None:
        found = {event.rank: event for event in run.events(t.Restored, since_s=killed_s)}
        return found if len(found) == RANKS else None

    back = run.wait_for(f"the recovery of all {RANKS} ranks", look)
    first = back[0]
    for event in back.values():
        if (event.source, event.generation) != (source, first.generation):
            raise Failed(
                f"rank {event.rank} resumed {event.generation or 'nothing'} from "
                f"{event.source or 'nowhere'}, expected {first.generation} from {source}; see "
                f"{run.files.telemetry}"
            )
    earlier = [e for e in run.events(committed) if e.at_s < killed_s]
    promised = max((int(getattr(e, "step", 0)) for e in earlier), default=0)
    if first.step < promised:
        raise Failed(
            f"resumed at step {first.step}, but step {promised} was committed before the kill; "
            f"see {run.files.telemetry}"
        )
    # The rank that reports first closes the outage; the others know of no loss.
    worst = max(back.values(), key=lambda event: event.lost_steps)
    allowed = allowed_loss(run, killed_s, source)
    if worst.lost_steps > allowed:
        raise Failed(
            f"{worst.lost_steps} steps were lost where the plan allows about {allowed}: which "
            f"saves were skipped, and why, is in {run.files.telemetry}"
        )
    slowest = max(back.values(), key=lambda event: event.down_s)
    story.fact("back from", f"{first.source}, checkpoint {first.generation}")
    # Without the memory the newest step is known from telemetry alone, which lags a little.
    least = "at least " if source == "disk" else ""
    lost = f"{worst.lost_steps} steps ({format_duration(worst.lost_s)} of training)"
    story.fact("lost", least + lost)
    story.fact(
        "down",
        f"{format_duration(slowest.down_s)}, of which {format_duration(slowest.restore_s)} to "
        f"restore {format_bytes(slowest.bytes)} a rank; the rest starts processes and torch",
    )
    return first


def allowed_loss(run: Run, killed_s: float, tier: str) -> int:
    """Steps that a failure may cost under the plan in force: two intervals and three seconds."""
    plan = [event for event in run.events(t.PlanChanged) if event.at_s < killed_s][-1]
    steps = plan.memory_interval_steps if tier == "memory" else plan.disk_interval_steps
    block = [event for event in run.events(t.IterationsTimed) if event.at_s < killed_s][-1]
    return 2 * steps + round(SAVE_S * block.count / block.total_s)


# ---------------------------------------------------------------------------- the chapters


def autockpt(*words: str) -> list[str]:
    """The arguments of Python that run a command of autockpt."""
    return ["-m", "autockpt", *words]


def typed(argv: Sequence[str]) -> list[str]:
    """The same as one would type it."""
    return list(argv[1:]) if argv[0] == "-m" and argv[1] == "autockpt" else ["python", *argv]


def measure(story: Story, folder: Path) -> tuple[Path, int]:
    """`autockpt profile`; the profile and the number of steps that make a good demo."""
    story.chapter("Measure", "Run the job for some iterations, time it and this machine.")
    path = folder / "profile"
    argv = autockpt(
        *("profile", "--nproc-per-node", str(RANKS), "--out", shown(path)),
        *(SCRIPT, *JOB, "--steps", "2000"),
    )
    story.command(typed(argv))

    def quote(line: str) -> None:
        if line.startswith("autockpt profile:"):
            story.quote(line)

    lines = Child(argv, folder / "profile.log", quote).succeed("autockpt profile")
    profile = RunDirectory(path).read_profile()
    if profile is None:
        raise Failed(f"no profile was written; see {folder / 'profile.log'}")
    iteration_s = profile.iteration_s.p50
    story.fact(
        "one iteration", f"{format_duration(iteration_s)} (median of {profile.iteration_s.n})"
    )
    story.fact("state", f"{format_bytes(profile.state.total_bytes)} a rank")
    verdict = next((line for line in lines if line.startswith("checkpoint to ")), "")
    story.fact("verdict", verdict)
    steps = round(TRAINING_S / iteration_s / 10) * 10
    return path, max(STEPS[0], min(STEPS[1], steps))


def decide(story: Story, folder: Path, profile: Path) -> Path:
    """`autockpt plan` under the demo's policy."""
    story.chapter("Decide", "The same profile, but the owner says that failures are frequent:")
    policy = folder / "policy.yaml"
    policy.write_text(POLICY)
    for line in POLICY.splitlines():
        if not line.startswith("#"):
            story.quote(line)
    argv = autockpt("plan", "--profile", shown(profile), "--policy", shown(policy), "--json")
    story.command(typed(argv[:-1]))
    lines = Child(argv, folder / "plan.json", None).succeed("autockpt plan")
    text = "\n".join(line for line in lines if not line.startswith("autockpt:"))
    for choice in json.loads(text)["decision"]["choices"]:
        if choice["name"] in ("memory.interval", "disk.interval", "staging"):
            story.fact(choice["name"], f"{choice['chosen']}: {choice['reason']}")
    return policy


def start(story: Story, folder: Path, policy: Path, steps: int) -> Run:
    """`autockpt run` in the background, up to its first plan of its own."""
    story.chapter(
        "Train, and let the run measure itself",
        "The run gets the policy but not the profile: it starts with a safe plan, measures its "
        "first iterations in place and changes the plan while it trains.",
    )
    path = folder / "run"
    argv = autockpt(
        *("run", "--nproc-per-node", str(RANKS), "--run-dir", shown(path)),
        *("--policy", shown(policy), SCRIPT, *JOB, "--steps", str(steps)),
        *("--log-every", str(max(10, steps // 8)), "--digest"),
    )
    story.command(typed(argv))

    def quote(line: str) -> None:
        told = line.startswith("autockpt: ") and not line.startswith("autockpt: next")
        if told or line.startswith("step "):
            story.quote(line)

    run = Run(path, Child(argv, folder / "run.log", quote))
    run.wait_for("the first change of the plan", lambda: run.events(t.PlanChanged) or None)
    return run


def kill_one(story: Story, run: Run, dice: random.Random, steps: int) -> t.Restored:
    """SIGKILL one trainer; the state comes back from memory."""
    step, rank, delay_s = draw(dice, FIRST_KILL, steps)
    story.chapter("Kill one trainer", f"Drawn: rank {rank}, soon after step {step}.")
    run.wait_for("a checkpoint in memory", lambda: run.events(t.MemoryCommitted) or None)
    run.wait_for(f"step {step}", lambda: run.reached(step))
    time.sleep(delay_s)
    pid = run.trainers()[rank]
    killed_s = kill([pid])
    story.blow(f"SIGKILL to rank {rank} (process {pid})")
    return recovery(story, run, killed_s, "memory", t.MemoryCommitted)


def kill_all(story: Story, run: Run, dice: random.Random, steps: int) -> t.Restored:
    """SIGKILL trainers and keeper: no process holds the memory any more, so the disk serves."""
    step, _, delay_s = draw(dice, SECOND_KILL, steps)
    story.chapter(
        "Kill all trainers and the keeper",
        f"Drawn: soon after step {step}. With them goes the memory that held the checkpoints.",
    )
    since_s = run.events(t.Restored)[-1].at_s
    run.wait_for(
        "a checkpoint on disk since the first kill",
        lambda: run.events(t.CheckpointDurable, since_s=since_s) or None,
    )
    run.wait_for(f"step {step}", lambda: run.reached(step))
    keeper = run.keeper()
    if keeper is None:
        raise Failed(f"no keeper answers in {run.files.path}; see {run.files.logs}")
    time.sleep(delay_s)
    trainers = run.trainers()
    killed_s = kill([keeper, *trainers.values()])
    ranks = ", ".join(str(pid) for pid in trainers.values())
    story.blow(f"SIGKILL to the keeper (process {keeper}) and to all ranks (processes {ranks})")
    back = recovery(story, run, killed_s, "disk", t.CheckpointDurable)
    if run.keeper() in (None, keeper):
        raise Failed(f"no new keeper was started; see {run.files.logs}")
    return back


def draw(dice: random.Random, span: tuple[float, float], steps: int) -> tuple[int, int, float]:
    """(step, rank, delay in seconds): when, whom, and where within the iterations."""
    return round(dice.uniform(*span) * steps), dice.randrange(RANKS), dice.uniform(0.0, 0.5)


def finish(story: Story, run: Run, steps: int) -> str:
    """Finish the run, print its own account and the changes of its plan; return the digest."""
    story.chapter("To the end")
    digest = digest_of(run.child.succeed("the run"), run.child.log)
    status = run.files.read_status()
    if status is None or (status.state, status.exit_code) != ("finished", 0):
        raise Failed(f"status.json does not say finished; see {run.files.path / 'status.json'}")
    if status.last_step != steps or status.restarts != 2 or not status.protected:
        raise Failed(
            f"status.json says step {status.last_step}, {status.restarts} restarts, protected "
            f"{status.protected}; expected step {steps}, 2 restarts, protected"
        )
    story.fact("finished", f"at step {status.last_step} after {status.restarts} restarts")
    durable = len(run.events(t.CheckpointDurable))
    sealed = len({event.generation for event in run.events(t.MemoryCommitted)})
    story.fact("checkpoints", f"{sealed} complete in memory, {durable} durable on disk")
    changes = [event for event in run.events(t.PlanChanged) if event.rank == 0]
    # Behind a restart, at an older step, the next plan may have the number of one before it.
    places = {(change.plan_version, change.step) for change in changes}
    for event in run.events(t.PlanChanged):
        if (event.plan_version, event.step) not in places:
            raise Failed(
                f"rank {event.rank} changed to plan {event.plan_version} at step {event.step}, and "
                "rank 0 at another one"
            )
    for change in changes:
        story.fact(
            f"plan {change.plan_version}",
            f"on all ranks from step {change.step}: memory every {change.memory_interval_steps}, "
            f"disk every {change.disk_interval_steps} steps",
        )
    for record in run.files.failures():
        story.fact(
            "failure log",
            f"{record.what} lost at step {record.step}, back from {record.source}, "
            f"{record.lost_steps} steps lost",
        )
    for event in run.events(t.Degraded):
        story.fact("degraded", f"rank {event.rank}: {event.what}: {event.reason}")
    return digest


def compare(story: Story, folder: Path, steps: int, digest: str) -> None:
    """The bare script, undisturbed, under plain torchrun: its digest must be the same."""
    story.chapter(
        "Compare", "The same training once more: plain torchrun, no autockpt, nobody kills it."
    )
    argv = [
        *("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), SCRIPT, *JOB),
        *("--steps", str(steps), "--no-checkpoint", "--digest"),
        *("--log-every", str(max(10, steps // 2))),
    ]
    story.command(["torchrun", *argv[2:]])

    def quote(line: str) -> None:
        if line.startswith("step "):
            story.quote(line)

    child = Child(argv, folder / "bare.log", quote)
    bare = digest_of(child.succeed("the bare script"), child.log)
    story.fact("killed twice", digest)
    story.fact("undisturbed", bare)
    if digest != bare:
        raise Failed(f"the digests differ; see {folder / 'run.log'} and {child.log}")
    story.good(
        "equal: parameters, optimizer, schedule, random numbers and data position, to the bit"
    )


def explain(story: Story, folder: Path, run: Run) -> None:
    """The report's verdict, where it lies, and what to do next."""
    story.chapter("Explain")
    argv = autockpt("report", shown(run.files.path), "--format", "json")
    lines = Child(argv, folder / "report.log", None).succeed("autockpt report")
    text = "\n".join(lines)
    report, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    verdict = report["verdict"]
    story.fact("goodput", f"{verdict['headline']} {verdict['detail']}")
    if not run.files.report.is_file():
        raise Failed(f"there is no {run.files.report}")
    story.fact("report", shown(run.files.report))
    story.fact("next", f"autockpt explain {shown(run.files.path)}")


def digest_of(lines: Sequence[str], log: Path) -> str:
    """Return the last printed digest of the script."""
    found = [line.removeprefix("digest: ") for line in lines if line.startswith("digest: ")]
    if len(found) != 1:
        raise Failed(f"{len(found)} digests were printed, expected 1; see {log}")
    return found[0]


def shown(path: Path) -> str:
    """A path as one would type it in the root of the repository."""
    return os.path.relpath(path, ROOT)


def demo(story: Story, folder: Path, seed: int) -> None:
    """All chapters, in order."""
    dice = random.Random(seed)
    profile, steps = measure(story, folder)
    policy = decide(story, folder, profile)
    run = start(story, folder, policy, steps)
    memory = kill_one(story, run, dice, steps)
    disk = kill_all(story, run, dice, steps)
    if disk.step < memory.step:
        raise Failed(f"the second recovery went back to step {disk.step}, before {memory.step}")
    digest = finish(story, run, steps)
    compare(story, folder, steps, digest)
    explain(story, folder, run)


def main() -> int:
    """Tell the story; 0 only if everything held."""
    parser = argparse.ArgumentParser(description="Measure, train, kill, resume, compare.")
    parser.add_argument("--seed", type=int, default=None, help="of the kills; default: random")
    arguments: Any = parser.parse_args()
    seed = random.SystemRandom().randrange(10_000) if arguments.seed is None else arguments.seed
    folder = ROOT / "runs" / f"demo-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    story = Story()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    story.say("autockpt demo: a training job that is killed twice and ends as if it had not been.")
    story.fact("written to", shown(folder))
    story.fact("seed of the kills", f"{seed}   (python examples/demo.py --seed {seed})")
    try:
        demo(story, folder, seed)
    except Failed as failure:
        print(f"\n   FAILED: {failure}\n   all logs: {shown(folder)}", flush=True)
        return 1
    except KeyboardInterrupt:
        print("\n   interrupted", flush=True)
        return 130
    finally:
        end_everything(folder)
    print(f"\n   Everything held, in {time.monotonic() - story.began_s:.0f} s.", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
