"""State index and headers -> load plan: pure.

`LoadPlanner` also says whether the headers so far are enough for a plan.  Often the header of the
home shard is enough.  A job of thousands of ranks must not read thousands of headers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autockpt.executors.image.container import ImageHeader
from autockpt.executors.image.layout.boxes import whole
from autockpt.executors.restore.plan.averaging import ReplicaAverage
from autockpt.executors.restore.plan.load_plan import Comparison, LoadPlan, Look, PlannedTensor
from autockpt.executors.restore.plan.moves import Read, lacking, reads_for
from autockpt.executors.restore.plan.numbered import names_by_number
from autockpt.executors.restore.plan.saved_optimizer import SavedOptimizer, add_skeleton
from autockpt.executors.restore.plan.state_index import LiveParameter, StateIndex
from autockpt.executors.restore.plan.stored import Piece, Stored
from autockpt.executors.sharding.local_shard import LocalShard
from autockpt.executors.sharding.rules.plain_tensors import seen_name
from autockpt.executors.sharding.rules.rules import missing_rule
from autockpt.executors.state import state_tree
from autockpt.values.errors import ConfigError


@dataclass(slots=True, kw_only=True)
class CheckpointHeaders:
    """The part of a checkpoint that was read so far: headers, and skeletons where needed."""

    home: int
    """The shard whose private state this rank takes."""
    count: int
    """Shards of the checkpoint."""
    within_reach: int
    """Shards that can be opened and are no replica of another one."""
    world_size: int
    """Ranks that restore."""
    header: ImageHeader
    """The header of the home shard."""
    skeleton: Any
    """The skeleton of the home shard."""
    stored: Stored
    """Tensors of all shards whose headers were read."""
    optimizers: dict[str, SavedOptimizer] = field(default_factory=dict)
    """The attached optimizers as the skeletons describe them, by prefix."""

    @property
    def regrouped(self) -> bool:
        """Another number of ranks wrote the checkpoint."""
        return self.world_size != self.count

    @property
    def partial(self) -> bool:
        """The checkpoint was imported and may leave out a part of the state."""
        return bool(self.skeleton.get("partial"))

    def take_home(self, index: StateIndex) -> None:
        """Reads the home skeleton for this state.

        Raises ConfigError for an attached optimizer that the checkpoint lacks.
        """
        for prefix in index.optimizers:
            if prefix in self.skeleton["optimizers"]:
                self.optimizers[prefix] = SavedOptimizer()
                self.take_skeleton(index, prefix, self.skeleton)
            elif not self.partial:
                raise ConfigError(f"{prefix}: is not in the checkpoint; attach what wrote it")
        if not self.regrouped:
            self._adopt_rules(index)

    def take_skeleton(self, index: StateIndex, prefix: str, skeleton: Any) -> None:
        """Adds what a shard's skeleton says of an optimizer.  Raises CorruptCheckpointError."""
        data = skeleton["optimizers"].get(prefix)
        if data is not None:
            averaged = ReplicaAverage(index.drifting, self.stored, same_mesh=False).called
            live = index.optimizers[prefix]
            called = names_by_number(prefix, data, live, self.stored) or averaged
            add_skeleton(self.optimizers[prefix], data, called)

    def _adopt_rules(self, index: StateIndex) -> None:
        """A shard that this rank saved before there were rules holds the part they say now."""
        live = _Live(index, self).tensors
        placed = {name: tensor for name, tensor in live.items() if tensor.is_placed}
        for name, tensor in placed.items():
            self._adopt(name, tensor.whole_shape, tensor.holding)
        for prefix, saved in self.optimizers.items():
            for name, parameter in index.optimizers[prefix].owned().items():
                if name in placed:
                    for tensor_name in saved.tensors_of(prefix, name):
                        self._adopt(tensor_name, parameter.whole_shape, parameter.state_holding)

    def _adopt(self, name: str, shape: tuple[int, ...], holding: LocalShard) -> None:
        pieces = self.stored.pieces(name)
        if pieces and not pieces[0].declared and pieces[0].shape == shape:
            self.stored.declare(name, holding)


class _Live:
    """The live tensors that a checkpoint is to fill."""

    def __init__(self, index: StateIndex, headers: CheckpointHeaders) -> None:
        self._index, self._headers = index, headers
        skeleton = headers.skeleton
        self.passed = index.passing | set(skeleton.get("passing", ()))
        """Buffers that do not persist, here or in the checkpoint: the forward may make them, or
        make them larger."""
        self.tensors = dict(index.tensors)
        if headers.partial:
            self._leave_out_unsaved()
        self.awaited: dict[str, Look] | None = None
        """See `LoadPlan.awaited`."""
        if skeleton.get("rebuilt") and headers.world_size == headers.count == 1:
            self._leave_out_unbuilt()

    def _leave_out_unsaved(self) -> None:
        """Other systems' files leave out buffers that do not persist, and second names."""
        saved = set(self._headers.stored.names())
        known = {tensor.number for name, tensor in self.tensors.items() if name in saved}
        self.tensors = {
            name: tensor for name, tensor in self.tensors.items()
            if name in saved or not (tensor.number in known or name in self._index.passing)
        }  # fmt: skip

    def _leave_out_unbuilt(self) -> None:
        """Leaves out tensors that the script builds later, or will replace."""
        saved = {n: (p[0].global_shape, p[0].dtype) for n, p in self._of_models().items()}
        live = {
            name: (tensor.holding.global_shape, tensor.dtype)
            for name, tensor in self.tensors.items() if name not in self.passed
        }  # fmt: skip
        groups = all(
            tuple(g.names for g in own.groups) == self._index.optimizers[prefix].groups
            for prefix, own in self._headers.optimizers.items()
        )
        if saved != live or not groups:
            self.awaited = saved
            self.tensors = {
                name: tensor for name, tensor in self.tensors.items()
                if name in self.passed or live[name] == saved.get(name)
            }  # fmt: skip

    def _of_models(self) -> dict[str, list[Piece]]:
        """Stored parameters and persistent buffers, by name."""
        stored = self._headers.stored
        extra = {*state_tree.tensor_names(self._headers.skeleton["modules"])} | self.passed
        prefixes = tuple(f"{prefix}." for prefix in self._index.models)
        names = (n for n in stored.names() if n.startswith(prefixes) and n not in extra)
        return {name: stored.pieces(name) for name in names}


class LoadPlanner:
    """Decides from an index and the headers read so far; make a new one when more were read."""

    def __init__(self, index: StateIndex, headers: CheckpointHeaders) -> None:
        self._index, self._headers, self._stored = index, headers, headers.stored
        self._saved = headers.optimizers
        self.same_mesh = headers.skeleton["progress"].get("mesh", "") == index.mesh
        self._drift = ReplicaAverage(index.drifting, self._stored, same_mesh=self.same_mesh)
        live = _Live(index, headers)
        self._live, self._passed, self._awaited = live.tensors, live.passed, live.awaited
        self._owned = [
            (prefix, name, parameter)
            for prefix in self._saved
            for name, parameter in index.optimizers[prefix].owned().items()
        ]
        self._placed: set[str] = set()

    @property
    def as_it_was(self) -> bool:
        """As many ranks as before divide the model as before."""
        return self.same_mesh and not self._headers.regrouped

    # ------------------------------------------------------------------ is more to be read?

    @cached_property
    def home_suffices(self) -> bool:
        """No other shard is needed.

        Of other ranks than before one shard may lack state that another one has.
        """
        return self._headers.within_reach == 1 or (self.as_it_was and self._home_has_all())

    def _home_has_all(self) -> bool:
        """All that is needed stands in the home shard, byte for byte as this rank holds it."""
        if self._drift:
            return False
        live = self._live.items()
        if not all(self._stands(n, t.holding) or n in self._index.passing for n, t in live):
            return False
        for prefix, saved in self._saved.items():
            if not all(map(saved.knows, self._index.optimizers[prefix].parameters)):
                return False
        return all(self._state_stands(*owned) for owned in self._owned)

    def _state_stands(self, prefix: str, name: str, parameter: LiveParameter) -> bool:
        saved = self._saved[prefix]
        tensors = list(saved.tensors_of(prefix, name))
        if not tensors:
            return not saved.divided
        for tensor in tensors:
            pieces = self._stored.pieces(tensor)
            if not pieces:
                return False
            inside = tensor in saved.parts_of_compounds(name)
            holding, *_ = _state_holding(parameter, pieces[0], inside=inside)
            if not self._stands(tensor, holding):
                return False
        return True

    def _stands(self, name: str, holding: LocalShard) -> bool:
        pieces = self._stored.pieces(name)
        return bool(pieces) and pieces[0].boxes == holding.boxes

    def read_skeletons(self, skeleton_of: Callable[[int], Any]) -> None:
        """Asks other shards for the optimizer state that the skeletons so far lack."""
        for prefix, saved in self._saved.items():
            for name, parameter in self._index.optimizers[prefix].parameters.items():
                found = any(True for _ in saved.tensors_of(prefix, name))
                if (found or not parameter.has_state) and saved.knows(name):
                    continue
                for shard in self._shards_of(prefix, name):
                    self._headers.take_skeleton(self._index, prefix, skeleton_of(shard))

    def _shards_of(self, prefix: str, parameter: str) -> list[int]:
        """Shards that may know a parameter, or have state of it; one of each kind is enough."""
        found = []
        stored = (self._drift.copies(parameter) or [parameter])[0]
        if not self._saved[prefix].knows(parameter):
            found += [piece.shard for piece in self._stored.pieces(stored)[:1]]
        start = f"{prefix}.{stored}."
        with_state = next((n for n in self._stored.names() if n.startswith(start)), None)
        if with_state is not None:
            found += [piece.shard for piece in self._stored.pieces(with_state)[:1]]
        return list(dict.fromkeys(found))

    @property
    def covered(self) -> bool:
        """Every element that is wanted stands in a shard whose header was read.

        No skeleton of another shard can know more of an optimizer, and no shard can hold a copy
        that belongs to a mean.
        """
        if self._drift:
            return False
        for prefix, saved in self._saved.items():
            parameters = self._index.optimizers[prefix].parameters
            if not all(map(saved.knows, parameters)):
                return False
            with_state = [any(True for _ in saved.tensors_of(prefix, n)) for n in parameters]
            if any(with_state) and not all(with_state):
                return False
        return not any(
            lacking(tensor.holding, self._stored.pieces(tensor.name)) for tensor in self._wanted
        )

    @property
    def undeclared(self) -> bool:
        """Some wanted tensor has no declared part, so that several ranks may claim its name."""
        return any(ranks for _, ranks in self._claims().values())

    # ------------------------------------------------------------------ the plan

    def plan(self, *, compare: bool = False) -> LoadPlan:
        """What to copy from where, and everything that does not fit.

        `compare`: what several ranks stored as their own must be equal.
        """
        wanted, compared = self._wanted, self._ambiguous() if compare else ()
        refusals = [one.refusal for one in compared if not one.alike] + self._name_refusals()
        tensors = []
        for tensor in wanted:
            reads: list[tuple[Read, ...]] = []
            try:
                for name in tensor.copies or (tensor.name,):
                    pieces = self._pieces_for(name, tensor.holding)
                    reads.append(reads_for(name, tensor.holding, tensor.dtype, pieces))
            except ConfigError as error:
                refusals.append(str(error))
                reads.clear()
            tensors.append(replace(tensor, reads=tuple(reads)))
        headers, exact = self._headers, self._index.exact
        return LoadPlan(
            home=headers.home,
            tensors=tuple(tensors),
            aliases=headers.header.aliases,
            skeleton=headers.skeleton,
            optimizers=self._saved,
            placed=frozenset(self._placed),
            compared=compared,
            merged=() if self.as_it_was else tuple(range(headers.count)),
            as_built=self._as_built(),
            awaited=self._awaited,
            exact=self.home_suffices and exact and not headers.partial,
            refusals=tuple(refusals),
        )

    def _ambiguous(self) -> tuple[Comparison, ...]:
        """Parameters and their state that several ranks stored as their own.

        Buffers are not among them: running statistics of each rank's own batches are no error, and
        the home shard's are as good as any.
        """
        found = []
        for name, (of, ranks) in self._claims().items():
            if ranks > 1:
                own = tuple(piece for piece in self._stored.pieces(name) if not piece.declared)
                found.append(Comparison(name=name, pieces=own, refusal=_different(of, own)))
        return tuple(found)

    def _claims(self) -> dict[str, tuple[str, int]]:
        """By name (parameter whose state it is, or itself; ranks that stored it as their own)."""
        of = {name: name for name, tensor in self._live.items() if not tensor.is_buffer}
        for prefix, name, _ in self._owned:
            of |= dict.fromkeys(self._saved[prefix].tensors_of(prefix, name), name)
        pieces = {name: self._stored.pieces(name) for name in of}
        return {n: (of[n], sum(not p.declared for p in found)) for n, found in pieces.items()}

    def _pieces_for(self, name: str, holding: LocalShard) -> list[Piece]:
        """The home shard's own come first.

        If other ranks hold the tensor as well, all of them choose the same pieces, so that one rank
        reads for all.
        """
        passing = name in self._index.passing
        pieces = self._alike(name) if passing else self._stored.pieces(name)
        return sorted(pieces, key=lambda p: p.shard) if holding.holders else pieces

    @cached_property
    def _wanted(self) -> list[PlannedTensor]:
        return [*self._wanted_live(), *self._wanted_state(), *self._wanted_private()]

    def _wanted_live(self) -> Iterator[PlannedTensor]:
        """Parameters and buffers, each memory once."""
        places: set[object] = set()
        for name, tensor in self._live.items():
            if self._stays(name) or (tensor.place is not None and tensor.place in places):
                continue
            places.add(tensor.place)
            copies = tuple(self._drift.copies(name))
            yield PlannedTensor(
                name=name, holding=tensor.holding, shape=tensor.shape, dtype=tensor.dtype,
                live=True, in_place=tensor.in_place and not copies, strides=None, copies=copies,
                reads=(),
            )  # fmt: skip

    def _wanted_state(self) -> Iterator[PlannedTensor]:
        """Tensors of optimizer state."""
        for prefix, name, parameter in self._owned:
            inside = self._saved[prefix].parts_of_compounds(name)
            for tensor in self._saved[prefix].tensors_of(prefix, name):
                copies = tuple(self._drift.copies_of_state(prefix, name, tensor))
                pieces = self._stored.pieces(copies[0] if copies else tensor)
                if not pieces:
                    continue  # `apply_state` says what is missing
                is_inside, whole_shape = tensor in inside, parameter.holding.global_shape
                holding, shape, strides = _state_holding(parameter, pieces[0], inside=is_inside)
                if pieces[0].global_shape == whole_shape and not is_inside:
                    self._placed.add(tensor)
                yield PlannedTensor(
                    name=tensor, holding=holding, shape=shape, dtype=pieces[0].dtype, live=False,
                    in_place=False, strides=strides, copies=copies, reads=(),
                )  # fmt: skip

    def _wanted_private(self) -> Iterator[PlannedTensor]:
        """Tensors that the home skeleton refers to, and tensors that have no place yet."""
        for name in dict.fromkeys([*self._private(), *self._later()]):
            pieces = self._stored.pieces(name)
            if pieces and name not in self._live:
                first = pieces[0]
                part = LocalShard(global_shape=first.global_shape, boxes=first.boxes)
                yield PlannedTensor(
                    name=name, holding=part, shape=first.shape, dtype=first.dtype, live=False,
                    in_place=False, strides=None, copies=(), reads=(),
                )  # fmt: skip

    def _private(self) -> list[str]:
        """Names that the home shard's skeleton refers to, beside the state of parameters."""
        skeleton = self._headers.skeleton
        parts = ("progress", "rng", "modules", "others")
        names = [name for part in parts for name in state_tree.tensor_names(skeleton[part])]
        names += state_tree.tensor_names([skeleton.get("own"), skeleton.get("changed")])
        for saved in self._saved.values():
            names += saved.private_tensors()
        return names

    def _later(self) -> list[str]:
        """Names of stored tensors that have no place yet."""
        if self._awaited is None:
            return []
        names = [name for name in self._awaited if name not in self._live]
        owned = {(prefix, name) for prefix, name, _ in self._owned}
        for prefix, saved in self._saved.items():
            for parameter in (p for group in saved.groups for p in group.names):
                if (prefix, parameter) not in owned:
                    names += saved.tensors_of(prefix, parameter)
        return names

    # ------------------------------------------------------------------ what does not fit

    def _alike(self, name: str) -> list[Piece]:
        """Pieces of a buffer that have the form of the live one; none, if the nearest has not."""
        form = self._live[name].holding.global_shape, self._live[name].dtype
        pieces = self._stored.pieces(name)
        alike = [piece for piece in pieces if (piece.global_shape, piece.dtype) == form]
        return alike if alike[:1] == pieces[:1] else []

    def _stays(self, name: str) -> bool:
        """A buffer that was not stored as it is now stays as it was built, where it does not
        persist."""
        if name not in self._index.passing:
            return False
        pieces = self._alike(name)
        return not pieces or bool(lacking(self._live[name].holding, pieces))

    def _as_built(self) -> tuple[str, ...]:
        """Buffers that do not persist and are not what was saved."""
        gone = self._passed - self._live.keys() if self._index.exact else set()
        lost = [name for name in gone if self._stored.pieces(name)]
        return tuple(sorted([*lost, *filter(self._stays, self._live)]))

    def _name_refusals(self) -> list[str]:
        """Tensors that only the state has, or only the checkpoint, by number and first name."""
        if self._awaited is not None:
            return []
        saved, passing, refusals = set(self._stored.names()), self._index.passing, []
        own = (name for name in self._live if not self._drift.copies(name))
        missing = sorted(name for name in own if name not in saved and name not in passing)
        if missing:
            refusals.append(
                f"state: {len(missing)} tensors are not in the checkpoint, first {missing[0]!r}; "
                "the model or optimizer changed since; use --fresh to start over, or the code that "
                "wrote it"
            )
        gone = self._unused(saved) if self._index.exact else []  # else another rank may take it
        if gone:
            refusals.append(
                f"state: the checkpoint has {len(gone)} tensors the model has not, first "
                f"{gone[0]!r}; the model changed since; use --fresh to start over, or the code "
                "that wrote it"
            )
        return refusals

    def _unused(self, saved: set[str]) -> list[str]:
        """Stored tensors of the models that this rank does not take."""
        expected = {name.split(".", 1)[0] for name in self._live if name.startswith("model")}
        lost = {name for name in saved if self._drift.called(name) not in self._live}
        modules = self._headers.skeleton["modules"]
        extra = [modules[path] for path in self._index.extra_states if path in modules]
        others = lost - self._passed - {*state_tree.tensor_names(extra)}
        return sorted(name for name in others if name.split(".", 1)[0] in expected)


def plan_load(index: StateIndex, headers: CheckpointHeaders, *, compare: bool = False) -> LoadPlan:
    """The plan of one rank, from its state and the headers of the shards that it may need."""
    return LoadPlanner(index, headers).plan(compare=compare)


def _different(parameter: str, pieces: Sequence[Piece]) -> str:
    """Why a tensor cannot be put together from copies that differ.

    `parameter`: whose state it is, or the tensor itself.
    """
    shapes: dict[int, Sequence[int]] = {piece.shard: piece.shape for piece in pieces}
    return (
        f"{missing_rule(seen_name(parameter), shapes)}\n"
        "This checkpoint was written without one: resume it on the ranks that wrote it, with "
        "attach(rules=..., axes=...), and save again"
    )


def _state_holding(
    parameter: LiveParameter, piece: Piece, *, inside: bool = False
) -> tuple[LocalShard, tuple[int, ...], tuple[int, ...] | None]:
    """(part, shape here, strides) of optimizer state.

    State in its parameter's form is divided with the parameter, or as its optimizer divides it.
    Other state is whole, as is a tensor inside another one.
    """
    shape = piece.global_shape
    if inside or shape != parameter.holding.global_shape or not shape:
        return LocalShard(global_shape=shape, boxes=(whole(shape),)), shape, None
    return parameter.state_holding, *parameter.state_form
