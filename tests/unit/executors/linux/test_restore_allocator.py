"""New memory for restored tensors: private, each tensor's own, given back one by one."""

import copy
import gc
import io
import subprocess
import sys

import pytest
import torch

from autockpt.executors.linux.restore_allocator import OWN_PAGES_BYTES, RestoreAllocator
from tests.unit.executors.states import DTYPES, bytes_of, random_tensor

LARGE = (OWN_PAGES_BYTES + 8, 2)


def mapped(address: int) -> bool:
    """Whether this process has memory there."""
    with open("/proc/self/maps") as file:
        for line in file:
            low, high = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
            if low <= address < high:
                return True
    return False


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_is_like_any_other(dtype: str) -> None:
    """Contiguous, no view of anything, with the bytes that are put into it."""
    kind = getattr(torch, dtype)
    value = random_tensor(dtype, LARGE, 3)
    tensor = RestoreAllocator([value.nbytes]).tensor(LARGE, kind)
    tensor.view(torch.uint8).copy_(value.view(torch.uint8))
    assert (tensor.shape, tensor.dtype, tensor.stride()) == (LARGE, kind, value.stride())
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert bytes_of(tensor) == bytes_of(value)


def test_shapes_have_the_strides_of_torch() -> None:
    """Sizes of one and of zero too."""
    for shape in ((OWN_PAGES_BYTES,), (3, 1, OWN_PAGES_BYTES), (2, OWN_PAGES_BYTES, 1), (0, 5), ()):
        tensor = RestoreAllocator([4 * OWN_PAGES_BYTES * 3]).tensor(shape, torch.float32)
        assert tensor.stride() == torch.empty(shape).stride()


def test_every_tensor_gives_its_own_pages_back() -> None:
    """The others stay, and stay as they are."""
    sizes = [OWN_PAGES_BYTES] * 3
    memory = RestoreAllocator(sizes)
    first, second, third = (memory.tensor((size,), torch.uint8).fill_(7) for size in sizes)
    del memory
    address = second.data_ptr()
    part = second[5:9]
    del second
    gc.collect()
    assert mapped(address)
    assert part.tolist() == [7] * 4
    del part
    gc.collect()
    assert not mapped(address)
    assert first.eq(7).all()
    assert third.eq(7).all()


def test_one_saved_tensor_writes_no_other() -> None:
    """torch.save writes a tensor's storage; a copy has one of its own."""
    memory = RestoreAllocator([OWN_PAGES_BYTES, 64 * OWN_PAGES_BYTES])
    small = memory.tensor((OWN_PAGES_BYTES,), torch.uint8).fill_(1)
    memory.tensor((64 * OWN_PAGES_BYTES,), torch.uint8)
    file = io.BytesIO()
    torch.save(small, file)
    assert len(file.getvalue()) < 2 * OWN_PAGES_BYTES
    assert copy.deepcopy(small).untyped_storage().nbytes() == OWN_PAGES_BYTES


def test_what_was_not_announced_comes_from_torch() -> None:
    """Small tensors, and more than there is room for."""
    memory = RestoreAllocator([8, OWN_PAGES_BYTES])
    for size in (8, OWN_PAGES_BYTES, OWN_PAGES_BYTES, 0):
        assert memory.tensor((size,), torch.uint8).fill_(1).eq(1).all()


def test_tensors_live_to_the_end_of_the_process() -> None:
    """Exit functions and threads may still use them."""
    code = (
        "import atexit, torch\n"
        "from autockpt.executors.linux.restore_allocator import RestoreAllocator\n"
        "atexit.register(lambda: print(int(tensor.sum())))\n"
        "tensor = RestoreAllocator([2**20]).tensor((2**20,), torch.uint8).fill_(1)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (0, f"{2**20}\n"), ended.stderr
