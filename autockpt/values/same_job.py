"""Are two starts the same job?  One rule, for runs and profiles, told in docs/howto/launch/jobs.md.

The same job is the same script, the same task of an array, and the same arguments.  Arguments do
not count if they set the length of training, the place of a rank, the resume, or the output.  How
an argument is spelled does not matter: `--lr=0.10` is `--lr 1e-1`.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal

from autockpt.values.arguments import without_secrets

ARRAY_TASKS = (
    "SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID", "LSB_JOBINDEX",
    "AWS_BATCH_JOB_ARRAY_INDEX",
)  # fmt: skip
"""Variables by which schedulers number the tasks of an array."""
_NO_TASK = ("", "undefined")
RANK = "{rank}"
"""Stands for the possible number of a rank in an argument."""
_NUMBERED = re.compile(r"(?:(?<==)|^)[0-9]{1,6}$")

_LENGTHS = re.compile(
    r"(?:(?:max|num|n|nb|total|train|training|number-of)-?)*(?:epochs?|iters?|iterations?)"
    r"|steps?|(?:(?:num|n|nb)-?)?(?:max|total|train|training)-?(?:(?:num|n|nb)-?)?"
    r"(?:steps?|updates?|timesteps)"
    r"|(?:total|train|training)-?(?:batches|samples|tokens)"
    r"|(?:max|total|train|training)-?(?:time|days|hours|minutes|mins)"
    r"|stop-after|until|exit-interval|exit-duration-in-mins"
)
_PLACES = re.compile(
    r"(?:local|global|node|machine)-rank|rank|proc(?:ess)?-id|world-size|nnodes|nproc-per-node"
    r"|master-(?:addr|address|port)|dist-url|init-method|rdzv-.*|devices?|device-ids?|gpus?|gpu-ids?"
)
_GOING_ON = re.compile(r"(?:auto-)?resume|continue(?:-training)?|restart")
_GOING_ON_VALUES = frozenset(
    ("", "auto", "latest", "last", "newest", "true", "false", "yes", "no", "none", "0", "1")
)
_PRINTS = re.compile(
    r"v+|verbose|verbosity|q|quiet|debug-?log|(?:no-)?progress(?:-bar)?|log-?level"
    r"|(?:log|print)-?(?:every(?:-n-steps)?|interval|freq|steps)"
)
_IN_STATE = re.compile(
    r"(?:.*-)?(?:lr|learning-rate)(?:-.*)?|(?:.*-)?(?:weight-decay|wd|warmup)(?:-.*)?"
    r"|momentum|betas|(?:adam-)?beta-?[12]|adam-eps(?:ilon)?|(?:lr-)?scheduler(?:-.*)?"
)
"""Settings of an optimizer or a scheduler, which their saved state has."""
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?")
_ASSIGNED = re.compile(r"[+~]{0,2}[A-Za-z_][\w./@:-]*")
_KERNELS = ("ipykernel_launcher", "colab_kernel_launcher")
_TAG_DIGITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a start belongs to.  Written as job.json into the directory of its run."""

    schema_version: int = 1
    script: str
    """Absolute path of the script, or the name of a module; "": a session at a prompt."""
    args: tuple[str, ...] = ()
    """As given, without what looks like a secret."""
    array_task: str = ""
    """Number of the task in an array of jobs; "": there is no array."""


@dataclass(frozen=True, slots=True)
class _Argument:
    name: str
    """Of an option, without dashes; "" for a positional argument."""
    value: str


def job_of(script: str, args: Sequence[str], environ: Mapping[str, str], *, ranks: int = 0) -> Job:
    """The job that a command line starts.

    `ranks` processes that cannot ask each other may each have their number in an argument.  Numbers
    below that count do not make jobs different.
    """
    if os.path.splitext(os.path.basename(script))[0] in _KERNELS:
        script, args = "", ()
    kept = without_secrets(args)
    kept = tuple(_NUMBERED.sub(lambda found: _unnumbered(found, ranks), word) for word in kept)
    return Job(script=script, args=kept, array_task=array_task(environ))


def _unnumbered(found: re.Match[str], ranks: int) -> str:
    return RANK if int(found[0]) < ranks else found[0]


def array_task(environ: Mapping[str, str]) -> str:
    """Number of this task in an array of jobs; "" where there is none."""
    for name in ARRAY_TASKS:
        found = environ.get(name, "")
        # LSF numbers its arrays from 1, and says 0 to a job of none.
        if found not in _NO_TASK and (name, found) != ("LSB_JOBINDEX", "0"):
            return found
    return ""


def differences(there: Job, here: Job, *, same_script: bool) -> list[str]:
    """Return the differences between the jobs of two starts, a phrase each; [] for the same job.

    The caller knows whether two paths are one script, because it can look at them.
    """
    found = [] if same_script else [f"script {here.script or 'none'} (there: {there.script})"]
    if there.array_task != here.array_task:
        tasks = here.array_task or "none", there.array_task or "none"
        found.append(f"array task {tasks[0]} (there: {tasks[1]})")
    return found + _phrases(_telling(there.args), _telling(here.args))


def lengths(there: Job, here: Job) -> list[str]:
    """Return the differences of the same job in how long it trains, a phrase each."""
    of_length = [
        [one for one in _arguments(job.args) if _LENGTHS.fullmatch(_last(one.name))]
        for job in (there, here)
    ]
    return _phrases(*of_length)


def goes_on(there: Job, here: Job, found: Iterable[str]) -> str:
    """The differences with which a run goes on, and whether all of them count."""
    old, new = _by_name(_telling(there.args)), _by_name(_telling(here.args))
    changed = [name for name in {*old, *new} if old.get(name) != new.get(name)]
    is_kept = any(_IN_STATE.fullmatch(_last(name)) for name in changed)
    note = "; optimizer and scheduler keep their saved settings, unless the loop sets them"
    return f"{'; '.join(found)}{note if is_kept else ''}"


def tag(job: Job, digits: int = _TAG_DIGITS) -> str:
    """Return a name for the job, unique in one directory; the same for the same job.

    The folder of the script is not in it: a checkout may move.
    """
    telling = sorted((one.name, one.value) for one in _telling(job.args) if one.name)
    given = [one.value for one in _telling(job.args) if not one.name]
    text = json.dumps([os.path.basename(job.script), telling, given, job.array_task])
    digest = hashlib.sha256(text.encode()).hexdigest()[:digits]
    return f"task{_safe(job.array_task)}-{digest}" if job.array_task else digest


def _safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.]", "_", text)[:20]


def _telling(args: Sequence[str]) -> list[_Argument]:
    """Return the arguments that distinguish jobs."""
    return [one for one in _arguments(args) if not _says_nothing(one)]


def _says_nothing(argument: _Argument) -> bool:
    name = _last(argument.name)
    if not name:
        return False
    if _GOING_ON.fullmatch(name):
        return argument.value.lower() in _GOING_ON_VALUES
    if name == "rank" and name != argument.name.lower():
        return False  # of a matrix, as in lora.rank
    return any(known.fullmatch(name) for known in (_LENGTHS, _PLACES, _PRINTS))


def _last(name: str) -> str:
    """Return the name of an option within its group: `max_steps` of `trainer.max_steps`."""
    return name.rpartition(".")[2].lower()


def _arguments(args: Sequence[str]) -> list[_Argument]:
    """Options with their values, and positional arguments, spelled in one way."""
    found: list[_Argument] = []
    left = list(args)
    while left:
        word = left.pop(0)
        name, given, value = word.partition("=")
        if word == "--":
            found += [_Argument("", _value(rest)) for rest in left]
            break
        if word.startswith("-") and not _NUMBER.fullmatch(word) and word != "-":
            if not given and left and not _is_option(left[0]):
                value = left.pop(0)
            found.append(_Argument(_name(name), _value(value)))
        elif given and _ASSIGNED.fullmatch(name):
            found.append(_Argument(_name(name), _value(value)))
        else:
            found.append(_Argument("", _value(word)))
    return found


def _is_option(word: str) -> bool:
    if word.startswith("-"):
        return not _NUMBER.fullmatch(word)
    name, given, _ = word.partition("=")
    return bool(given) and _ASSIGNED.fullmatch(name) is not None


def _name(text: str) -> str:
    return text.lstrip("-+~").replace("_", "-")


def _value(text: str) -> str:
    """Equal for equal numbers, however they are written."""
    if text.lower() in ("true", "false"):
        return text.lower()
    if not _NUMBER.fullmatch(text):
        return text
    # Exact: seeds may be long.
    number = Context(prec=max(28, len(text))).normalize(Decimal(text))
    return f"{number:f}" if -20 < number.adjusted() < 60 else str(number)


def _phrases(there: Iterable[_Argument], here: Iterable[_Argument]) -> list[str]:
    """Return the arguments that stand in only one of two lists, or with different values."""
    old, new = _by_name(there), _by_name(here)
    return [
        f"{_shown(name, new.get(name))} (there: {_shown_value(name, old.get(name))})"
        for name in dict.fromkeys([*new, *old])
        if old.get(name) != new.get(name)
    ]


def _by_name(arguments: Iterable[_Argument]) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for one in arguments:
        found[one.name] = (*found.get(one.name, ()), one.value)
    return found


def _shown(name: str, values: tuple[str, ...] | None) -> str:
    if not name:
        return f"arguments {' '.join(values)}" if values else "no arguments"
    option = f"{'-' if len(name) == 1 else '--'}{name}"
    return f"no {option}" if values is None else f"{option} {' '.join(values)}".rstrip()


def _shown_value(name: str, values: tuple[str, ...] | None) -> str:
    if values is None:
        return "none"
    return " ".join(values).strip() or ("given" if name else "none")
