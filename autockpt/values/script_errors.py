"""Would the script fail in the same way again?  Told from the exception that ended it.

Resumed training repeats itself to the bit, so a mistake in the script comes back at the same step.
There are three origins:

    mistake   what only wrong code or wrong input raises (TypeError, ValueError, KeyError, ...):
              another start would meet it again, so it is final at once
    script    other exceptions of Python code, and exits: final when the same comes again at the
              same step
    machine   what the surroundings raise (files, network, memory, devices, other ranks): worth
              another start, and evidence for the failure rate

Neither a mistake nor an exception of the script is evidence about machines.
"""

import re
from collections.abc import Iterator
from typing import Literal

from autockpt.values.exit_codes import WOULD_TRAIN_WRONGLY

Origin = Literal["mistake", "script", "machine"]

_MISTAKES = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError,
    NotImplementedError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip
_MACHINE = (OSError, EOFError, MemoryError, BufferError)
_MACHINE_NAMES = re.compile(r"Dist\w*Error|OutOfMemoryError|AcceleratorError|JSONDecodeError")
"""Of types that are not imported here, or that read what a machine may have cut short."""
_MACHINE_TEXT = re.compile(
    r"\b(?:cuda|hip|cudnn|cublas|cufft|cusolver|xpu)[\w ]*?(?:error|fail|status)"
    r"|\b(?:nccl|gloo|rendezvous|socket|connection|timed? ?out|out of memory)\b"
    r"|can't allocate memory|DataLoader worker \(pid|\[Errno",
    re.IGNORECASE,
)
"""In a RuntimeError, which torch raises for devices and for peers that are gone."""
_USAGE_CODES = (2, 64, 78, WOULD_TRAIN_WRONGLY)
"""Exit codes of a command line that is wrong (argparse's, EX_USAGE, EX_CONFIG), or of a script that
was not resumed."""
_ADDRESS = re.compile(r"0x[0-9a-f]{4,}")
_TEXT_CHARS = 2000


def origin_of(error: BaseException) -> Origin:
    """Whose fault an exception is, as far as its type and text say."""
    if isinstance(error, SystemExit):
        return "mistake" if error.code in _USAGE_CODES else "script"
    if isinstance(error, KeyboardInterrupt) or any(map(_is_of_machine, _chain(error))):
        return "machine"
    if isinstance(error, BaseExceptionGroup):
        every = {origin_of(part) for part in error.exceptions}
        return "machine" if "machine" in every else "mistake" if every == {"mistake"} else "script"
    if isinstance(error, UnicodeError):
        return "script"
    return "mistake" if isinstance(error, _MISTAKES) else "script"


def text_of(error: BaseException) -> str:
    """Type and message as a traceback ends, without addresses, at most 2000 characters."""
    if isinstance(error, SystemExit):
        return f"SystemExit: {error.code}"
    said = str(error)
    return _ADDRESS.sub("0x...", f"{type(error).__name__}{': ' * bool(said)}{said}")[:_TEXT_CHARS]


def _is_of_machine(error: BaseException) -> bool:
    if isinstance(error, ImportError):
        return False  # its text may name a library of the device
    if isinstance(error, _MACHINE) or _MACHINE_NAMES.fullmatch(type(error).__name__):
        return not isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError)
    return isinstance(error, RuntimeError) and bool(_MACHINE_TEXT.search(str(error)))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the exception and the exceptions that it was raised from or in the handling of."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
