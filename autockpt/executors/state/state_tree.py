"""State <-> (JSON skeleton, tensors): a closed set of types and no pickle.

A skeleton is JSON in which every value that JSON lacks is an object with one key that starts with
"$".  Tensors are replaced by {"$tensor": name} and travel as bytes of the image.  An object outside
the set is an error that names its place, found at attach by a dry encoding.
"""

import base64
import enum
import math
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from autockpt.executors.image.tensor_references import MARKS
from autockpt.executors.image.tensor_references import tensor_names as tensor_names
from autockpt.values.errors import ConfigError, CorruptCheckpointError

MAX_DEPTH = 32
_JSON_DEPTH = 4 * MAX_DEPTH
"""A level of state takes up to three of JSON ({"$dict": [[key, value]]}); a few stand around."""

Skeleton = Any
"""JSON data."""

_EXACT_INT = 2**53
_FACTORIES: tuple[type, ...] = (list, int, float, dict, set, str, tuple)
_DICTS: dict[str, Callable[[], dict[Any, Any]]] = {
    "$ordered": OrderedDict,
    "$counter": Counter,
    "$defaultdict:": defaultdict,
    **{f"$defaultdict:{kind.__name__}": partial(defaultdict, kind) for kind in _FACTORIES},
}
"""By mark an empty dict of its kind.  A defaultdict that calls anything else, and other kinds of
dicts, are saved as plain dicts."""


def encode(value: Any, path: str, tensors: dict[str, torch.Tensor], depth: int = 0) -> Skeleton:
    """The skeleton of `value`; its tensors are added to `tensors` under dotted paths.

    Raises ConfigError naming `path` and the way out for anything outside the closed set.
    """
    if depth > MAX_DEPTH:
        raise ConfigError(f"{path}: nested deeper than {MAX_DEPTH}; flatten this state")
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < _EXACT_INT else {"$int": hex(value)}  # no limit of digits
    if kind is float:
        return value if math.isfinite(value) else {"$float": _nan_bits(value) or repr(value)}
    if isinstance(value, torch.Tensor):
        compound = compound_of(value)
        if compound is not None:
            return _encode_compound(compound, path, tensors, depth)
        return _encode_tensor(value, path, tensors)
    if isinstance(value, dict):
        return _encode_dict(value, path, tensors, depth)
    if kind is list or kind is tuple:
        items = [encode(v, f"{path}.{i}", tensors, depth + 1) for i, v in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is deque:
        items = [encode(v, f"{path}.{i}", tensors, depth + 1) for i, v in enumerate(value)]
        return {"$deque": [value.maxlen, items]}
    if isinstance(value, enum.Enum):
        return {"$enum": [_class_name(value, path), _member(value)]}
    scalar = _encode_scalar(value)
    if scalar is not None:
        return scalar
    if kind is np.ndarray and value.dtype.kind in "biufc":
        return {"$array": _encode_array(value, path, tensors)}
    raise ConfigError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved safely. "
        "Give its owner a state_dict()/load_state_dict() of tensors, numbers, strings, lists and "
        "dicts, or leave it out of autockpt.attach()"
    )


def decode(
    skeleton: Skeleton,
    tensors: dict[str, torch.Tensor],
    device: torch.device | None = None,
    *,
    to_train: bool = False,
) -> Any:
    """The value of a skeleton; tensors that lived on an accelerator go to `device`, each once.

    `to_train`: raises ConfigError where a class was not imported.  Else the parts of a compound and
    the name of an enum's member stand in its place.

    Raises CorruptCheckpointError for unknown marks and for anything else that `encode` does not
    write.
    """
    if to_train:
        for kind in _classes(skeleton):
            if _imported(kind, object) is None:
                raise ConfigError(
                    f"the saved state has a {str(kind).replace(':', '.')}, which the script has "
                    "not imported; import it before autockpt.attach()"
                )
    moved: dict[int, torch.Tensor] = {}

    def place(tensor: torch.Tensor) -> torch.Tensor:
        if device is None:
            return tensor
        if id(tensor) not in moved:
            moved[id(tensor)] = tensor.to(device)
        return moved[id(tensor)]

    try:
        return _decode(skeleton, tensors, place)
    except (
        ValueError, TypeError, LookupError, RuntimeError, OverflowError, AttributeError,
        AssertionError,
    ) as error:  # fmt: skip
        raise CorruptCheckpointError(f"saved state is malformed: {error!r:.200}") from None


class StandIns(dict[str, torch.Tensor]):
    """Has an empty tensor under every name, to check a skeleton without its tensors."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: str) -> torch.Tensor:
        return torch.empty(0, dtype=torch.float32, device="cpu")


def compound_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor, or the local part of a DTensor, if it is a compound; else None.

    A compound has no memory of its own, and the tensors in it have: quantized tensors of torchao.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return None
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    is_compound = hasattr(local, "__tensor_flatten__") and local.layout == torch.strided
    # A DTensor in a DTensor has its own rules; a pending result of a collective must be waited for.
    is_other = hasattr(local, "to_local") or hasattr(local, "trigger_wait")
    return local if is_compound and not is_other else None


def parts_of(path: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each that has memory: itself under `path`, or the parts of a compound."""
    compound: Any = compound_of(tensor)
    if compound is None:
        yield path, tensor
        return
    for name in compound.__tensor_flatten__()[0]:
        yield from parts_of(f"{path}.{name}", getattr(compound, name))


_Place = Callable[[torch.Tensor], torch.Tensor]
"""Where a tensor that lived on an accelerator goes."""


def _decode(skeleton: Skeleton, tensors: dict[str, torch.Tensor], place: _Place) -> Any:
    if isinstance(skeleton, list):
        return [_decode(item, tensors, place) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    if len(skeleton) == 1:
        (key, inner), *_ = skeleton.items()
        if key.startswith("$"):
            return _decode_mark(key, inner, tensors, place)
    return {key: _decode(item, tensors, place) for key, item in skeleton.items()}


def _classes(skeleton: Skeleton) -> Iterator[Any]:
    """Names of the classes that a skeleton refers to."""
    if isinstance(skeleton, list):
        for item in skeleton:
            yield from _classes(item)
    elif isinstance(skeleton, dict):
        if isinstance(compound := skeleton.get("$compound"), dict) and len(skeleton) == 1:
            yield compound.get("class")
        if isinstance(member := skeleton.get("$enum"), list) and len(skeleton) == 1:
            yield from member[:1]
        for item in skeleton.values():
            yield from _classes(item)


def compound_names(skeleton: Skeleton) -> set[str]:
    """Names of the tensors that are parts of compounds."""
    if isinstance(skeleton, list):
        return {name for item in skeleton for name in compound_names(item)}
    if not isinstance(skeleton, dict):
        return set()
    if set(skeleton) == {"$compound"}:
        return set(tensor_names(skeleton))
    return {name for item in skeleton.values() for name in compound_names(item)}


def has_name(value: enum.Enum) -> bool:
    """A restart finds the class of a member."""
    kind = type(value)
    return _imported(f"{kind.__module__}:{kind.__qualname__}", kind) is kind


def is_shallow(skeleton: Skeleton) -> bool:
    """Whether a recursive walk of the skeleton fits the stack: `encode` made it."""
    level, depth = [skeleton], 0
    while level and depth <= _JSON_DEPTH:
        nodes = [node for node in level if isinstance(node, dict | list)]
        level = [
            child for node in nodes for child in (node.values() if isinstance(node, dict) else node)
        ]
        depth += 1
    return not level


def _encode_tensor(value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor]) -> Skeleton:
    if value.layout != torch.strided or value.is_quantized or value.is_meta:
        raise ConfigError(
            f"{path}: a {value.layout} tensor on {value.device} cannot be saved; keep dense "
            "tensors in the state, or convert it in state_dict()"
        )
    if path in tensors:
        raise ConfigError(
            f"{path}: two tensors of the state have this name. Rename a key (a dot in a key and a "
            "nested key, or a number and its text, read the same)"
        )
    tensors[path] = value.detach()
    return {"$tensor" if value.device.type == "cpu" else "$device_tensor": path}


def _encode_compound(
    value: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], depth: int
) -> Skeleton:
    """Its class, form and parts, as torch takes it apart for a compiler."""
    names, form = value.__tensor_flatten__()  # type: ignore[attr-defined]
    in_form: dict[str, torch.Tensor] = {}
    made = {
        "class": _class_name(value, path),
        "parts": {n: encode(getattr(value, n), f"{path}.{n}", tensors, depth + 1) for n in names},
        "form": encode(form, f"{path}.<form>", in_form, depth + 1),
        "shape": list(value.shape),
        "stride": list(value.stride()),
    }
    if not all(type(size) is int for size in (*made["shape"], *made["stride"])):
        raise ConfigError(f"{path}: a {type(value).__qualname__} of sizes that change is not saved")
    if in_form:
        raise ConfigError(f"{path}: a {type(value).__qualname__} describes itself with a tensor")
    return {"$compound": made}


def _decode_compound(
    inner: Any, tensors: dict[str, torch.Tensor], place: _Place
) -> torch.Tensor | dict[str, Any]:
    """The tensor; its parts by name where this process has not imported its class."""
    parts = {str(name): _decode(part, tensors, place) for name, part in inner["parts"].items()}
    form = _decode(inner["form"], tensors, place)
    kind = _imported(inner["class"], torch.Tensor)
    if not hasattr(kind, "__tensor_unflatten__") or isinstance(tensors, StandIns):
        return parts
    shape, stride = torch.Size(inner["shape"]), tuple(map(int, inner["stride"]))
    return kind.__tensor_unflatten__(parts, form, shape, stride)  # type: ignore[no-any-return]


def _class_name(value: Any, path: str) -> str:
    """Raises ConfigError for a class that has no place in a module: a restart cannot find it."""
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _imported(name, kind) is not kind:
        raise ConfigError(
            f"{path}: the class of a {name.replace(':', '.')} cannot be found by its name; define "
            "it at the top of a module"
        )
    return name


def _member(value: enum.Enum) -> Any:
    """The name of a member, the number of several flags."""
    return value.name if value.name in type(value).__members__ else value.value


def _imported(name: Any, base: type) -> Any:
    """A class that this process has imported; None: it has not, or it is of another kind."""
    module, _, path = str(name).partition(":")
    kind: Any = sys.modules.get(module)
    for each in path.split("."):
        kind = getattr(kind, each, None)
    return kind if isinstance(kind, type) and issubclass(kind, base) else None


def _decode_enum(name: Any, member: Any) -> Any:
    """The member; its name where this process has not imported its class."""
    kind = _imported(name, enum.Enum)
    if kind is None:
        return member
    try:
        return kind[member] if isinstance(member, str) else kind(member)
    except (KeyError, ValueError):
        raise ConfigError(
            f"the saved state has the member {member!r} of {str(name).replace(':', '.')}, which "
            "has none of that name now; put it back, or use --fresh to start over"
        ) from None


def _encode_array(
    value: "np.ndarray[Any, Any]", path: str, tensors: dict[str, torch.Tensor]
) -> Skeleton:
    try:
        tensor = torch.from_numpy(value.copy())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: a numpy array of {value.dtype} cannot be saved: {error}"
        ) from None
    return _encode_tensor(tensor, path, tensors)


def _encode_dict(
    value: dict[Any, Any], path: str, tensors: dict[str, torch.Tensor], depth: int
) -> Skeleton:
    mark = _mark_of(value)
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain and mark == "$dict":
        return {k: encode(v, f"{path}.{k}", tensors, depth + 1) for k, v in value.items()}
    in_keys: dict[str, torch.Tensor] = {}
    pairs = [
        [
            k if type(k) is str else encode(k, f"{path}.<key>", in_keys, depth + 1),
            encode(v, f"{path}.{k}", tensors, depth + 1),
        ]
        for k, v in value.items()
    ]
    if in_keys:
        raise ConfigError(f"{path}: a tensor is a key; use numbers or strings as keys")
    return {mark: pairs}


def _mark_of(value: Any) -> str:
    """The kind of a dict."""
    kind = type(value)
    if kind is OrderedDict:
        return "$ordered"
    if kind is Counter:
        return "$counter"
    if kind is defaultdict:
        factory = value.default_factory
        known = next((f.__name__ for f in _FACTORIES if f is factory), "")
        return f"$defaultdict:{known}" if known or factory is None else "$dict"
    return "$dict"


def _nan_bits(value: float) -> str:
    """Of a NaN with a sign or a payload; "" for others."""
    bits = struct.pack(">d", value).hex()
    return f"nan:{bits}" if math.isnan(value) and bits != "7ff8000000000000" else ""


def _encode_scalar(value: Any) -> Skeleton | None:
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if type(value) is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if type(value) in (set, frozenset) and all(type(v) in (int, str) for v in value):
        return {"$set" if type(value) is set else "$frozenset": sorted(value, key=repr)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        raw = base64.b64encode(value.tobytes()).decode()
        return {"$scalar": [value.dtype.str, raw]}
    return None


def _decode_mark(key: str, inner: Any, tensors: dict[str, torch.Tensor], place: _Place) -> Any:
    if key in MARKS:
        if inner not in tensors:
            raise CorruptCheckpointError(f"tensor {inner!r} is named and not in the image")
        tensor = tensors[inner]
        return tensor if key == "$tensor" else place(tensor)
    if key == "$enum":
        name, member = inner
        return member if isinstance(tensors, StandIns) else _decode_enum(name, member)
    if key == "$compound":
        return _decode_compound(inner, tensors, place)
    if key == "$array":
        array = _decode(inner, tensors, lambda tensor: tensor)
        if not isinstance(array, torch.Tensor):
            raise ValueError("an array without a tensor")
        return array.numpy()
    if key == "$tuple":
        return tuple(_decode(item, tensors, place) for item in inner)
    if key == "$deque":
        longest, items = inner
        return deque((_decode(item, tensors, place) for item in items), longest)
    if key == "$dict":
        return {_decode(k, tensors, place): _decode(v, tensors, place) for k, v in inner}
    if key in _DICTS:
        made = _DICTS[key]()
        for k, v in inner:
            made[_decode(k, tensors, place)] = _decode(v, tensors, place)
        return made
    if key == "$int":
        return int(inner, 0)
    if key == "$float":
        bits = inner.partition("nan:")[2]
        return struct.unpack(">d", bytes.fromhex(bits))[0] if bits else float(inner)
    if key == "$complex":
        return complex(float(inner[0]), float(inner[1]))
    if key == "$bytes":
        return base64.b64decode(inner)
    if key == "$size":
        return torch.Size(inner)
    if key == "$set":
        return set(inner)
    if key == "$frozenset":
        return frozenset(inner)
    if key == "$device":
        return torch.device(inner)
    if key == "$dtype" and isinstance(getattr(torch, inner, None), torch.dtype):
        return getattr(torch, inner)
    if key == "$scalar":
        return np.frombuffer(base64.b64decode(inner[1]), dtype=np.dtype(inner[0]))[0]
    raise CorruptCheckpointError(f"unknown mark {key!r} in the saved state; a newer autockpt?")
