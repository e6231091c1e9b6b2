"""Frameworks with an adapter, the signs of their scripts, and the line to add.

No framework is imported: a script is known by the packages that it imports and by its calls.
"""

import ast
import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from autockpt.values.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter of one framework."""

    framework: str
    """Its name, as its own documentation writes it."""
    module: str
    """Its name below `autockpt.integrations`."""
    extra: str
    """The extra in `pip install autockpt[...]`; also the environment of its tests."""
    packages: tuple[str, ...]
    """A script that imports one of them..."""
    calls: tuple[str, ...]
    """... and calls one of these uses it; a name ends with one of them."""
    line: str
    """`{name}` is the variable that holds what was called."""
    where: str
    """Where the line goes."""
    name: str = "trainer"
    """A usual variable, where the script has none."""


ADAPTERS = (
    Adapter(
        framework="Ray Train", module="ray", extra="ray",
        packages=("ray",), calls=("TorchTrainer",),
        line="ckpt = autockpt.integrations.ray.attach(model=model, optimizer=optimizer, "
        "data=loader)",
        where="in the train loop, on all workers; docs/howto/frameworks/ray.md shows the loop",
    ),
    Adapter(
        framework="Lightning Trainer", module="lightning", extra="lightning",
        packages=("lightning", "pytorch_lightning"), calls=("Trainer",),
        line="{name} = Trainer(..., callbacks=[autockpt.integrations.lightning.Autockpt()])",
        where="where the Trainer is made, beside its other arguments",
    ),
    Adapter(
        framework="Lightning CLI", module="lightning", extra="lightning",
        packages=("lightning", "pytorch_lightning"), calls=("LightningCLI",),
        line="{name} = LightningCLI(..., trainer_defaults="
        '{{"callbacks": [autockpt.integrations.lightning.Autockpt()]}})',
        where="where the LightningCLI is made, beside its other arguments", name="cli",
    ),
    Adapter(
        framework="Lightning Fabric", module="lightning", extra="lightning",
        packages=("lightning", "lightning_fabric"), calls=("Fabric",),
        line="ckpt = autockpt.integrations.lightning.attach({name}, "
        '{{"model": model, "optimizer": optimizer}})',
        where="behind {name}.setup(...); docs/howto/frameworks/lightning.md shows the loop",
        name="fabric",
    ),
    Adapter(
        framework="Ignite Engine", module="ignite", extra="ignite",
        packages=("ignite",), calls=("Engine", "create_supervised_trainer"),
        line="ckpt = autockpt.integrations.ignite.attach({name}, model=model, optimizer=optimizer)",
        where="before {name}.run(ckpt.loader(loader), ...)",
    ),
    Adapter(
        framework="Hugging Face Trainer", module="huggingface", extra="huggingface",
        packages=("transformers", "trl"), calls=("Trainer",),
        line="autockpt.integrations.huggingface.protect({name})", where="before {name}.train()",
    ),
    Adapter(
        framework="Accelerate", module="accelerate", extra="accelerate",
        packages=("accelerate",), calls=("Accelerator",),
        line="ckpt = autockpt.integrations.accelerate.attach({name})",
        where="behind {name}.prepare(...); then ckpt.step() at the end of each batch, and epochs "
        "from ckpt.epoch on",
        name="accelerator",
    ),
    Adapter(
        framework="DeepSpeed", module="deepspeed", extra="deepspeed",
        packages=("deepspeed",), calls=("initialize",),
        line="ckpt = autockpt.integrations.deepspeed.protect({name})",
        where="behind deepspeed.initialize(...); then loader = ckpt.loader(loader), and epochs "
        "from loader.epoch on",
        name="engine",
    ),
    Adapter(
        framework="TorchTitan", module="torchtitan", extra="torchtitan",
        packages=("torchtitan",), calls=("build", "Trainer"),
        line="config.checkpoint = autockpt.integrations.torchtitan.AutockptCheckpointManager"
        ".Config(enable=True)",
        where="in the function that makes the config",
    ),
)  # fmt: skip


def import_adapter(name: str, part: str = "") -> ModuleType:
    """An adapter's module, or a part of it; `name` is the one below `autockpt.integrations`.

    Raises ConfigError with the extra to install where the framework is missing.
    """
    whole = f"autockpt.integrations.{name}"
    try:
        return importlib.import_module(f"{whole}.{part}" if part else whole)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("autockpt"):
            raise
        extra = next(one.extra for one in ADAPTERS if one.module == name)
        raise ConfigError(
            f"{whole}: {error.name} is not installed; pip install 'autockpt[{extra}]'"
        ) from error


def adapter_of(source: str) -> tuple[Adapter, str] | None:
    """(the adapter of the framework that a script trains with, the name in its line).

    None where it is none of these, the source cannot be read, or the adapter is missing.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    imported, derived = _imported(tree), _derived(tree)
    for adapter in ADAPTERS:
        if not imported & set(adapter.packages) or not is_there(adapter):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _is_call_of(node, adapter, derived):
                return adapter, _name_of(tree, node) or adapter.name
    return None


def is_there(adapter: Adapter) -> bool:
    """This autockpt has the adapter."""
    return importlib.util.find_spec(f"autockpt.integrations.{adapter.module}") is not None


def _imported(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def _derived(tree: ast.AST) -> Mapping[str, str]:
    """By class of the script the name of the first class that it derives from."""
    return {
        node.name: ast.unparse(node.bases[0]).rpartition(".")[2]
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.bases
    }


def _is_call_of(node: ast.Call, adapter: Adapter, derived: Mapping[str, str]) -> bool:
    called, seen = ast.unparse(node.func).rpartition(".")[2], set[str]()
    while called in derived and called not in seen:
        seen.add(called)
        called = derived[called]
    return called.endswith(adapter.calls)


def _name_of(tree: ast.AST, call: ast.Call) -> str:
    """The variable that the call is assigned to; "" for none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is call:
            return ast.unparse(node.target)
        if isinstance(node, ast.Assign) and node.value is call and len(node.targets) == 1:
            target = node.targets[0]
            first = target.elts[0] if isinstance(target, ast.Tuple) else target
            return ast.unparse(first)
    return ""


WITHOUT = {
    "stable_baselines3": (
        "Stable-Baselines3",
        "docs/howto/frameworks/reinforcement.md names what to attach, and where",
    ),
    "megatron": ("Megatron-LM", "`autockpt plan --for megatron` prints its own flags"),
    "composer": ("Composer", "it keeps its own checkpoints"),
}
"""By package: a framework that has no adapter, and a hint for its users."""


def without_adapter(source: str) -> tuple[str, str] | None:
    """(a framework without an adapter that a script imports, a hint for its users)."""
    try:
        imported = _imported(ast.parse(source))
    except (SyntaxError, ValueError):
        return None
    return next((said for package, said in WITHOUT.items() if package in imported), None)


def require_counters(call: str, extra: Mapping[str, Any], name: str) -> None:
    """Raises ConfigError for a checkpoint without counters of a framework.

    `call`: of the adapter, for the message; `name`: of a part that each own checkpoint has.
    """
    if name not in extra:
        raise ConfigError(
            f"{call}: the checkpoint to go on from has no counters of the framework. It was "
            "imported, or made without this adapter. Begin a new run (fresh=True). One that was "
            "imported goes on where the framework itself resumes from the directory it came from"
        )


def reading_of(loader: Any, accelerator: Any) -> tuple[int, int]:
    """(batches that a loader of Accelerate reads for a micro-batch, these that it reads ahead).

    One that dispatches reads on the first rank, for all.
    """
    if type(loader).__name__ != "DataLoaderDispatcher":
        return 1, 1
    each = 1 if loader.split_batches else int(accelerator.num_processes)
    return each, each if accelerator.is_main_process else 0


class OverLoader:
    """An adapter's loader over one of `ckpt.loader`, which knows its place."""

    def __init__(self, placed: Any) -> None:
        self._placed = placed

    @property
    def epoch(self) -> int:
        """The epoch that the next pass is, or goes on with."""
        return int(self._placed.epoch)

    @property
    def first_batch(self) -> int:
        """The number of the batch that the next pass begins with; 0 for a whole epoch."""
        return int(self._placed.first_batch)

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self._placed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_placed"], name)


class OverSession:
    """The object of an adapter: it has all members of its session that it has not of its own."""

    session: Any
    """The session that `autockpt.attach` returned."""

    def __getattr__(self, name: str) -> Any:
        """`save`, `report`, `request_stop`, `stopped`, `restored` and others."""
        if "session" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.__dict__["session"], name)
