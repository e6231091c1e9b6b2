"""Which exceptions would come again, and which say something about machines."""

import json

import pytest

from autockpt.values.script_errors import origin_of, text_of


class DistBackendError(RuntimeError):
    """As torch.distributed names its own."""


class PoisonedError(Exception):
    """As a script names its own."""


def raised_from(error: Exception, cause: BaseException) -> BaseException:
    """What `raise error from cause` raises."""
    try:
        raise error from cause
    except Exception as caught:
        return caught


def handling(error: Exception, first: BaseException) -> BaseException:
    """What an exception in the handling of another is."""
    try:
        try:
            raise first
        except BaseException:
            raise error  # noqa: B904 - without a cause on purpose
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    "error",
    [
        ValueError("typo"), TypeError("f() takes no arguments"), NameError("x"), KeyError("lr"),
        IndexError("list index out of range"), AttributeError("no a"), ZeroDivisionError(),
        AssertionError(), NotImplementedError(), RecursionError(), SyntaxError("bad"),
        ModuleNotFoundError("no module named cuda_error"), SystemExit(2), SystemExit(78),
        OverflowError("math range error"),
        ExceptionGroup("tasks", [ValueError("typo"), ExceptionGroup("inner", [KeyError("lr")])]),
    ],
    ids=repr,
)  # fmt: skip
def test_wrong_code_and_wrong_input_are_mistakes(error: BaseException) -> None:
    """They come again at the same step: nothing random is left in a resumed run."""
    assert origin_of(error) == "mistake"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        RuntimeError("Expected all tensors to be on the same device, but found cuda:0 and cpu!"),
        RuntimeError("poisoned batch"), PoisonedError("batch 7"), SystemExit(1), SystemExit("bad"),
        FileNotFoundError(2, "No such file", "data.bin"), UnicodeDecodeError("utf8", b"", 0, 1, ""),
        GeneratorExit(), BaseException("stop now"),
        ExceptionGroup("tasks", [ValueError("typo"), PoisonedError("batch 7")]),
    ],
    ids=repr,
)  # fmt: skip
def test_other_exceptions_of_the_script_are_its_own(error: BaseException) -> None:
    """They may pass, but a machine has not failed."""
    assert origin_of(error) == "script"


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"), ConnectionResetError(), TimeoutError(), MemoryError(),
        EOFError(), DistBackendError("NCCL error"), KeyboardInterrupt(),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasSgemm"),
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [::1]:1"),
        RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed."),
        raised_from(ValueError("no data"), OSError(5, "Input/output error")),
        handling(KeyError("x"), ConnectionResetError()),
        json.JSONDecodeError("Expecting value", "", 0),
        ExceptionGroup("tasks", [ValueError("typo"), OSError(5, "Input/output error")]),
    ],
    ids=repr,
)  # fmt: skip
def test_what_the_surroundings_raise_is_worth_another_start(error: BaseException) -> None:
    """Also where the script turned it into an exception of its own."""
    assert origin_of(error) == "machine"


def test_the_text_is_equal_for_equal_exceptions() -> None:
    """Addresses differ between processes."""
    texts = {text_of(ValueError(f"<object at {where}>")) for where in ("0x7f12ab", "0x55aa00ff")}
    assert texts == {"ValueError: <object at 0x...>"}
    assert text_of(KeyError()) == "KeyError"
    assert text_of(SystemExit(3)) == "SystemExit: 3"
    assert len(text_of(ValueError("x" * 9999))) == 2000
