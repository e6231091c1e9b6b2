"""What this rank needs of a checkpoint: live tensors, their optimizer state, its private rest."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.layout.boxes import whole
from autockpt.executors.linux.restore_allocator import RestoreAllocator
from autockpt.executors.restore.plan.averaging import ReplicaAverage, mean_of
from autockpt.executors.restore.plan.moves import Move, Want, lacking, moves_for
from autockpt.executors.restore.plan.stored import Piece, Stored
from autockpt.executors.restore.saved_optimizer import SavedOptimizer, add_skeleton
from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.sharding.fqns import has_extra_state
from autockpt.executors.sharding.local_memory import own_elements
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.optimizers import held_state
from autockpt.executors.state import state_tree
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.values.errors import ConfigError

Look = tuple[tuple[int, ...], torch.dtype]
"""Shape and type."""

_Form = tuple[tuple[int, ...], tuple[int, ...] | None]
"""Shape, and strides where they are not those of a contiguous tensor."""


@dataclass(frozen=True, slots=True)
class _Wish:
    """One tensor to fill."""

    name: str
    holding: LocalShard
    live: torch.Tensor | None
    """None: in new memory."""
    shape: tuple[int, ...]
    """Of the local tensor, with its padding."""
    dtype: torch.dtype
    copies: Sequence[str] = ()
    """Stored tensors whose mean it is; (): the one of its name."""
    strides: tuple[int, ...] | None = None
    """Of new memory that is not to be contiguous."""

    @property
    def nbytes(self) -> int:
        """New memory that it takes."""
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def in_place(self) -> bool:
        """Bytes go straight to the live tensor."""
        live = self.live
        if live is None or self.copies:
            return False
        return live.device.type == "cpu" and live.is_contiguous()


class Wanted:
    """Built when the home shard's header is known; complete when all that is needed is."""

    def __init__(
        self,
        state: LiveState,
        live: dict[str, torch.Tensor],
        stored: Stored,
        home: ImageHeader,
        skeleton: Any,
        *,
        same_mesh: bool,
        ready: Callable[[int], int] = lambda nbytes: 0,
        later: bool = False,
    ) -> None:
        """`ready`: see `RestoreAllocator`; `later`: the script may build a part in its loop."""
        self._ready = ready
        self._drift = ReplicaAverage(state.drifting, stored, same_mesh=same_mesh)
        self._state = state
        self._live = live
        self._stored = stored
        self._home = home
        self._skeleton = skeleton
        self._holdings: dict[int, LocalShard] = {}
        self._forms: dict[int, _Form] = {}
        """By id of a parameter, of what this rank has of it, with its padding."""
        self.optimizers: dict[str, SavedOptimizer] = {}
        """Of the attached optimizers, by prefix."""
        self.placed: set[str] = set()
        """Optimizer state that is divided as its parameter is."""
        self._fresh: dict[str, torch.Tensor] = {}
        self._late: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        """(tensor, host memory whose mean it is at the end): devices, odd strides, copies."""
        self._covered: list[_Wish] = []
        """All wishes, as they are when everything that is wanted was seen."""
        self._strides: dict[str, tuple[int, ...]] = {}
        """Of those of `_fresh` that get them at the end."""
        self._passing = state.passing_buffers()
        self._passed = self._passing | set(skeleton.get("passing", ()))
        """Buffers that do not persist, here or in the checkpoint: the forward may make them, or
        make them larger."""
        if skeleton.get("partial"):
            self._live = _spoken_of(state, live, stored)
        for prefix in state.optimizers:
            if prefix not in skeleton["optimizers"]:
                if skeleton.get("partial"):
                    continue
                raise ConfigError(f"{prefix}: is not in the checkpoint; attach what wrote it")
            self.optimizers[prefix] = SavedOptimizer()
            own = skeleton["optimizers"][prefix]
            add_skeleton(self.optimizers[prefix], own, self._drift.called)
        self.awaited: dict[str, Look] | None = None
        """See `RestoredState.awaited`."""
        if later:
            self._await_rest()

    def _await_rest(self) -> None:
        """Leaves out what is not there yet, or is and will not be."""
        saved = {n: (p[0].global_shape, p[0].dtype) for n, p in self._of_models().items()}
        live = {n: (self._holding(t).global_shape, t.dtype) for n, t in self._live.items()}
        live = {name: form for name, form in live.items() if name not in self._passed}
        groups = all(
            [g.names for g in self.optimizers[prefix].groups] == names
            for prefix, names in self._grouped().items()
        )
        if saved != live or not groups:
            self.awaited = saved
            self._live = {
                name: tensor
                for name, tensor in self._live.items()
                if name in self._passed or live[name] == saved.get(name)
            }

    def _of_models(self) -> dict[str, list[Piece]]:
        """Stored parameters and persistent buffers, by name."""
        extra = {*state_tree.tensor_names(self._skeleton["modules"])} | self._passed
        prefixes = {f"{prefix}." for prefix in self._state.models}
        names = (n for n in self._stored.names() if any(map(n.startswith, prefixes)))
        return {name: self._stored.pieces(name) for name in names if name not in extra}

    def _grouped(self) -> dict[str, list[tuple[str, ...]]]:
        """Live parameters of each group, by optimizer."""
        name = self._state.name_of
        return {
            prefix: [
                tuple(map(name, group["params"]))
                for group in self._state.optimizers[prefix].param_groups
            ]
            for prefix in self.optimizers
        }

    def _later(self) -> list[str]:
        """Names of stored tensors that have no place yet."""
        if self.awaited is None:
            return []
        names = [name for name in self.awaited if name not in self._live]
        owned = {(prefix, name) for prefix, name, _ in self._owned}
        for prefix, saved in self.optimizers.items():
            for parameter in (p for group in saved.groups for p in group.names):
                if (prefix, parameter) not in owned:
                    names += saved.tensors_of(prefix, parameter)
        return names

    def _holding(self, tensor: torch.Tensor) -> LocalShard:
        """Of a live tensor, asked for once."""
        found = self._holdings.get(id(tensor))
        if found is None:
            found = self._holdings[id(tensor)] = self._state.holding(tensor)
        return found

    def adopt(self) -> None:
        """What this very rank saved before there were rules is the part that they say now."""
        placed = {n: t for n, t in self._live.items() if self._state.is_placed(t)}
        for name, parameter in placed.items():
            self._adopt(name, parameter, self._holding(parameter))
        for prefix, name, parameter in self._owned:
            if name in placed:
                own = self._holding(parameter)
                held = held_state(self._state.optimizers[prefix], parameter, own)
                for tensor in self.optimizers[prefix].tensors_of(prefix, name):
                    self._adopt(tensor, parameter, held)

    def _adopt(self, name: str, parameter: torch.Tensor, holding: LocalShard) -> None:
        pieces = self._stored.pieces(name)
        if pieces and not pieces[0].declared and pieces[0].shape == tuple(parameter.shape):
            self._stored.declare(name, holding)

    # ------------------------------------------------------------------ does home suffice?

    @property
    def suffices(self) -> bool:
        """All that is needed stands in the home shard, byte for byte as this rank holds it."""
        if self._drift:
            return False
        live = ((name, self._holding(tensor)) for name, tensor in self._live.items())
        if not all(self._stands(name, own) or name in self._passing for name, own in live):
            return False
        for prefix, parameters in self._parameters:
            if not all(self.optimizers[prefix].knows(name) for name in parameters):
                return False
        return all(self._state_stands(*owned) for owned in self._owned)

    def _state_stands(self, prefix: str, name: str, parameter: torch.Tensor) -> bool:
        saved = self.optimizers[prefix]
        tensors = list(saved.tensors_of(prefix, name))
        if not tensors:
            return not saved.divided
        for tensor in tensors:
            pieces = self._stored.pieces(tensor)
            if not pieces:
                return False
            holding, *_ = self._state_holding(prefix, parameter, pieces[0])
            if not self._stands(tensor, holding):
                return False
        return True

    def _stands(self, name: str, holding: LocalShard) -> bool:
        pieces = self._stored.pieces(name)
        return bool(pieces) and pieces[0].boxes == holding.boxes

    def _alike(self, name: str) -> list[Piece]:
        """Pieces of a buffer that have the form of the live one; none, if the nearest has not."""
        form = self._holding(self._live[name]).global_shape, self._live[name].dtype
        pieces = self._stored.pieces(name)
        alike = [piece for piece in pieces if (piece.global_shape, piece.dtype) == form]
        return alike if alike[:1] == pieces[:1] else []

    def _stays(self, name: str) -> bool:
        """A buffer that was not stored as it is now stays as it was built, where it does not
        persist."""
        if name not in self._passing:
            return False
        pieces = self._alike(name)
        return not pieces or bool(lacking(self._holding(self._live[name]), pieces))

    def as_built(self, *, exact: bool) -> list[str]:
        """Buffers that do not persist and are not what was saved; `exact`: see `moves`."""
        gone = (name for name in self._passed if exact and name not in self._live)
        lost = [name for name in gone if self._stored.pieces(name)]
        return sorted([*lost, *filter(self._stays, self._live)])

    @cached_property
    def _parameters(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        """(prefix, parameters by name) of every optimizer."""
        found = []
        for prefix in self.optimizers:
            groups = self._state.optimizers[prefix].param_groups
            named = {self._state.name_of(p): p for group in groups for p in group["params"]}
            found.append((prefix, named))
        return found

    @cached_property
    def _owned(self) -> list[tuple[str, str, torch.Tensor]]:
        """(prefix, name, parameter) of those whose optimizer state this rank has."""
        return [
            (prefix, name, parameter)
            for prefix, parameters in self._parameters
            for name, parameter in parameters.items()
            if self._state.has_state(self._state.optimizers[prefix], parameter)
        ]

    def _state_holding(
        self, prefix: str, parameter: torch.Tensor, piece: Piece
    ) -> tuple[LocalShard, *_Form]:
        """(part, shape here, strides) of optimizer state: in its parameter's form it is divided
        with it, or as its optimizer divides it; the rest is as it was."""
        shape, own = piece.global_shape, self._holding(parameter)
        if shape != own.global_shape or not shape:
            return LocalShard(global_shape=shape, boxes=(whole(shape),)), shape, None
        optimizer = self._state.optimizers[prefix]
        holding = held_state(optimizer, parameter, own)
        if isinstance(optimizer, ZeroView):
            return holding, (holding.count,), None
        # Of nothing, too: no rows of 6 elements are no row of no elements.
        form = self._forms.get(id(parameter))
        if form is None:
            form = self._forms[id(parameter)] = _form_of(local_part(parameter))
        return holding, *form

    # ------------------------------------------------------------------ other shards

    def complete(self, skeleton_of: Callable[[int], Any]) -> None:
        """Reads the skeletons of other shards for what the home shard does not know."""
        self._covered = []
        for prefix, parameters in self._parameters:
            saved, optimizer = self.optimizers[prefix], self._state.optimizers[prefix]
            for name, parameter in parameters.items():
                found = any(True for _ in saved.tensors_of(prefix, name))
                found = found or not self._state.has_state(optimizer, parameter)
                if found and saved.knows(name):
                    continue
                for shard in self._shards_of(prefix, name):
                    other = skeleton_of(shard)["optimizers"].get(prefix)
                    if other is not None:
                        add_skeleton(saved, other, self._drift.called)

    def _shards_of(self, prefix: str, parameter: str) -> list[int]:
        """Shards that may know a parameter, or have state of it; one of each kind is enough."""
        saved, found = self.optimizers[prefix], []
        stored = (self._drift.copies(parameter) or [parameter])[0]
        if not saved.knows(parameter):
            found += [piece.shard for piece in self._stored.pieces(stored)[:1]]
        start = f"{prefix}.{stored}."
        with_state = (n for n in self._stored.names() if n.startswith(start))
        for name in with_state:
            found += [piece.shard for piece in self._stored.pieces(name)[:1]]
            break
        return list(dict.fromkeys(found))

    @property
    def covered(self) -> bool:
        """Every element of all that is wanted stands in a shard that was read, and no skeleton of
        another can know more of an optimizer, or hold a copy that belongs to a mean."""
        if self._drift:
            return False
        for prefix, parameters in self._parameters:
            saved = self.optimizers[prefix]
            if not all(saved.knows(name) for name in parameters):
                return False
            with_state = [any(True for _ in saved.tensors_of(prefix, n)) for n in parameters]
            if any(with_state) and not all(with_state):
                return False
        wishes = list(self._wishes())
        if any(lacking(wish.holding, self._stored.pieces(wish.name)) for wish in wishes):
            return False
        self._covered = wishes
        return True

    # ------------------------------------------------------------------ the plan

    def moves(self, *, exact: bool) -> list[Move]:
        """What to copy from where.

        `exact`: what this rank does not take nobody takes, so that the checkpoint must name what is
        alive and nothing else.  Raises ConfigError when checkpoint and live state do not fit.
        """
        self._require_names(exact)
        self._fresh.clear()
        self._late.clear()
        self._strides.clear()
        wishes = self._covered or list(self._wishes())
        new = [wish for wish in wishes if not wish.in_place]
        sizes = [wish.nbytes for wish in new for _ in wish.copies or ("",)]
        memory = RestoreAllocator(sizes, self._ready)
        wants = [want for wish in wishes for want in self._wants(wish, memory)]
        return [move for want in wants for move in moves_for(want, self._pieces_for(want))]

    def ambiguous(self) -> dict[str, str]:
        """By name the parameter, of parameters and their state that several ranks stored as their
        own.

        Buffers are not among them: running statistics of each rank's own batches are no error, and
        the home shard's are as good as any.
        """
        return {name: of for name, (of, ranks) in self._claims().items() if ranks > 1}

    @property
    def undeclared(self) -> bool:
        """Nobody knew of something wanted which part of what it is: others may claim it too."""
        return any(ranks for _, ranks in self._claims().values())

    def _claims(self) -> dict[str, tuple[str, int]]:
        """By name (parameter whose state it is, or itself; ranks that stored it as their own)."""
        buffers = self._state.buffers()
        of = {name: name for name in self._live if name not in buffers}
        for prefix, name, _ in self._owned:
            of |= dict.fromkeys(self.optimizers[prefix].tensors_of(prefix, name), name)
        pieces = {name: self._stored.pieces(name) for name in of}
        return {n: (of[n], sum(not p.declared for p in found)) for n, found in pieces.items()}

    def _pieces_for(self, want: Want) -> list[Piece]:
        """The home shard's own first; of what others hold as well all of them choose the same
        pieces, so that one of them reads for all."""
        passing = want.name in self._passing
        pieces = self._alike(want.name) if passing else self._stored.pieces(want.name)
        return sorted(pieces, key=lambda p: p.shard) if want.holding.holders else pieces

    def _wishes(self) -> Iterator[_Wish]:
        """Everything to fill, each memory once."""
        places: set[tuple[object, ...]] = set()
        for name, tensor in self._live.items():
            if self._stays(name):
                continue
            holding = self._holding(tensor)
            local = local_part(tensor, holding).detach()
            place = (local.data_ptr(), tuple(local.shape), local.stride(), local.dtype)
            if local.numel() and place in places:
                continue
            places.add(place)
            copies = self._drift.copies(name)
            yield _Wish(name, holding, local, tuple(local.shape), local.dtype, copies)
        yield from self._optimizer_wishes()
        for name in dict.fromkeys([*self._private(), *self._later()]):
            pieces = self._stored.pieces(name)
            if pieces and name not in self._live:
                part = LocalShard(global_shape=pieces[0].global_shape, boxes=pieces[0].boxes)
                yield _Wish(name, part, None, pieces[0].shape, pieces[0].dtype)

    def _optimizer_wishes(self) -> Iterator[_Wish]:
        for prefix, name, parameter in self._owned:
            for tensor in self.optimizers[prefix].tensors_of(prefix, name):
                copies = self._drift.copies_of_state(prefix, name, tensor)
                pieces = self._stored.pieces(copies[0] if copies else tensor)
                if not pieces:
                    continue  # whoever puts the state together says what is missing
                holding, shape, strides = self._state_holding(prefix, parameter, pieces[0])
                if pieces[0].global_shape == self._holding(parameter).global_shape:
                    self.placed.add(tensor)
                yield _Wish(tensor, holding, None, shape, pieces[0].dtype, copies, strides)

    def _private(self) -> list[str]:
        """Names that the home shard's skeleton refers to, beside the state of parameters."""
        parts = ("progress", "rng", "modules", "others")
        names = [name for part in parts for name in state_tree.tensor_names(self._skeleton[part])]
        names += state_tree.tensor_names(self._skeleton.get("own"))
        for saved in self.optimizers.values():
            names += saved.private_tensors()
        return list(dict.fromkeys(names))

    def _wants(self, wish: _Wish, memory: RestoreAllocator) -> list[Want]:
        """Where the bytes of a wish go first; `finish` does the rest."""
        if wish.live is not None and wish.in_place:
            return [Want(name=wish.name, holding=wish.holding, memory=wish.live)]
        names = wish.copies or [wish.name]
        own = [_new(wish, memory) for _ in names]
        if wish.live is None:
            self._fresh[wish.name] = own[0]
            if wish.strides is not None:
                self._strides[wish.name] = wish.strides
        if wish.live is not None or wish.copies:
            self._late.append((own[0] if wish.live is None else wish.live, own))
        parts = [own_elements(tensor, wish.holding) for tensor in own]
        wants = zip(names, parts, strict=True)
        return [Want(name=n, holding=wish.holding, memory=part) for n, part in wants]

    def finish(self) -> dict[str, torch.Tensor]:
        """Everything was put: fills devices; the tensors without a live one, by all their names."""
        for tensor, copies in self._late:
            _fill(tensor, mean_of(copies))
        self._late.clear()
        for name, strides in self._strides.items():
            tensor = self._fresh[name]
            self._fresh[name] = tensor.as_strided(tensor.shape, strides).copy_(tensor.clone())
        self._strides.clear()
        for alias, original in self._home.aliases.items():
            if alias in self._fresh and original in self._fresh:
                self._fresh[alias] = self._fresh[original]  # they shared memory, and do so again
        return self._fresh

    # ------------------------------------------------------------------ names

    def _require_names(self, exact: bool) -> None:
        if self.awaited is not None:
            return
        saved = set(self._stored.names())
        own = (name for name in self._live if not self._drift.copies(name))
        missing = sorted(name for name in own if name not in saved and name not in self._passing)
        if missing:
            raise ConfigError(
                f"state: {len(missing)} tensors are not in the checkpoint, first {missing[0]!r}; "
                "the model or optimizer changed since; use --fresh to start over, or the code that "
                "wrote it"
            )
        if not exact:
            return  # what this rank does not take may be another's
        expected = {name.split(".", 1)[0] for name in self._live if name.startswith("model")}
        lost = (name for name in saved if self._drift.called(name) not in self._live)
        modules = self._skeleton["modules"]
        extra = [
            modules[path]
            for path, module in self._state.extra_places().items()
            if path in modules and has_extra_state(module)
        ]
        others = {*lost} - self._passed - {*state_tree.tensor_names(extra)}
        gone = sorted(name for name in others if name.split(".", 1)[0] in expected)
        if gone:
            raise ConfigError(
                f"state: the checkpoint has {len(gone)} tensors the model has not, first "
                f"{gone[0]!r}; the model changed since; use --fresh to start over, or the code "
                "that wrote it"
            )


def _spoken_of(
    state: LiveState, live: dict[str, torch.Tensor], stored: Stored
) -> dict[str, torch.Tensor]:
    """Without what the files of others leave out: buffers that do not persist, second names."""
    saved = set(stored.names())
    known = {id(tensor) for name, tensor in live.items() if name in saved}
    passing = state.passing_buffers()
    return {n: t for n, t in live.items() if n in saved or not (id(t) in known or n in passing)}


def _fill(tensor: torch.Tensor, saved: torch.Tensor) -> None:
    """Copies; of what an expanded tensor shows again and again once.

    Raises ConfigError when what was saved is not the same again and again.
    """
    once, rest = tensor, saved
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            once, rest = once.narrow(dim, 0, 1), rest.narrow(dim, 0, 1)
    if once is not tensor:
        again = rest.expand(saved.shape).contiguous()
        if not torch.equal(again.view(-1).view(torch.uint8), saved.view(-1).view(torch.uint8)):
            raise ConfigError(
                f"state: a tensor of {tuple(saved.shape)} is expanded now and was not in the "
                "checkpoint; build it with memory of its own (clone())"
            )
    once.copy_(rest)


def _form_of(local: torch.Tensor) -> _Form:
    """Of the state of a parameter, as torch's optimizers make it: with its memory format.

    A fused step walks through the memory of both and does not look at strides.
    """
    shape = tuple(local.shape)
    # Not `is_contiguous`, which does not look at dimensions of one element.
    plain = torch.empty(shape, device="meta").stride()
    strides = torch.empty_like(torch.empty_strided(shape, local.stride(), device="meta")).stride()
    return shape, None if strides == plain else strides


def _new(wish: _Wish, memory: RestoreAllocator) -> torch.Tensor:
    """Memory of the form of a wish."""
    tensor = memory.tensor(wish.shape, wish.dtype)
    if tensor.numel() != wish.holding.count:
        tensor.zero_()  # what pads it is in no checkpoint
    return tensor
