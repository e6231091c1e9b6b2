"""Meaning of a run's exit code, and the next step: the table of `docs/reference/exit_codes.md`.

Codes of errors are `exit_code` in `values/errors.py`, those below 64 and above 127 are usual ones.
91 to 96 are autockpt's own: no other program of a training is known to use them.
"""

import signal

from autockpt.values.errors import ConfigError, DirectoryBusyError, NoCheckpointError

SAVED_REQUEUE = 75
"""A signal announced an end, and all training so far is durable: EX_TEMPFAIL."""
ANNOUNCED = (128 + signal.SIGUSR1, 128 + signal.SIGUSR2)
"""Codes after the signals that only schedulers send, ahead of an end."""

WOULD_TRAIN_WRONGLY = 91
"""The state was resumed at a step that the script's loop and data are not at."""
NOTHING_DURABLE = 92
"""The script trained to its end, and no checkpoint of it is durable."""
NO_PROGRESS = 93
"""Restarts came no further: another one would not either."""
REPLACED = 94
"""A newer start of the run has fenced this one off."""
LEFT_OUT = 96
"""The launcher of a node that ended the job again and again; the others go on without it."""

REFUSED_AGAIN: dict[int, str] = {
    WOULD_TRAIN_WRONGLY: "is refused again, until the script goes on where its state is",
    ConfigError.exit_code: "is refused again, until what is named above is corrected",
    NoCheckpointError.exit_code: "is refused again; autockpt verify --quarantine, or --fresh",
    DirectoryBusyError.exit_code: "goes on when the other run has ended",
}
"""By code: why the same command does not simply go on, said of that command."""

EXIT_CODES: dict[int, tuple[str, str]] = {
    0: ("the script ended well", "nothing"),
    1: ("the script failed, or autockpt has a bug", "read the traceback"),
    2: ("the command line alone is wrong", "correct it; `autockpt COMMAND --help`"),
    65: ("data is damaged, or a profile is of another job", "`autockpt verify`, or profile again"),
    66: ("checkpoints were committed and none can be restored", "`autockpt verify --quarantine`"),
    69: (
        "`autockpt doctor` found a fault, or a job did not train in `autockpt drill`",
        "do what it says",
    ),
    70: ("autockpt refused what would endanger a checkpoint, or broke a rule", "read the message"),
    73: ("another run has the directory", "end that run, or give `--run-dir`"),
    74: ("storage failed", "look at the disk; the same command resumes"),
    SAVED_REQUEUE: (
        "SIGUSR1 or SIGUSR2 announced an end, and all that was trained is durable",
        "start it again; a scheduler may requeue it",
    ),
    78: (
        "a policy, the script, or what else the command line names cannot work",
        "correct what the message names",
    ),
    WOULD_TRAIN_WRONGLY: (
        "the state was resumed, but nothing puts the loop and the data there",
        'use `ckpt.batches(total)`, or say `attach(data="script")`; see below',
    ),
    NOTHING_DURABLE: ("the script trained to its end, nothing is durable", "look at the disk"),
    NO_PROGRESS: (
        "restarts came no further than the start before them",
        "read the reason; do not requeue it",
    ),
    REPLACED: ("a newer start of this run took over", "nothing"),
    95: (
        "the launchers of a job did not meet, or meet no longer",
        "look at the output of the others; the same command resumes",
    ),
    LEFT_OUT: (
        "this node began too many failures and has left the job, which goes on without it",
        "look at the machine before it takes part again",
    ),
    130: ("interrupted (Ctrl-C)", "the same command resumes"),
    143: ("ended by SIGTERM", "the same command resumes"),
}
"""By code: (what happened, what to do)."""
