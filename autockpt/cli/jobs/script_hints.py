"""Which lines protect a script: read from its source, with its own names in them.

Only the syntax tree is looked at.  The printed lines run in that script as it stands.  Every name
in them is visible at its place, and the loop continues where it was.  Where the source does not say
enough, an example is shown, and called one.

        for over a DataLoader      ckpt.batches(total); within epochs that do more, with `until`
        for over range, or a list  ckpt.steps(total), in the same way
        while, with a counter      the counter comes from ckpt.step_count and ckpt.step()
        for over anything else     ckpt.step() at the end of its body
"""

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass

from autockpt.cli.shared.script_source import Loop, Scope, Script, Steps, is_name, last_name
from autockpt.integrations.adapters import Adapter, adapter_of, without_adapter
from autockpt.values.table import columns

DRAWS = frozenset({"randperm", "shuffle", "permutation", "sample", "choice", "choices"})
"""Calls that draw an order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line to paste, and where."""

    text: str
    """Without its indentation: that of the line which it is about, unless `inside`."""
    place: str
    """"before", "behind" or "instead of" that line."""
    number: int
    """Number of the line that it is about, from 1."""
    replaces: str = ""
    """That line, where the new one stands instead of it."""
    inside: bool = False
    """It is the first line of the loop that begins at that line."""

    @property
    def where(self) -> str:
        """For a person."""
        if self.inside:
            return f"first in the loop of line {self.number}"
        if self.replaces:
            return f"line {self.number}, instead of: {self.replaces}"
        what = "the loop in line" if self.place == "before" else "line"
        return f"{self.place} {what} {self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The lines, in the order of their places."""

    lines: tuple[Line, ...] = ()
    """Empty: the source does not say enough."""
    notes: tuple[str, ...] = ()


EXAMPLE = (
    "ckpt = autockpt.attach(model=model, optimizer=optimizer, data=loader)",
    "for step, batch in ckpt.batches(total_steps):",
)
"""With the usual names; without a DataLoader it is `ckpt.steps(total_steps)`."""


def advice(path: str) -> str:
    """Return the text to print after a script ran that never attached."""
    name = os.path.basename(path)
    try:
        with open(path, encoding="utf-8") as file:
            source = file.read()
    except (OSError, ValueError):
        source = ""
    found = lines_to_add(source)
    said = f"autockpt: UNPROTECTED: {name} never called autockpt.attach, so nothing was saved.\n"
    if (framework := adapter_of(source)) is not None:
        return said + _adapter_line(*framework)
    if not found.lines and (other := without_adapter(source)) is not None:
        return f"{said}autockpt: it trains with {other[0]}, which has no adapter: {other[1]}.\n"
    if not found.lines:
        return said + (
            "autockpt: its training loop was not recognised. With the usual names two lines protect"
            " a\nautockpt: script; put in yours, and begin with `import autockpt`:\n\n"
            f"    {EXAMPLE[0]}\n"
            f"    {EXAMPLE[1]}  # without a DataLoader: for step in ckpt.steps(total_steps):\n\n"
            "autockpt: loops of another shape: ckpt.step() at the end of each iteration\n"
            "autockpt: (docs/howto/loops.md).\n"
        )
    count = {1: "this line protects", 2: "two lines protect"}
    protect = count.get(len(found.lines), f"{len(found.lines)} lines protect")
    rows = [(line.text, f"# {line.where}") for line in found.lines]
    lines = "".join(f"{line}\n" for line in columns(rows, indent="    "))
    notes = "".join(f"autockpt: {note}\n" for note in found.notes)
    return f"{said}autockpt: `import autockpt` at the top and {protect} it:\n\n{lines}\n{notes}"


def _adapter_line(adapter: Adapter, name: str) -> str:
    """The loop is a framework's: the line of its adapter."""
    line, where = adapter.line.format(name=name), adapter.where.format(name=name)
    return (
        f"autockpt: it trains with {adapter.framework}. `import autockpt` at the top and one line "
        f"protect it,\nautockpt: {where} (docs/howto/frameworks/adapters.md):\n\n    {line}\n\n"
    )


def lines_to_add(source: str) -> Advice:
    """The lines for one source text; none where it does not say enough."""
    try:
        script = Script(source)
    except SyntaxError:
        return Advice()
    for steps in script.steps():
        if steps.loops and (attach := script.attach(steps)):
            return _around(script, steps, attach)
    return Advice()


# ---------------------------------------------------------------------- the loops


def _around(script: Script, steps: Steps, attach: str) -> Advice:
    """The lines around the loop of an optimizer."""
    outer, inner = steps.loops[0], steps.loops[-1]
    found = None
    if isinstance(outer, ast.While):
        found = _while(script, steps, outer, attach)
    elif len(steps.loops) == 1:
        found = _single(script, steps, outer, attach)
    elif len(steps.loops) == 2 and isinstance(inner, ast.For):
        found = _nested(script, steps, outer, inner, attach)
    found = found or _at_the_end(inner, outer, attach)
    loaders = script.loaders(steps.scope)
    if not loaders or "data=" in found.lines[0].text:
        return found
    kept = f"the position in {loaders[0]} is not kept: that takes attach(data={loaders[0]})"
    kept += " and ckpt.batches(total)"
    return Advice(lines=found.lines, notes=(*found.notes, kept))


def _single(script: Script, steps: Steps, loop: ast.For, attach: str) -> Advice | None:
    drawn = _drawn(script, steps, loop)
    span = _span(script.shown(loop.iter, steps.scope))
    if span is not None and span.start == "0":
        if drawn is None:
            header = f"for {ast.unparse(loop.target)} in ckpt.steps({span.stop}):"
            return Advice(lines=(_attach(attach, loop), _instead(script, loop, header)))
        line, iterator, loader = drawn
        batch = ast.unparse(line.targets[0])
        header = f"for {ast.unparse(loop.target)}, batch in ckpt.batches({span.stop}):"
        taken = _instead(script, line, f"{batch} = batch")
        # Else it would draw an order that no loop uses.
        spared = _instead(script, iterator, f"{ast.unparse(iterator.targets[0])} = None")
        lines = (_attach(attach, loop, loader), _instead(script, loop, header), taken, spared)
        return Advice(lines=lines)
    return _over_data(script, steps, None, loop, attach)


def _nested(
    script: Script, steps: Steps, outer: ast.For, inner: ast.For, attach: str
) -> Advice | None:
    """Epochs around batches."""
    span = _span(script.shown(outer.iter, steps.scope))
    if span is None:
        return None
    return _over_data(script, steps, outer, inner, attach)


def _over_data(
    script: Script, steps: Steps, outer: ast.For | None, inner: ast.For, attach: str
) -> Advice | None:
    """Batches of a loader or a list, in one epoch or several."""
    index, batch, over = _parts(inner, script, steps.scope)
    loader = script.is_loader(over, steps.scope)
    if not loader and not script.is_list(over, steps.scope):
        return None
    source = ast.unparse(over)
    each = f"len({source})"
    more: list[str] = []
    taken = _names(inner) | (set() if outer is None else _names(outer))
    step = _free("step", taken | {batch})
    if index and _uses(inner.body, index):
        more.append(f"{index} = {step} % {each}")
    if not loader:
        more.append(f"{batch} = {source}[{step} % {each}]")
    what = f"for {step}, {batch} in ckpt.batches" if loader else f"for {step} in ckpt.steps"
    data = source if loader else ""
    span = None if outer is None else _span(script.shown(outer.iter, steps.scope))
    if outer is None or span is None:
        lines = [_attach(attach, inner, data), _instead(script, inner, f"{what}({each}):")]
        return Advice(lines=(*lines, *_inside(inner, more)))
    total, epoch = f"{span.count} * {each}", ast.unparse(outer.target)
    lines = [_attach(attach, outer, data)]
    if len(outer.body) == 1 and not outer.orelse and not _uses(inner.body, epoch):
        return Advice(
            lines=(*lines, _instead(script, inner, f"{what}({total}):"), *_inside(inner, more))
        )
    epoch = epoch if isinstance(outer.target, ast.Name) and epoch != "_" else "epoch"
    began = f"ckpt.step_count // {each}"
    first = began if span.start == "0" else f"{_held(span.start)} + {began}"
    until = f"({epoch} + 1) * {each}"
    if span.start != "0":
        until = f"({epoch} + 1 - {_held(span.start)}) * {each}"
        until = f"{epoch} * {each}" if span.start == "1" else until
    lines.append(_instead(script, outer, f"for {epoch} in range({first}, {span.stop}):"))
    lines.append(_instead(script, inner, f"{what}({total}, until={until}):"))
    notes = []
    ahead = outer.body[: outer.body.index(inner)] if inner in outer.body else []
    for node in ahead:
        if any(isinstance(n, ast.Call) and last_name(n.func) in DRAWS for n in ast.walk(node)):
            notes.append(
                f"what line {node.lineno} draws for an epoch is drawn anew where a restart goes on "
                "within one"
            )
    return Advice(lines=(*lines, *_inside(inner, more)), notes=tuple(notes))


def _while(script: Script, steps: Steps, loop: ast.While, attach: str) -> Advice | None:
    """A counter that goes up once an iteration starts where the training was."""
    compared = {
        ast.unparse(node.left)
        for node in ast.walk(loop)
        if isinstance(node, ast.Compare) and is_name(node.left)
    }
    counted = [
        node
        for node in ast.walk(loop)
        if isinstance(node, ast.AugAssign)
        and isinstance(node.op, ast.Add)
        and isinstance(node.value, ast.Constant)
        and node.value.value == 1
    ]
    counted.sort(key=lambda node: ast.unparse(node.target) not in compared)
    if not counted or ast.unparse(counted[0].target) not in compared:
        return None
    count, name = counted[0], ast.unparse(counted[0].target)
    if sum(ast.unparse(node.target) == name for node in counted) > 1:
        return None
    inner, bound = steps.loops[-1], _bound(loop.test, name)
    data, batches = "", []
    if isinstance(inner, ast.For) and len(steps.loops) == 2 and bound:
        index, batch, over = _parts(inner, script, steps.scope)
        if not index and script.is_loader(over, steps.scope):
            data = ast.unparse(over)
            batches = [_instead(script, inner, f"for _, {batch} in ckpt.batches({bound}):")]
    lines = [
        _attach(attach, loop, data),
        Line(text=f"{name} += ckpt.step_count", place="before", number=loop.lineno),
        *batches,
        _instead(script, count, f"{name} += 1; ckpt.step()"),
    ]
    return Advice(lines=tuple(lines))


def _bound(test: ast.expr, name: str) -> str:
    """N of `name < N`."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and ast.unparse(test.left) == name:
        if isinstance(test.ops[0], ast.Lt | ast.NotEq):
            return ast.unparse(test.comparators[0])
        if isinstance(test.ops[0], ast.LtE):
            return f"{ast.unparse(test.comparators[0])} + 1"
    return ""


def _at_the_end(inner: Loop, outer: Loop, attach: str) -> Advice:
    """Count iterations of any loop; its start is the script's."""
    last = inner.body[-1]
    line = Line(text="ckpt.step()", place="behind", number=last.end_lineno or last.lineno)
    return Advice(
        lines=(_attach(attach, outer), line),
        notes=(
            "let the loop begin at ckpt.step_count: a restart that would train wrongly is refused "
            "until it does (exit code 91)",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A range with steps of one."""

    start: str
    stop: str

    @property
    def count(self) -> str:
        """How many there are."""
        if self.start == "0":
            return _held(self.stop)
        return f"len(range({self.start}, {self.stop}))"


def _held(text: str) -> str:
    """As a factor."""
    node = ast.parse(text, mode="eval").body
    return f"({text})" if isinstance(node, ast.BinOp | ast.IfExp | ast.BoolOp) else text


def _span(over: ast.expr) -> _Span | None:
    if not isinstance(over, ast.Call) or last_name(over.func) != "range" or over.keywords:
        return None
    arguments = [ast.unparse(argument) for argument in over.args]
    if len(arguments) == 1:
        return _Span(start="0", stop=arguments[0])
    return _Span(start=arguments[0], stop=arguments[1]) if len(arguments) == 2 else None


def _parts(loop: ast.For, script: Script, scope: Scope) -> tuple[str, str, ast.expr]:
    """Return (index, batch, iterated object); sees through enumerate and progress bars."""
    target: ast.expr = loop.target
    over, index = script.shown(loop.iter, scope), ""
    if isinstance(over, ast.Call) and last_name(over.func) == "enumerate" and len(over.args) == 1:
        over = script.shown(over.args[0], scope)
        if isinstance(target, ast.Tuple) and len(target.elts) == 2:
            index, target = ast.unparse(target.elts[0]), target.elts[1]
    return index, ast.unparse(target), over


def _drawn(
    script: Script, steps: Steps, loop: ast.For
) -> tuple[ast.Assign, ast.Assign, str] | None:
    """`x, y = next(it)` in the body of a loop, `it = iter(loader)`, and the loader."""
    for node in loop.body:
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        call = node.value
        if last_name(call.func) != "next" or len(call.args) != 1:
            continue
        made = script.assigned(ast.unparse(call.args[0]), steps.scope)
        if made is None or not isinstance(made.value, ast.Call):
            continue
        over = made.value.args
        if last_name(made.value.func) == "iter" and over and script.is_loader(over[0], steps.scope):
            return node, made, ast.unparse(over[0])
    return None


# ---------------------------------------------------------------------- small parts


def _attach(arguments: str, loop: Loop, data: str = "") -> Line:
    """Ahead of a loop."""
    given = arguments + (f", data={data}" if data else "")
    text = f"ckpt = autockpt.attach({given})"
    return Line(text=text, place="before", number=loop.lineno)


def _instead(script: Script, node: ast.stmt, text: str) -> Line:
    return Line(
        text=text, place="instead of", number=node.lineno, replaces=script.line(node.lineno)
    )


def _inside(loop: ast.For, texts: Sequence[str]) -> list[Line]:
    return [Line(text=text, place="in", number=loop.lineno, inside=True) for text in texts]


def _names(node: ast.AST) -> set[str]:
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _uses(body: Sequence[ast.AST], name: str) -> bool:
    return any(name in _names(node) for node in body)


def _free(name: str, taken: set[str]) -> str:
    """A name that the loop does not use."""
    return name if name not in taken else f"{name}_of_run"
