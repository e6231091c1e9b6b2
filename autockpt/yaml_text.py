"""YAML as people write it: PyYAML's safe loader, nested no deeper than anybody would.

PyYAML looks through all open brackets at every token, so two kilobytes of them took 1.6 s before
its recursion ended.
"""

from typing import Any

import yaml

DEEPEST = 100
"""Brackets within brackets."""


class Loader(yaml.SafeLoader):
    """Refuses with a ScannerError, which is a YAMLError."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """An opening bracket."""
        if self.flow_level >= DEEPEST:
            said = f"brackets are nested deeper than {DEEPEST}"
            raise yaml.scanner.ScannerError(None, None, said, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


def load(text: str) -> Any:
    """Plain values.  Raises YAMLError, ValueError (of a date), RecursionError."""
    return yaml.load(text, Loader=Loader)
