"""YAML as people write it, by PyYAML's safe loader; errors name their place.

PyYAML looks through all open brackets at every token, so two kilobytes of them took 1.6 s before
its recursion ended.  Nesting that is deeper than any real file is refused.
"""

from typing import Any

import yaml

from autockpt.values.errors import ConfigError

DEEPEST = 100
"""Brackets within brackets."""


class Loader(yaml.SafeLoader):
    """Refuses deep brackets with a ScannerError, which is a YAMLError."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """An opening bracket."""
        if self.flow_level >= DEEPEST:
            said = f"brackets are nested deeper than {DEEPEST}"
            raise yaml.scanner.ScannerError(None, None, said, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)


def load(text: str, where: str, loader: type[Loader] = Loader) -> Any:
    """Plain values.  `where`: the file, for the ConfigError that says why it is no YAML."""
    try:
        return yaml.load(text, Loader=loader)
    except RecursionError:
        raise ConfigError(f"{where}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as error:  # a ValueError is a date that is none
        raise ConfigError(f"{where}: not valid YAML: {error}") from None
