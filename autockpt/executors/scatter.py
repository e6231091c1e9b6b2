"""Where the bytes of an image go: live tensors, or new memory for what has no live tensor yet.

Everything that can be wrong with a header, or between it and the live state, is found before a byte
is written.
"""

import bisect
import ctypes
from dataclasses import dataclass

import torch

from autockpt.executors.dtypes import true_form
from autockpt.executors.fresh import FreshMemory
from autockpt.executors.image import ImageHeader, TensorPlace
from autockpt.executors.state import local_part
from autockpt.values.errors import ConfigError


@dataclass(slots=True)
class _Home:
    """One tensor of the image and what it becomes."""

    name: str
    start: int
    stop: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    live: torch.Tensor | None
    """Local part of the live tensor; None: there is none."""

    @property
    def direct(self) -> bool:
        """The live tensor's own memory can take the bytes as they are."""
        live = self.live
        return live is not None and live.device.type == "cpu" and live.is_contiguous()


class Scatter:
    """Brings pieces of an image to the tensors they belong to.

    Raises ConfigError when the state changed shape since the checkpoint, CorruptCheckpointError
    when the header lies; nothing is written then.
    """

    def __init__(self, header: ImageHeader, live: dict[str, torch.Tensor]) -> None:
        self.header = header
        self.live = live
        self.fresh: dict[str, torch.Tensor] = {}
        """Tensors without a live one, in new host memory."""
        _require_same_names(header, live)
        homes = [_home(header, name, place, live) for name, place in header.tensors.items()]
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """(live tensor, host memory to copy to it at the end): devices, odd strides."""
        places = self._settle(homes)
        self._starts = [start for start, _, _ in places]
        self._places = places

    def _settle(self, homes: list[_Home]) -> list[tuple[int, int, int]]:
        """(start, stop, address) of every tensor with bytes, by start."""
        memory = FreshMemory([home.stop - home.start for home in homes if not home.direct])
        places = []
        for home in homes:
            if home.direct:
                assert home.live is not None
                memory_of = home.live
            else:
                memory_of = memory.tensor(home.shape, home.dtype)
                if home.live is None:
                    self.fresh[home.name] = memory_of
                else:
                    self._late.append((home.live, memory_of))
            if home.stop > home.start:
                places.append((home.start, home.stop, memory_of.data_ptr()))
        return sorted(places)

    def put(self, start: int, data: memoryview) -> None:
        """`data` stands at `start` of the image."""
        stop = start + len(data)
        address = _address(data)
        i = max(0, bisect.bisect_right(self._starts, start) - 1)
        while i < len(self._places) and self._starts[i] < stop:
            first, last, target = self._places[i]
            low, high = max(start, first), min(stop, last)
            if high > low:
                ctypes.memmove(target + (low - first), address + (low - start), high - low)
            i += 1

    def finish(self) -> dict[str, torch.Tensor]:
        """Everything was put: fills devices and second names; the tensors without a live one."""
        for live, staging in self._late:
            live.copy_(staging)
        self._late.clear()
        for alias, original in self.header.aliases.items():
            self._resolve(alias, original)
        return self.fresh

    def _resolve(self, alias: str, original: str) -> None:
        """Gives a second name its tensor: what shared memory may not do so now."""
        new = original in self.fresh
        source = self.fresh[original] if new else local_part(self.live[original].detach())
        if alias not in self.live:
            self.fresh[alias] = source if new else source.to("cpu", copy=True)
            return
        target = local_part(self.live[alias].detach())
        if target.data_ptr() != source.data_ptr():
            _require_same_form(alias, target, source.dtype, tuple(source.shape))
            target.copy_(source)


def _home(
    header: ImageHeader, name: str, place: TensorPlace, live: dict[str, torch.Tensor]
) -> _Home:
    dtype, shape = true_form(header, name)
    local = local_part(live[name].detach()) if name in live else None
    if local is not None:
        _require_same_form(name, local, dtype, shape)
    return _Home(name, place.start, place.stop, dtype, shape, local)


def _require_same_names(header: ImageHeader, live: dict[str, torch.Tensor]) -> None:
    saved = set(header.tensors) | set(header.aliases)
    missing = sorted(name for name in live if name not in saved)
    if missing:
        raise ConfigError(
            f"state: {len(missing)} tensors are not in the checkpoint, first {missing[0]!r}; the "
            "model or optimizer changed since; use --fresh to start over, or the code that wrote it"
        )
    expected = {name.split(".", 1)[0] for name in live if name.startswith("model")}
    gone = sorted(name for name in saved if name.split(".", 1)[0] in expected and name not in live)
    if gone:
        raise ConfigError(
            f"state: the checkpoint has {len(gone)} tensors the model has not, first {gone[0]!r}; "
            "the model changed since; use --fresh to start over, or the code that wrote it"
        )


def _require_same_form(
    name: str, local: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    if tuple(local.shape) != tuple(shape) or local.dtype != dtype:
        raise ConfigError(
            f"{name}: is {tuple(local.shape)} {local.dtype} now, {tuple(shape)} {dtype} in the "
            "checkpoint; the state changed shape since; use --fresh to start over, or the code "
            "that wrote it"
        )


def _address(data: memoryview) -> int:
    if data.readonly:
        return ctypes.cast(ctypes.c_char_p(data.obj), ctypes.c_void_p).value or 0  # type: ignore[arg-type]
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
