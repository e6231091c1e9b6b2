"""State <-> skeleton and tensors: every type of the closed set comes back, nothing else gets in."""

import collections
import enum
import functools
import json
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.executors.state.state_tree import MAX_DEPTH, decode, encode, is_shallow, tensor_names
from autockpt.values.errors import ConfigError, CorruptCheckpointError

QUICK = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def there_and_back(value: Any) -> Any:
    """Through JSON text, as in an image."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "root", tensors), allow_nan=False)
    return decode(json.loads(text), {name: t.clone() for name, t in tensors.items()})


def same(one: Any, two: Any) -> bool:
    """Equal in type and value; NaN equals NaN, tensors by their bytes."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(two, torch.Tensor)
            and (one.dtype, one.shape) == (two.dtype, two.shape)
            and bool(torch.equal(one.contiguous().view(-1).view(torch.uint8),
                                 two.contiguous().view(-1).view(torch.uint8)))
        )  # fmt: skip
    if isinstance(one, np.ndarray):
        return one.dtype == two.dtype and one.shape == two.shape and one.tobytes() == two.tobytes()
    if type(one) is not type(two):
        return False
    if isinstance(one, collections.defaultdict) and one.default_factory is not two.default_factory:
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[k], two[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, two) and (one == two or one != one)
    return bool(one == two)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
    st.binary(max_size=8),
    st.sampled_from([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cpu"), 2**200,
                     -(2**53), -0.0, np.float64(1.5), np.uint16(7), np.bool_(True), "$tensor"]),
    st.frozensets(st.integers(), max_size=3), st.sets(st.text(max_size=3), max_size=3),
    st.lists(st.floats(width=32), max_size=4).map(lambda v: torch.tensor(v)),
    st.lists(st.integers(0, 255), max_size=4).map(lambda v: np.array(v, dtype=np.uint8)),
)  # fmt: skip
KEYS = (
    st.text(max_size=4)
    | st.integers()
    | st.booleans()
    | st.tuples(st.integers(), st.text(max_size=2))
)
DICTS = st.sampled_from(
    [
        collections.OrderedDict, collections.Counter,
        *(functools.partial(collections.defaultdict, kind)
          for kind in (None, list, int, float, dict, set, str, tuple)),
    ]
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["a", "b", "$set", "$x", ""]), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=2)
        | st.builds(lambda kind, each: kind(each), DICTS, st.dictionaries(KEYS, inner, max_size=2))
    ),
    max_leaves=8,
)


@QUICK
@given(TREES)
def test_every_tree_comes_back_or_is_refused_at_save(value: Any) -> None:
    """Never at restore, never differently."""
    refusal, again = "", None
    try:
        again = there_and_back(value)
    except ConfigError as error:
        refusal = str(error)
    assert "have this name" in refusal or same(value, again)


@pytest.mark.parametrize(
    "value",
    [
        math.inf, -math.inf, math.nan, -0.0, 2**53, -(2**53), 2**63, 10**5000, 1e-320,
        complex(1, -0.0), complex(math.nan, math.inf), b"", b"\x00\xff", "\ud800", (), [], {},
        {"$tensor": "x"}, {"$int": 1, "b": 2}, {1: "a", "1": "b"}, {None: 1, (1, (2,)): 2},
        {1.5: 0, math.inf: 1}, set(), frozenset({1, 2}), {"x", "y"}, torch.Size([]),
        torch.complex128, torch.device("meta"),
        np.float16(0.1), np.complex64(1j), np.int64(-(2**63)), np.longdouble(1) / 3,
        np.zeros((2, 0, 3)), np.array(5), np.arange(6).reshape(2, 3)[:, ::-1], np.array([True]),
        torch.tensor(3), torch.zeros(0, 4), torch.randn(3, 4).t(), torch.tensor([True, False]),
        torch.zeros(2, dtype=torch.float8_e4m3fn), torch.ones(3, dtype=torch.complex128).conj(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_edges_of_every_type_come_back(value: Any) -> None:
    """Signs, infinities, sizes, empties, strides, keys that look like marks."""
    again = there_and_back(value)
    if isinstance(value, np.ndarray):
        value = np.ascontiguousarray(value).reshape(value.shape)
    if isinstance(value, complex | np.complexfloating):
        assert repr(again) == repr(value)
    elif isinstance(value, torch.Tensor):
        assert same(again, value.resolve_conj())
    else:
        assert same(again, value)


class Named(collections.OrderedDict[str, int]):
    """A dict of somebody's own."""


@pytest.mark.parametrize(
    "value",
    [Named(z=1, a=2), collections.defaultdict(lambda: 3, z=1, a=2),
     collections.defaultdict(Named, z=1, a=2)],
    ids=["a class", "a function", "a class behind it"],
)  # fmt: skip
def test_other_kinds_of_dicts_come_back_as_dicts(value: dict[str, int]) -> None:
    """Nothing that runs is named in a file; order is kept."""
    again = there_and_back(value)
    assert type(again) is dict
    assert list(again.items()) == [("z", 1), ("a", 2)]


def test_the_deepest_state_is_read() -> None:
    """Every kind of dict takes as much of a reader's depth as the bound allows for."""
    for kind in (dict, collections.OrderedDict, functools.partial(collections.defaultdict, list)):
        deep: Any = 1
        for _ in range(MAX_DEPTH):
            deep = kind({1: deep})
        assert is_shallow({"others": {"deep": encode(deep, "deep", {})}})
        assert same(there_and_back(deep), deep)


def test_what_lived_on_a_device_goes_to_one_and_stays_one() -> None:
    """Two references to a tensor are two to one tensor there; the rest stays in host memory."""
    shared, other = torch.ones(2), torch.zeros(3)
    skeleton = {"a": {"$device_tensor": "a"}, "b": [{"$device_tensor": "b"}, {"$tensor": "c"}]}
    there = decode(skeleton, {"a": shared, "b": shared, "c": other}, torch.device("meta"))
    assert there["a"] is there["b"][0]
    assert there["a"].is_meta
    assert there["b"][1] is other


def test_generators_come_back() -> None:
    """The states of Python's, numpy's and torch's generators continue where they were."""
    python, numbers = random.Random(3), np.random.default_rng(3)
    python.random()
    numbers.random()
    version, internal, gauss = python.getstate()
    saved = there_and_back(
        {"python": [version, np.array(internal, dtype=np.uint32), gauss],
         "numpy": numbers.bit_generator.state, "torch": torch.get_rng_state()}
    )  # fmt: skip
    other = np.random.default_rng(0)
    other.bit_generator.state = saved["numpy"]
    assert other.random() == numbers.random()
    version, internal, gauss = saved["python"]
    twin = random.Random()
    twin.setstate((version, tuple(internal.tolist()), gauss))
    assert twin.random() == python.random()
    assert torch.equal(saved["torch"], torch.get_rng_state())


class Colour(enum.IntEnum):
    """An int that is more than an int."""

    RED = 1


class Parts(enum.Flag):
    """Several may be set at once."""

    LEFT = enum.auto()
    RIGHT = enum.auto()


def test_members_of_enums_come_back_where_their_class_is() -> None:
    """None is imported; without it the name is left.  A class inside a function has no name."""
    both = Parts.LEFT | Parts.RIGHT
    value = {"mode": Colour.RED, "parts": [both, Parts.LEFT, Parts(0)], "key": {Colour.RED: 1}}
    assert there_and_back(value) == value
    assert type(there_and_back(value)["mode"]) is Colour
    text = json.dumps(encode(value, "root", {})).replace(f"{__name__}:", "gone:")
    assert decode(json.loads(text), {}) == {
        "mode": "RED", "parts": [3, "LEFT", 0], "key": {"RED": 1}
    }  # fmt: skip
    text = text.replace("gone:Colour", "builtins:dict")
    assert decode(json.loads(text), {})["mode"] == "RED"
    inner = enum.Enum("inner", "A")  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"^root\.mode: the class of a \S+inner cannot be found"):
        encode({"mode": inner.A}, "root", {})
    with pytest.raises(ConfigError, match=r"the member 'GREEN' of \S+\.Colour, which has none"):
        decode({"$enum": [f"{__name__}:Colour", "GREEN"]}, {})
    with pytest.raises(ConfigError, match=r"has a gone\.Colour, which the script has not imported"):
        decode({"mode": {"$enum": ["gone:Colour", "RED"]}}, {}, to_train=True)


class Text(str):
    """A string that is more than a string."""

    __slots__ = ()


Pair = collections.namedtuple("Pair", "one two")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"), (print, "builtin_function"), (lambda: 0, "function"),
        (Text("x"), "Text"), (Pair(1, 2), "Pair"),
        (pathlib.PurePosixPath("/x"), "PurePosixPath"), (bytearray(b"x"), "bytearray"),
        (range(3), "range"), ({1.5}, "set"), ({("a", 1)}, "set"), (iter([]), "list_iterator"),
        (np.array([object()]), "ndarray"), (np.array(["a"]), "ndarray"),
        (np.datetime64("2026-01-01"), "datetime64"), (np.ma.masked_array([1, 2], [0, 1]), "Masked"),
        (torch.Generator(), "Generator"), (torch.nn.Linear(1, 1), "Linear"),
        (random.Random(), "Random"), (Exception("x"), "Exception"), (int, "builtins.type"),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_anything_else_is_refused_with_its_path(value: Any, kind: str) -> None:
    """At save, naming the place and the way out: never pickled, never silently changed."""
    with pytest.raises(
        ConfigError, match=rf"root\.a\.0\.b: a .*{kind}.* cannot be saved safely\. Give"
    ):
        encode({"a": [{"b": value}]}, "root", {})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
        (lambda: torch.empty(2, device="meta"), "torch.strided tensor on meta"),
        (lambda: np.array([1], dtype=">i8"), "a numpy array of >i8 cannot be saved"),
        (lambda: np.zeros(2, dtype=np.longdouble), "a numpy array of float128 cannot be saved"),
    ],
)
def test_tensors_without_plain_bytes_are_refused_with_their_path(
    make: Callable[[], Any], message: str
) -> None:
    """They would need a format of their own."""
    with pytest.raises(ConfigError, match=rf"root\.x: {message}|root\.x: a {message}"):
        encode({"x": make()}, "root", {})


def test_depth_is_bounded_at_save() -> None:
    """Also for a list that contains itself."""
    deep: Any = 1
    for _ in range(MAX_DEPTH):
        deep = [deep]
    assert same(there_and_back(deep), deep)
    with pytest.raises(ConfigError, match=r"root(\.0)+: nested deeper than 32"):
        encode([deep], "root", {})
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="nested deeper than 32"):
        encode(loop, "root", {})


@pytest.mark.parametrize(
    "value",
    [
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
        {1: torch.zeros(1), "1": torch.ones(1)},
        {"a": [torch.zeros(1)], "a.0": torch.ones(1)},
    ],
)
def test_two_tensors_under_one_name_are_refused(value: Any) -> None:
    """One would silently replace the other."""
    with pytest.raises(ConfigError, match=r"root\.\S+: two tensors of the state have this name"):
        encode(value, "root", {})


def test_a_tensor_as_a_key_is_refused() -> None:
    """Its bytes would be lost."""
    with pytest.raises(ConfigError, match="root: a tensor is a key"):
        encode({torch.zeros(1): 1}, "root", {})


def test_names_are_found_in_order() -> None:
    """For whoever plans a layout from a skeleton."""
    tensors: dict[str, torch.Tensor] = {}
    skeleton = encode({"b": torch.zeros(1), "a": [1, (torch.ones(1),)]}, "r", tensors)
    assert tensor_names(skeleton) == list(tensors) == ["r.b", "r.a.1.0"]


HOSTILE: list[Any] = [
    {"$tensor": "nobody"}, {"$tensor": ["x"]}, {"$tensor": {}}, {"$device_tensor": "nobody"},
    {"$unknown": 1}, {"$": 1}, {"$int": "abc"}, {"$int": 5}, {"$int": None}, {"$float": "x"},
    {"$float": []}, {"$complex": ["1"]}, {"$complex": 3}, {"$bytes": "é"}, {"$bytes": 3},
    {"$bytes": "a"}, {"$size": ["x"]}, {"$size": 3}, {"$set": [[1]]}, {"$set": 3},
    {"$frozenset": [{}]}, {"$device": "toaster"}, {"$device": 3.5}, {"$dtype": "Tensor"},
    {"$dtype": "load"}, {"$dtype": []}, {"$scalar": ["O", "AAAA"]}, {"$scalar": ["<f8", "AA=="]},
    {"$scalar": ["<f8", ""]}, {"$scalar": ["nope", "AA=="]}, {"$scalar": []}, {"$tuple": 3},
    {"$dict": 3}, {"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$array": 3}, {"$array": "text"},
    {"$int": "9" * 10_000}, {"$ordered": 3}, {"$ordered": [[1]]}, {"$counter": [[[], 1]]},
    {"$counter": {"a": 1}}, {"$defaultdict:eval": []}, {"$defaultdict:os.system": []},
    {"$defaultdict": []}, {"$defaultdict:list": [[{}, 1]]},
]  # fmt: skip


@pytest.mark.parametrize("skeleton", HOSTILE, ids=lambda s: json.dumps(s)[:40])
def test_a_hostile_skeleton_is_corrupt_and_nothing_else(skeleton: Any) -> None:
    """One exception type, so that another source is tried; nothing is called by name."""
    with pytest.raises(CorruptCheckpointError, match=r"saved state|unknown mark|not in the image"):
        decode({"x": [skeleton]}, {})


@pytest.mark.parametrize("longest", [None, 2])
def test_a_deque_comes_back_with_its_limit(longest: int | None) -> None:
    """Samples of a memory are tuples of arrays and numbers."""
    value = collections.deque([(np.ones(2), 1), (np.zeros(2), 2)], maxlen=longest)
    tensors: dict[str, torch.Tensor] = {}
    back = decode(encode(value, "memory", tensors), tensors)
    assert type(back) is collections.deque
    assert back.maxlen == longest
    assert [(row.tolist(), n) for row, n in back] == [([1.0, 1.0], 1), ([0.0, 0.0], 2)]
