"""The values of a Goal as one writes them in a policy, without loss."""

from collections.abc import Mapping

from autockpt.policies.policy_file.table import KEYS, KeyTable
from autockpt.values.goal import Goal


def settings_between(before: Goal, after: Goal, table: KeyTable = KEYS) -> dict[str, str]:
    """The values by key that make `after` of `before`, each as YAML and --set take it."""
    old, new = table.texts_of(before), table.texts_of(after)
    return {key: text for key, text in new.items() if text != old[key]}


def as_yaml(settings: Mapping[str, str]) -> list[str]:
    """Lines of a policy file with these values."""
    lines: list[str] = []
    sections = dict.fromkeys(key.rpartition(".")[0] for key in settings)
    for section in sorted(sections, key=bool):
        lines += [f"{section}:"] if section else []
        for key, text in settings.items():
            above, _, name = key.rpartition(".")
            lines += [f"{'  ' * bool(section)}{name}: {text}"] if above == section else []
    return lines
