"""Image: one container, written from a live state and read by another reader, bit for bit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from safetensors import safe_open

from autockpt.executors.image.container import ImageHeader, header_bytes, read_header
from autockpt.executors.image.layout.plan import EXTRA
from autockpt.executors.state.live_state import LiveState
from tests.unit.executors.states import (
    DTYPES,
    ODD_NAMES,
    Holder,
    Module,
    bytes_of,
    random_tensor,
    trained,
)


class ImageContract:
    """Subclass and set `image`: the finished image of a state."""

    image: ClassVar[Callable[[LiveState], bytes]]

    def opened(self, state: LiveState, folder: Path) -> tuple[dict[str, bytes], ImageHeader]:
        """(raw bytes by name as safetensors reads them, header as we read it)."""
        image = self.image(state)
        path = folder / "image.safetensors"
        path.write_bytes(image)
        with safe_open(path, framework="pt") as file:
            found = {name: bytes_of(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
        length = header_bytes(memoryview(image), len(image))
        return found, read_header(image[:length], len(image))

    @pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", [(), (3,), (2, 0, 3), (65, 130)], ids=str)
    def test_every_dtype_is_bit_exact(
        self, dtype: str, shape: tuple[int, ...], tmp_path: Path
    ) -> None:
        """Parameters and boundary tensors, scalars and empty ones, NaN payloads included."""
        lazy, boundary = random_tensor(dtype, shape, 1), random_tensor(dtype, shape, 2)
        state = LiveState.of(model=Module([("w", lazy)]), other=Holder({"b": boundary}))
        found, header = self.opened(state, tmp_path)
        assert found["model.w"] == bytes_of(lazy)
        assert found["other.b"] == bytes_of(boundary)
        place = header.tensors["model.w"]
        assert place.stop - place.start == len(found["model.w"])

    @pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
    def test_odd_names_survive(self, name: str, tmp_path: Path) -> None:
        """Quotes, newlines, other scripts, blanks, length."""
        lazy, boundary = random_tensor("float32", (5,), 1), random_tensor("float32", (5,), 2)
        model = Module([("w", lazy)])
        model.register_buffer(name, boundary)
        state = LiveState.of(model=model, other=Holder({name: boundary + 1}))
        found, header = self.opened(state, tmp_path)
        assert found[f"model.{name}"] == bytes_of(boundary)
        assert found[f"other.{name}"] == bytes_of(boundary + 1)
        assert {f"model.{name}", f"other.{name}", "model.w"} <= set(header.tensors)

    def test_tied_tensors_are_stored_once(self, tmp_path: Path) -> None:
        """The second name is an alias; other readers see the first."""
        tied = torch.nn.Parameter(torch.randn(3, 4))
        model = torch.nn.Module()
        model.first, model.second = tied, tied
        found, header = self.opened(LiveState.of(model=model), tmp_path)
        assert header.aliases == {"model.second": "model.first"}
        assert found["model.first"] == bytes_of(tied)
        assert "model.second" not in found

    def test_strided_and_transposed_tensors_arrive_in_row_major_order(self, tmp_path: Path) -> None:
        """A file has no strides."""
        base = torch.randn(40, 60)
        state = LiveState.of(
            model=Module([("t", base.t()), ("s", base[::2, ::3])]),
            other=Holder({"e": torch.arange(3.0).expand(4, 3)}),
        )
        found, _ = self.opened(state, tmp_path)
        assert found["model.t"] == bytes_of(base.t())
        assert found["model.s"] == bytes_of(base[::2, ::3])
        assert found["other.e"] == bytes_of(torch.arange(3.0).expand(4, 3))

    def test_a_trained_state_is_complete(self, tmp_path: Path) -> None:
        """Parameters, moments, buffers, and the skeleton that joins them, without pickle."""
        model, optimizer = trained()
        state = LiveState.of(model=model, optimizer=optimizer)
        found, _ = self.opened(state, tmp_path)
        for name, tensor in {**state.lazy_tensors(), **state.buffers()}.items():
            assert found[name] == bytes_of(tensor), name
        skeleton = json.loads(found[EXTRA])
        assert set(skeleton) == {"progress", "rng", "optimizers", "modules", "others"}
        (group,) = skeleton["optimizers"]["optimizer"]["groups"]
        names = [f"model.{name}" for name, _ in model.named_parameters()]
        assert group["params"].split("\n") == names
