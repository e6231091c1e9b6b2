"""Policy files: YAML in, a Goal with the place of every value out; and plan.yaml both ways.

The only part of the policies that knows YAML.  The keys stand in `values.goal`.
"""

from autockpt.policies.policy_file.layers import (
    EffectiveValue,
    Policy,
    goal_of_environment,
    load_policy,
    parse_policy,
    variables,
    with_settings,
)
from autockpt.policies.policy_file.plan_yaml import plan_from_yaml, plan_to_yaml
from autockpt.policies.policy_file.reference import init_text, keys_table, schema
from autockpt.policies.policy_file.table import KEYS, KeyTable
from autockpt.policies.policy_file.texts import Difference, diff, explain
from autockpt.policies.policy_file.written import as_yaml, settings_between

__all__ = [
    "KEYS",
    "Difference",
    "EffectiveValue",
    "KeyTable",
    "Policy",
    "as_yaml",
    "diff",
    "explain",
    "goal_of_environment",
    "init_text",
    "keys_table",
    "load_policy",
    "parse_policy",
    "plan_from_yaml",
    "plan_to_yaml",
    "schema",
    "settings_between",
    "variables",
    "with_settings",
]
