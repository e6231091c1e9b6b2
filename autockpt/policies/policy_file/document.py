"""A YAML document as a tree that remembers where every value stands.

YAML 1.2 core rules instead of PyYAML's 1.1.  Only true and false are booleans, `1:30` and `off` are
words, `077` is 77, `1e3` is a number, there are no timestamps.  Duplicate keys, anchors and tags
are refused.  A file is composed, never constructed: no object is ever built from a tag.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from autockpt import yaml_text

MAX_BYTES = 2**20
"""A policy file is a page of text; more than a mebibyte is a mistake."""

_TAG = "tag:yaml.org,2002:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Where something stands."""

    file: str
    """File name, or the option or variable that said it."""
    line: int = 0
    """From 1; 0: not a file."""
    column: int = 1
    text: str = ""
    """The source line."""

    @property
    def where(self) -> str:
        """`file:line`, or the name alone where there are no lines."""
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing to fix."""

    mark: Mark
    path: str
    message: str

    def __str__(self) -> str:
        """`file:line:col: error: path: message`, the source line, and a caret under the place."""
        mark = self.mark
        said = f"{self.path}: {self.message}" if self.path else self.message
        if not mark.line:
            return f"{mark.file}: error: {said}"
        head = f"{mark.file}:{mark.line}:{mark.column}: error: {said}"
        caret = " " * (mark.column - 1) + "^"
        return f"{head}\n{mark.line:>5} | {mark.text}\n      | {caret}"


@dataclass(slots=True, kw_only=True)
class Node:
    """A scalar, a mapping or a list, with its place."""

    mark: Mark
    key_mark: Mark | None = None
    """Where the key stands, for a value of a mapping."""
    scalar: Any = None
    children: "dict[str, Node] | None" = None
    items: "list[Node] | None" = None

    def plain(self) -> Any:
        """The data without marks."""
        if self.children is not None:
            return {key: child.plain() for key, child in self.children.items()}
        if self.items is not None:
            return [item.plain() for item in self.items]
        return self.scalar

    def find(self, path: tuple[str | int, ...]) -> "Node | None":
        """The node at a path of keys and list positions, or None."""
        node: Node | None = self
        for part in path:
            if node is None:
                return None
            if isinstance(part, int):
                items = node.items or []
                node = items[part] if part < len(items) else None
            else:
                node = (node.children or {}).get(part)
        return node

    def leaves(self, prefix: str = "") -> "Iterator[tuple[str, Node]]":
        """Dotted path and node of every scalar below; lists are not entered."""
        for key, child in (self.children or {}).items():
            path = f"{prefix}{key}"
            if child.children is not None:
                yield from child.leaves(f"{path}.")
            elif child.items is None:
                yield path, child


@dataclass(slots=True)
class Document:
    """A parsed file and everything wrong with its YAML."""

    root: Node
    problems: list[Problem] = field(default_factory=list)


def parse(text: str, file: str) -> Document:
    """The tree of a YAML text; problems instead of exceptions, so that all are reported at once."""
    lines = text.split("\n")
    top = Mark(file=file, line=1, column=1, text=lines[0])
    document = Document(root=Node(mark=top, children={}))
    if len(text.encode()) > MAX_BYTES:
        document.problems.append(Problem(mark=top, path="", message="longer than 1 MiB"))
        return document
    try:
        root = _CoreLoader(text).get_single_node()
        if root is not None:
            document.root = _Builder(file, lines, document.problems).build(root, "")
    except yaml.MarkedYAMLError as error:
        at = error.problem_mark or error.context_mark
        mark = _mark(file, lines, at) if at is not None else top
        message = f"not valid YAML: {error.problem or error.context}"
        document.problems.append(Problem(mark=mark, path="", message=message))
    except (yaml.YAMLError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        message = f"not valid YAML: {said.splitlines()[0] or type(error).__name__}"
        document.problems.append(Problem(mark=top, path="", message=message))
    if document.root.children is None:
        document.problems.append(
            Problem(
                mark=document.root.mark, path="", message="expected a mapping of keys to values"
            )
        )
        document.root = Node(mark=top, children={})
    return document


def scalar(text: str) -> Any:
    """The value of a single word, as in a file; for options and environment variables."""
    node = parse(f"value: {text}", "value")
    value = None if node.problems else (node.root.children or {})["value"].plain()
    return text if value is None or isinstance(value, dict | list) else value


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: mappings merge key by key, everything else replaces."""
    if base.children is None or over.children is None:
        return over
    children = dict(base.children)
    for key, child in over.children.items():
        children[key] = merge(children[key], child) if key in children else child
    return Node(mark=over.mark, key_mark=over.key_mark, children=children)


class _CoreLoader(yaml_text.Loader):
    """Composes with the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(
                None, None, "anchors and aliases are not supported; use extends", event.start_mark
            )
        return super().compose_node(parent, index)


for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _CoreLoader.add_implicit_resolver(_TAG + _name, re.compile(rf"^(?:{_pattern})$"), list(_first))


class _Builder:
    """Turns composed nodes into ours, collecting problems."""

    def __init__(self, file: str, lines: list[str], problems: list[Problem]) -> None:
        self.file = file
        self.lines = lines
        self.problems = problems

    def build(self, node: yaml.Node, path: str, key_mark: Mark | None = None) -> Node:
        mark = _mark(self.file, self.lines, node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return Node(mark=mark, key_mark=key_mark, children=self._mapping(node, path))
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(item, f"{path}[{i}]") for i, item in enumerate(node.value)]
            return Node(mark=mark, key_mark=key_mark, items=items)
        return Node(mark=mark, key_mark=key_mark, scalar=self._scalar(node, path, mark))

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Node]:
        children: dict[str, Node] = {}
        for key_node, value_node in node.value:
            mark = _mark(self.file, self.lines, key_node.start_mark)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            here = f"{path}.{key}" if path else key
            first = children.get(key)
            if first is not None and first.key_mark is not None:
                message = f"duplicate key, first on line {first.key_mark.line}"
                self.problems.append(Problem(mark=mark, path=here, message=message))
                continue
            children[key] = self.build(value_node, here, mark)
        return children

    def _scalar(self, node: yaml.Node, path: str, mark: Mark) -> Any:
        tag, text = node.tag.removeprefix(_TAG), str(node.value)
        if tag == "str":
            return text
        if tag == "null":
            return None
        if tag == "bool":
            return text.lower() == "true"
        if tag == "int":
            return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        if tag == "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        self.problems.append(
            Problem(mark=mark, path=path, message=f"tag {node.tag} is not supported")
        )
        return math.nan


def _mark(file: str, lines: list[str], at: yaml.Mark) -> Mark:
    line = min(at.line, len(lines) - 1)
    return Mark(file=file, line=line + 1, column=at.column + 1, text=lines[line].rstrip("\r"))
