"""Policy files: YAML in, a Goal with the place of every value out; and plan.yaml both ways.

The only part of the policies that knows pydantic and YAML.
"""

from autockpt.policies.policy_file.layers import (
    EffectiveValue,
    Policy,
    load_policy,
    parse_policy,
    with_settings,
)
from autockpt.policies.policy_file.plan_yaml import plan_from_yaml, plan_to_yaml
from autockpt.policies.policy_file.texts import Difference, diff, explain, init_text, schema
from autockpt.policies.policy_file.written import as_yaml, quoted, settings_between

__all__ = [
    "Difference",
    "EffectiveValue",
    "Policy",
    "as_yaml",
    "diff",
    "explain",
    "init_text",
    "load_policy",
    "parse_policy",
    "plan_from_yaml",
    "plan_to_yaml",
    "quoted",
    "schema",
    "settings_between",
    "with_settings",
]
