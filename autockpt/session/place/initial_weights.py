"""Weights for a training that begins: taken from another run or from a file of weights.

Only a training without a checkpoint of its own takes them; a restart goes on from its checkpoint.
Each rank reads its own part of each tensor.  All names and shapes are compared before the first
byte is written.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from autockpt.executors.sharding.adapters.zero_optimizer import ZeroView
from autockpt.executors.state.live_state import LiveState, local_part
from autockpt.executors.storage.directory.records import lossy_notice
from autockpt.integrations.formats.tree.lazy_tree import LazyTensor, leaves
from autockpt.integrations.formats.tree.loading import opened
from autockpt.values.errors import ConfigError

USUAL_PLACES = ("model", "state_dict", "model_state_dict")
"""Where files of other programs keep the weights."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DDP and torch.compile put in front of every name."""
EXTRA_STATE = "_extra_state"
"""Torch's name for what modules save beside tensors of their own; it is not loaded."""
NAMED = 3
"""Names in a message."""


@dataclass(frozen=True, slots=True)
class InitialWeights:
    """The wish of `attach(load=..., missing=..., exclude=...)`."""

    sources: Mapping[str, str]
    """By the name of an attached model a run, a checkpoint or a file of weights."""
    missing: str = "error"
    """error: both sides have the same names; ok: a tensor without a partner stays as it is."""
    exclude: Sequence[str] = ()
    """Patterns of names that are not loaded, such as `head.*`."""

    @classmethod
    def checked(cls, load: Any, missing: Any, exclude: Any) -> "InitialWeights | None":
        """The wish as a script wrote it; None: there is none.  Raises ConfigError."""
        if missing not in ("error", "ok"):
            raise ConfigError(f'attach(missing=...): got {missing!r}; expected "error" or "ok"')
        patterns = [exclude] if isinstance(exclude, str) else exclude
        if isinstance(patterns, Mapping) or not all(isinstance(one, str) for one in patterns):
            raise ConfigError(
                f"attach(exclude=...): got {exclude!r:.80}; expected patterns of names, e.g. "
                '["head.*"]'
            )
        if load is None:
            if patterns or missing == "ok":
                raise ConfigError("attach(missing=..., exclude=...): nothing to load; add load=...")
            return None
        if not isinstance(load, Mapping) or not load:
            raise ConfigError(
                f"attach(load=...): got {load!r:.80}; expected a dict by model, e.g. "
                '{"model": "runs/pretrained"}'
            )
        return cls({str(k): str(v) for k, v in load.items()}, missing, tuple(patterns))

    def apply(self, live: LiveState) -> tuple[str, ...]:
        """Fills the models; a sentence about each.

        Raises ConfigError where names or shapes do not fit (nothing is written then), and
        CorruptCheckpointError for damage.
        """
        if any(isinstance(one, ZeroView) for one in live.optimizers.values()):
            raise ConfigError(
                "attach(load=...): DeepSpeed's optimizer has copies of the parameters already; "
                "load the weights before deepspeed.initialize(...)"
            )
        wanted = {_attached(live, name): source for name, source in self.sources.items()}
        with contextlib.ExitStack() as sources:  # all are compared before one is written
            fills = [self._fill(live, *each, sources) for each in wanted.items()]
            with torch.no_grad():
                for targets, pairs, _ in fills:
                    for name, tensor in pairs.items():
                        _put(live, targets[name], tensor)
        live.refresh()
        return tuple(notice for _, _, notice in fills)

    def _fill(
        self, live: LiveState, model: str, source: str, sources: contextlib.ExitStack
    ) -> tuple[dict[str, torch.Tensor], dict[str, LazyTensor], str]:
        """(tensors of the model, their sources, a sentence), by name.  Raises ConfigError."""
        targets, passing = self._targets(live, model)
        found = sources.enter_context(opened(source))
        stored = {
            name: tensor
            for name, tensor in weights_in(found.tree, model, where=source).items()
            if not (self._is_excluded(name) or name in passing or EXTRA_STATE in name)
        }
        pairs = {name: stored[name] for name in targets if name in stored}
        filled = {id(targets[name]) for name in pairs}  # a tied tensor has several names
        lacking = [n for n in targets if n not in stored and id(targets[n]) not in filled]
        unused = [name for name in stored if name not in targets]
        self._require_fit(live, model, source, targets, pairs, lacking, unused)
        notice = f"{model}: {len(pairs)} tensors are loaded from {source}"
        if lacking:
            notice += f"; {len(lacking)} stay as they are ({_some(lacking)})"
        if unused:
            notice += f"; {len(unused)} of the source are not used ({_some(unused)})"
        notice += f"; {lossy_notice(source, found.lossy)}" if found.lossy else ""
        return targets, pairs, notice

    def _targets(
        self, live: LiveState, model: str
    ) -> tuple[dict[str, torch.Tensor], frozenset[str]]:
        """(tensors of a model that a state dict has, names of buffers that it leaves out)."""
        inner = tuple(f"{name}." for name in live.models if name.startswith(f"{model}."))
        own = {**live.parameters(), **live.buffers()}
        named = {
            name.removeprefix(f"{model}."): (name, tensor)
            for name, tensor in own.items()
            if name.startswith(f"{model}.") and not name.startswith(inner)
        }
        passing = live.passing_buffers()
        left_out = frozenset(short for short, (name, _) in named.items() if name in passing)
        targets = {
            short: tensor
            for short, (_, tensor) in named.items()
            if short not in left_out and not self._is_excluded(short)
        }
        return targets, left_out

    def _is_excluded(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def _require_fit(
        self,
        live: LiveState,
        model: str,
        source: str,
        targets: Mapping[str, torch.Tensor],
        pairs: Mapping[str, LazyTensor],
        lacking: Sequence[str],
        unused: Sequence[str],
    ) -> None:
        """Raises ConfigError."""
        where = f"attach(load={{{model!r}: {source!r}}})"
        for name, tensor in pairs.items():
            expected = live.holding(targets[name]).global_shape
            if tensor.shape != expected:
                raise ConfigError(
                    f"{where}: {name} is {tuple(tensor.shape)} there and {tuple(expected)} here; "
                    f"leave it out with exclude=[{name!r}]"
                )
        if not pairs:
            raise ConfigError(
                f"{where}: no name fits; the model has {_some([*targets])}, the source has "
                f"{_some(unused)}"
            )
        if self.missing == "ok" or not (lacking or unused):
            return
        lines = [f"{len(lacking)} tensors are not there ({_some(lacking)})"] if lacking else []
        if unused:
            lines.append(f"{len(unused)} of the source have no place ({_some(unused)})")
        raise ConfigError(f'{where}: {" and ".join(lines)}; say missing="ok", or exclude=[...]')


def _attached(live: LiveState, name: str) -> str:
    """The name under which a model is attached.  Raises ConfigError."""
    for known in (name, f"model.{name}"):
        if known in live.models:
            return known
    raise ConfigError(
        f"attach(load={{{name!r}: ...}}): no model is attached by this name; attached are "
        f"{', '.join(live.models)}"
    )


def weights_in(tree: Mapping[str, Any], model: str, *, where: str) -> dict[str, LazyTensor]:
    """The weights of one model in a checkpoint of any program, by the names of the module.

    Raises ConfigError where there are none.
    """
    model = model.removeprefix("model.")  # one of several that were attached as a dict
    if model != "model" and isinstance(tree.get("model"), Mapping):
        own = {k: v for k, v in _named(tree["model"]).items() if k.startswith(f"{model}.")}
        if own:
            return {name.removeprefix(f"{model}."): tensor for name, tensor in own.items()}
    places = [tree[name] for name in (model, *USUAL_PLACES) if isinstance(tree.get(name), Mapping)]
    found = _named(places[0] if places else tree)
    if not found:
        raise ConfigError(f"{where}: holds no weights; it has {_some([*map(str, tree)])}")
    for wrapper in WRAPPERS:
        if all(name.startswith(wrapper) for name in found):
            found = {name.removeprefix(wrapper): tensor for name, tensor in found.items()}
    return found


def _named(tree: Mapping[str, Any]) -> dict[str, LazyTensor]:
    """The tensors of a tree by their paths with dots."""
    tensors = ((path, leaf) for path, leaf in leaves(tree) if isinstance(leaf, LazyTensor))
    return {".".join(map(str, path)): leaf for path, leaf in tensors}


def _put(live: LiveState, target: torch.Tensor, stored: LazyTensor) -> None:
    """Reads this rank's part of a tensor."""
    holding = live.holding(target)
    local = local_part(target, holding)
    if not holding.boxes:
        return
    if len(holding.boxes) == 1:
        local.copy_(stored.part(holding.boxes[0]).reshape(local.shape))
        return
    parts = [stored.part(box).reshape(-1) for box in holding.boxes]
    local.copy_(torch.cat(parts).view(local.shape))


def _some(names: Sequence[str]) -> str:
    """The first few."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more if names else "none"
