"""The schema of a skeleton: the part of a shard beside its tensors.

    progress    {"step": int >= 0, ...}
    rng         a value
    optimizers  {name: {"groups": [{"params": names, "values": value}],
                        "regular": {"key:d key:h": [[group, index], ...]},
                        "irregular": {name: value}, "loose": value, "divided": bool}}
    modules     {name: value}
    others      {name: value}
    own         {name: {"state_dict": value, "attributes": {name: value}}}      optional
    passing     [name, ...]                                                     optional
    changed     {"trained": {name: bool}, "modes": {name: bool},
                 "reshaped": [name, ...], "said": {name: value}}                optional
    trained     [name, ...]                                                     optional
    tree        [[[key, ...], value], ...]                                      optional
    partial, lossy                                            optional; bool, text

`state_tree` decodes each value.  Digests prove that the bytes are unchanged; they do not prove
that autockpt wrote them.  So every field is checked once, when a skeleton is read, and later
readers find the types that they expect.
"""

from collections.abc import Callable
from typing import Any

from autockpt.executors.image.tensor_references import MARKS
from autockpt.executors.state import state_tree
from autockpt.values.errors import CorruptCheckpointError

PARTS = ("progress", "rng", "optimizers", "modules", "others")
"""Fields that every skeleton has."""

_Check = Callable[[Any, str], Any]


def require_skeleton(data: Any, where: str) -> None:
    """Raises CorruptCheckpointError that names the first field that is not as the schema says."""
    _require(isinstance(data, dict), where, "an object", data)
    _require(set(PARTS) <= set(data), where, f"the parts {', '.join(PARTS)}", sorted(data))
    _require(state_tree.is_shallow(data), where, "a state of plausible depth", "a deeper one")
    for name, check in _FIELDS.items():
        if name in data:
            check(data[name], f"{where}: {name}")


def _require(holds: bool, where: str, expected: str, got: Any) -> None:
    if not holds:
        raise CorruptCheckpointError(f"{where}: expected {expected}, got {got!r:.80}")


def _kind(kind: type, expected: str) -> _Check:
    def check(data: Any, where: str) -> None:
        _require(type(data) is kind, where, expected, data)

    return check


_text = _kind(str, "text")
_flag = _kind(bool, "true or false")


def _names(data: Any, where: str) -> None:
    names = isinstance(data, list) and all(isinstance(name, str) for name in data)
    _require(names, where, "a list of names", data)


def _each(check: _Check) -> _Check:
    """An object, each field of which passes `check`."""

    def checked(data: Any, where: str) -> None:
        _require(isinstance(data, dict), where, "an object", data)
        for name, item in data.items():
            check(item, f"{where}.{name:.80}")

    return checked


def _value(data: Any, where: str) -> Any:
    """Decodes it with stand-ins for its tensors: what raises here would raise later."""
    _require_tensors_named(data, where)
    try:
        return state_tree.decode(data, state_tree.StandIns())
    except Exception as error:
        raise CorruptCheckpointError(f"{where}: is malformed: {error!r:.200}") from None


def _require_tensors_named(data: Any, where: str) -> None:
    if isinstance(data, list):
        for item in data:
            _require_tensors_named(item, where)
    elif isinstance(data, dict):
        for key, item in data.items():
            if key in MARKS:
                _text(item, f"{where}: name of a tensor")
            _require_tensors_named(item, where)


def _settings(data: Any, where: str) -> dict[str, Any]:
    """A value that is a dict."""
    decoded = _value(data, where)
    if not isinstance(decoded, dict):
        raise CorruptCheckpointError(f"{where}: expected an object, got {data!r:.80}")
    return decoded


def _progress(data: Any, where: str) -> None:
    step = _settings(data, where).get("step")
    _require(type(step) is int and step >= 0, f"{where}.step", "an integer of at least 0", step)


def _optimizer(data: Any, where: str) -> None:
    fields = isinstance(data, dict) and {"groups", "regular", "irregular"} <= set(data)
    _require(fields, where, "groups, regular and irregular", data)
    _require(isinstance(data["groups"], list), f"{where}.groups", "a list", data["groups"])
    sizes = [_group(row, f"{where}.groups.{n}") for n, row in enumerate(data["groups"])]
    _regular(data["regular"], f"{where}.regular", sizes)
    _each(_value)(data["irregular"], f"{where}.irregular")
    loose = _value(data.get("loose", {}), f"{where}.loose")
    _require(isinstance(loose, dict), f"{where}.loose", "an object", loose)
    _flag(data.get("divided", False), f"{where}.divided")


def _group(data: Any, where: str) -> int:
    """Checks one parameter group; the number of its parameters."""
    fields = isinstance(data, dict) and {"params", "values"} <= set(data)
    _require(fields, where, "params and values", data)
    _settings(data["values"], f"{where}.values")
    params = data["params"]
    if not isinstance(params, str):
        _names(params, f"{where}.params")
        return len(params)
    return params.count("\n") + 1 if params else 0


def _regular(data: Any, where: str, sizes: list[int]) -> None:
    _require(isinstance(data, dict), where, "an object", data)
    for keys, places in data.items():
        marked = all(mark.rpartition(":")[1] for mark in keys.split(" "))
        _require(marked, where, "keys as key:d or key:h", keys)
        _require(isinstance(places, list), where, "a list of [group, index]", places)
        for place in places:
            pair = isinstance(place, list) and [type(n) for n in place] == [int, int]
            fits = pair and 0 <= place[0] < len(sizes) and 0 <= place[1] < sizes[place[0]]
            _require(fits, where, "[group, index] of a parameter", place)


def _own(data: Any, where: str) -> None:
    _require(isinstance(data, dict), where, "an object", data)
    if "state_dict" in data:
        _value(data["state_dict"], f"{where}.state_dict")
    _each(_value)(data.get("attributes", {}), f"{where}.attributes")


def _settings_each(data: Any, where: str) -> None:
    _require(isinstance(data, dict), where, "an object", data)
    for name, item in data.items():
        _settings(item, f"{where}.{name:.80}")


def _changed(data: Any, where: str) -> None:
    _require(isinstance(data, dict), where, "an object", data)
    for name in ("trained", "modes"):
        _each(_flag)(data.get(name, {}), f"{where}.{name}")
    _names(data.get("reshaped", []), f"{where}.reshaped")
    _settings_each(data.get("said", {}), f"{where}.said")


def _tree(data: Any, where: str) -> None:
    _require(isinstance(data, list), where, "a list", data)
    for number, leaf in enumerate(data):
        here = f"{where}.{number}"
        pair = isinstance(leaf, list) and len(leaf) == 2 and isinstance(leaf[0], list)
        _require(pair, here, "[keys, value]", leaf)
        _require(all(type(k) in (str, int) for k in leaf[0]), here, "names as keys", leaf[0])
        _value(leaf[1], here)


_FIELDS: dict[str, _Check] = {
    "progress": _progress, "rng": _value, "optimizers": _each(_optimizer),
    "modules": _each(_value), "others": _each(_value), "own": _each(_own), "passing": _names,
    "changed": _changed, "trained": _names, "tree": _tree, "partial": _flag, "lossy": _text,
}  # fmt: skip
