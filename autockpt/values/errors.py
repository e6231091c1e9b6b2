"""Every error autockpt raises, split by the reader's next step.

        AutockptError
          ConfigError              fix the input (script, policy file, state)
            OptionError            fix the command line
          StaleProfileError        run `autockpt profile` again
          DirectoryBusyError       another live run owns the directory
          StorageError             the target cannot be written or read now
          CorruptCheckpointError   restore an older one
          NoCheckpointError        checkpoints were committed, none can be restored
            RestartError           start it again: the next start may succeed
          GuardError               refused for safety
            NoRoomError            ask again later: the host has no memory for it now
          RollbackError            nothing: the launcher starts the script again
          ProtocolError            a bug, or a foreign keeper; training goes on unprotected
          LostNodesError           look at the other launchers, start the job again

A message says what, where, expected and got with units, and the next step.
"""


class AutockptError(Exception):
    """Base of all errors that autockpt raises on purpose."""

    exit_code = 1
    """Process exit status of the command line for this error (sysexits where one fits)."""


class ConfigError(AutockptError):
    """The input is wrong: a policy file, an option, a script, an object that cannot be saved."""

    exit_code = 78


class OptionError(ConfigError):
    """The command line alone is wrong: a value that an option never takes, or a contradiction."""

    exit_code = 2


class StaleProfileError(AutockptError):
    """A profile was measured on another machine, job or version."""

    exit_code = 65


class DirectoryBusyError(AutockptError):
    """Another live run holds the lease of the directory."""

    exit_code = 73


class StorageError(AutockptError):
    """A file-system operation failed; older checkpoints are untouched."""

    exit_code = 74


class CorruptCheckpointError(AutockptError):
    """Bytes on disk or in memory do not match their digests, or a file is malformed."""

    exit_code = 65


class NoCheckpointError(AutockptError):
    """Generations were committed once, and none of them can be restored now."""

    exit_code = 66


class RestartError(NoCheckpointError):
    """This start cannot restore; the next one may, so a launcher starts the job again."""

    exit_code = 74


class GuardError(AutockptError):
    """The executor refused an instruction that would endanger the last good checkpoint."""

    exit_code = 70


class NoRoomError(GuardError):
    """The host has no memory for it now, though the policy would allow it."""


class LostNodesError(AutockptError):
    """The launchers of a job do not meet, or meet no longer.  Look at the others, start again."""

    exit_code = 95


class RollbackError(AutockptError):
    """The training goes back to its last good checkpoint, as the policy asks for."""


class ProtocolError(AutockptError):
    """A peer sent something outside the protocol, or an invariant of ours is broken."""

    exit_code = 70
