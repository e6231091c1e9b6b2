"""Values: what every record that is written somewhere keeps, and what its reader refuses."""

import contextlib
import dataclasses
import functools
import json
import re
import typing
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autockpt.values.errors import ConfigError
from autockpt.values.record import from_data, from_json, to_data, to_json
from tests.contracts.records import records, wrong_value

QUICK = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


@functools.cache
def example(cls: type) -> Any:
    """One value of a record class, always the same."""
    drawn: list[Any] = []

    @settings(
        max_examples=1, database=None, derandomize=True, deadline=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(records(cls))
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn[0]


class RecordContract:
    """Subclass and set `record`."""

    record: ClassVar[type]

    def fields(self) -> "tuple[dataclasses.Field[Any], ...]":
        return dataclasses.fields(self.record)

    def refuses(self, data: Any, message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            from_json(self.record, json.dumps(data), where="a/file.json")

    @QUICK
    @given(data=st.data())
    def test_what_was_written_reads_back_equal(self, data: st.DataObject) -> None:
        """JSON and back is the identity; the text is canonical: equal values digest alike."""
        value = data.draw(records(self.record))
        text = to_json(value)
        again = from_json(self.record, text)
        assert to_json(again) == text
        assert type(again) is self.record
        if "nan" not in text:
            assert again == value
        assert from_data(self.record, json.loads(to_json(value, indent=2))) is not None

    @QUICK
    @given(data=st.data())
    def test_any_flipped_byte_is_refused_or_is_a_record(self, data: st.DataObject) -> None:
        """A damaged file never raises anything but ConfigError."""
        text = bytearray(to_json(example(self.record)).encode())
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] ^= data.draw(st.integers(1, 255))
        with contextlib.suppress(ConfigError):
            assert isinstance(from_json(self.record, bytes(text)), self.record)

    def test_a_record_is_frozen(self) -> None:
        """Nobody changes a value that somebody else holds."""
        value = example(self.record)
        name = self.fields()[0].name
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(value, name, None)

    def test_an_unknown_field_is_refused_by_name(self) -> None:
        """A newer or misspelt field is not dropped silently."""
        data = to_data(example(self.record)) | {"surprise": 1}
        self.refuses(data, r"a/file\.json: unknown field 'surprise'")

    def test_every_missing_field_is_refused_by_name(self) -> None:
        """A field without a default must be there, and so must the schema version."""
        for field in self.fields():
            required = field.default is field.default_factory is dataclasses.MISSING
            data = to_data(example(self.record))
            del data[field.name]
            if field.name == "schema_version":
                self.refuses(data, "schema_version None")
            elif required:
                self.refuses(data, rf"a/file\.json: field '{field.name}' .* is missing")

    def test_a_wrong_type_is_refused_and_its_path_named(self) -> None:
        """The message says which field of which file."""
        hints = typing.get_type_hints(self.record)
        for field in self.fields():
            if field.name == "schema_version" or hints[field.name] is Any:
                continue
            data = to_data(example(self.record))
            data[field.name] = wrong_value(hints[field.name])
            self.refuses(data, rf"a/file\.json\.{field.name}.*: expected")

    def test_numbers_and_truth_are_not_confused(self) -> None:
        """true is no 1, 1 is no true, and text is no number."""
        hints = typing.get_type_hints(self.record)
        for field in self.fields():
            path = re.escape(f"a/file.json.{field.name}: expected")
            wrong = {int: [True, 1.5, "1"], float: [True, "1.0"], bool: [1, "true"], str: [1, None]}
            for value in wrong.get(hints[field.name], []):
                if field.name != "schema_version":
                    self.refuses(to_data(example(self.record)) | {field.name: value}, path)

    def test_another_schema_version_is_refused(self) -> None:
        """Unknown versions are not guessed at."""
        if any(field.name == "schema_version" for field in self.fields()):
            for version in (0, 2, "1", None, True):
                data = to_data(example(self.record)) | {"schema_version": version}
                self.refuses(data, "schema_version")

    def test_a_key_that_stands_twice_is_refused(self) -> None:
        """Two readers must not see two different values in one file."""
        text = to_json(example(self.record))
        name = self.fields()[0].name
        doubled = text[:-1] + f',"{name}":null}}'
        with pytest.raises(ConfigError, match=f"key '{name}' stands twice"):
            from_json(self.record, doubled, where="a/file.json")

    @pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
    def test_words_that_are_no_json_are_refused(self, word: str) -> None:
        """A file that other readers cannot open is no JSON file."""
        text = to_json(example(self.record))[:-1] + f',"x":{word}}}'
        with pytest.raises(ConfigError, match=f"a/file.json: not valid JSON: {word}"):
            from_json(self.record, text, where="a/file.json")

    @pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"3", b"null", b"{", b"[" * 100_000])
    def test_what_is_no_object_is_refused(self, text: bytes) -> None:
        """Empty, binary, truncated and endlessly nested files."""
        with pytest.raises(ConfigError, match=r"a/file\.json: "):
            from_json(self.record, text, where="a/file.json")
