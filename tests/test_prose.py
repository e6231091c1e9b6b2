"""The words of the house: docs, docstrings and messages in plain English, and one word per thing.

`python -m tests.test_prose [FILE...]` shows the sentences that break a rule.
"""

import ast
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_SENTENCE = 25
"""Words."""

NOUN_CLAUSES = re.compile(
    r"\b(?:nobody|somebody|anybody|whoever|whomever|whatever|those (?:that|who|which|of))\b"
    r"|(?:^|[:;,] |\b(?:is|are|of|by|from|to|with|for|and|than|as) )what (?:is|are|was|were|has|had"
    r"|it|they|he|a|an|the|there|one|no|can|could|will|would|must|may)\b"
    r"|(?:^|[:;,] |\b(?:of|by|from|to|with|and) )who (?:is|are|was|has|it)\b",
    re.IGNORECASE,
)
"""Clauses that stand for a noun: name the thing."""

PASSIVES = re.compile(r"\b(?:is|are|was|were|be|been) (?:said|told|heard)\b", re.IGNORECASE)
"""A program logs, reports or receives."""

GLOSSARY = ROOT / "docs" / "concepts" / "glossary.md"


def replaced_words() -> list[str]:
    """Return the words of the glossary's last column: another word stands for them."""
    rows = [line.split("|") for line in GLOSSARY.read_text(encoding="utf-8").splitlines()]
    cells = [row[4].strip() for row in rows if len(row) == 6]
    return [cell for cell in cells if cell.strip("-") and cell != "not"]


OLD_WORDS = re.compile(rf"\b(?:{'|'.join(replaced_words())})s?\b", re.IGNORECASE)
"""Words that the glossary replaces."""

MESSAGE_CALLS = {
    "say",
    "_say",
    "_degraded",
    "report_degraded",
    "warn",
    "warning",
    "info",
    "error",
    "fail",
}


def prose_of(path: Path) -> Iterator[str]:
    """Yield the paragraphs that people read: of a document, or docstrings and messages of code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(text)
        return
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield from _paragraphs(inspect.cleandoc(node.value.value))
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield from _texts(node.exc)
        elif isinstance(node, ast.Call) and _name_of(node.func) in MESSAGE_CALLS:
            yield from _texts(node)


def _name_of(function: ast.expr) -> str:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _texts(call: ast.Call) -> Iterator[str]:
    """Yield the strings among the arguments; what is formatted into them counts as one word."""
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value
        elif isinstance(argument, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X"
                for part in argument.values
            )


def _paragraphs(text: str) -> Iterator[str]:
    """Yield paragraphs and list items; code blocks, tables and headings are none."""
    text = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        bare = line.strip()
        begins = re.match(r"(?:[*+-]|\d+\.)\s+", bare)
        code = line.startswith("    ") and not lines
        if code:
            continue
        if not bare or bare.startswith(("|", "#")) or begins:
            if lines:
                yield " ".join(lines)
            lines = [bare[begins.end() :]] if begins else []
        else:
            lines.append(bare)
    if lines:
        yield " ".join(lines)


def sentences(paragraph: str) -> Iterator[str]:
    """Yield the sentences; code, links and parentheses count by their words."""
    plain = re.sub(r"`[^`]*`", "X", paragraph)
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    plain = re.sub(r"\b(?:e\.g|i\.e|vs|cf|etc)\.", "X", plain)
    for sentence in re.split(r"(?<=[.!?])\**\s+", plain):
        if sentence.strip():
            yield sentence.strip()


def complaints(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (rule, sentence) of a file."""
    for paragraph in prose_of(path):
        for sentence in sentences(paragraph):
            if len(re.findall(r"[A-Za-z0-9][\w'%.-]*", sentence)) > LONGEST_SENTENCE:
                yield "long sentence", sentence
            for rule, pattern in (
                ("noun clause", NOUN_CLAUSES),
                ("passive report", PASSIVES),
                ("old word", OLD_WORDS),
            ):
                for _ in pattern.finditer(sentence):
                    yield rule, sentence


def test_the_glossary_names_what_the_code_has() -> None:
    """Each word of its second column that is a class stands in the package."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "autockpt").rglob("*.py"))
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", GLOSSARY.read_text(encoding="utf-8")))
    assert [name for name in sorted(named) if not re.search(rf"\b{name}\b", text)] == []
    assert len(replaced_words()) >= 4


def files() -> list[Path]:
    """Return the documents and modules that are held to the rules."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    found = [path for path in found if path != GLOSSARY]
    return sorted([*found, *(ROOT / "autockpt").rglob("*.py"), *(ROOT / "examples").rglob("*.py")])


def test_each_file_reads_plainly() -> None:
    """Each sentence of documents, docstrings and messages keeps every rule."""
    broken = [
        f"{path.relative_to(ROOT)}: {rule}: {sentence}"
        for path in files()
        for rule, sentence in complaints(path)
    ]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("One two. " + "word " * 26 + "end.", "long sentence"),
        ("It waits for what is there.", "noun clause"),
        ("Nobody reads it.", "noun clause"),
        ("A death is said at once.", "passive report"),
        ("The forecast of a lap.", "old word"),
    ],
)
def test_each_rule_finds_its_sentence(tmp_path: Path, text: str, rule: str) -> None:
    """In a document, a docstring and a message."""
    document, module = tmp_path / "a.md", tmp_path / "a.py"
    document.write_text(f"# Head\n\n{text}\n\n```\n{text}\n```\n")
    module.write_text(f'"""{text}"""\n\n\ndef f() -> None:\n    raise ValueError("{text}")\n')
    assert [found for found, _ in complaints(document)] == [rule]
    assert [found for found, _ in complaints(module)] == [rule, rule]


def test_plain_sentences_pass(tmp_path: Path) -> None:
    """Tables, code and short sentences are not counted."""
    document = tmp_path / "a.md"
    document.write_text("The keeper writes the shard.\n\n| nobody | is said |\n")
    assert list(complaints(document)) == []


if __name__ == "__main__":
    for named in [Path(name) for name in sys.argv[1:]] or files():
        for which, sentence_ in complaints(named):
            print(f"{named}: {which}: {sentence_}")
