"""docs/concepts/policy.md names a test for each rule: every one of them is there."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[2]
DOCUMENT = (TESTS.parent / "docs" / "concepts" / "policy.md").read_text(encoding="utf-8")
SOURCE = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
NAMED = sorted(set(re.findall(r"\btest_\w+(?:\.py|\*)?", DOCUMENT)))


def test_the_document_names_tests() -> None:
    """The search finds what a reader sees."""
    assert len(NAMED) > 60


@pytest.mark.parametrize("name", NAMED)
def test_every_named_test_exists(name: str) -> None:
    """A file, a function, or the beginning of several."""
    if name.endswith(".py"):
        assert list(TESTS.rglob(name)), f"no file {name} under tests/"
    else:
        pattern = rf"^\s*def {re.escape(name.rstrip('*'))}" + ("" if name.endswith("*") else r"\b")
        assert re.search(pattern, SOURCE, re.M), f"no test {name}"
