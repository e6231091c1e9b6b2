"""`autockpt plan`: decide from a profile, and say why."""

import shlex

import click

from autockpt.cli.shared.options import Command, common, out_file, policy_options, repeated
from autockpt.console import Console

EXAMPLES = """
autockpt plan --profile runs/train-20260101-120000
autockpt plan --profile profile.json --policy builtin:checkfreq
autockpt plan --profile profile.json --set 'limits.stall=50 ms' --out plan.yaml
autockpt plan --profile profile.json --failures sacct.txt  # with a cluster's failures added
autockpt plan --profile profile.json --for megatron        # as flags of Megatron-LM
"""


@click.command(cls=Command, examples=EXAMPLES)
@click.option("--profile", metavar="FILE", help="A profile, or its directory.")
@policy_options
@click.option("--failures", metavar="FILE", help="A record of failures to add to the profile's.")
@click.option("--out", metavar="FILE", help="Also write the plan there, as commented YAML.")
@click.option(
    "--for", "trainer", type=click.Choice(["megatron"]),
    help="Also print the plan as flags of a trainer that writes its own checkpoints.",
)  # fmt: skip
@common
def plan(
    console: Console,
    profile: str | None,
    policy: str | None,
    settings: tuple[str, ...],
    failures: str | None,
    out: str | None,
    trainer: str | None,
) -> None:
    """Turn a profile and a policy into a plan; print every choice with its reason.

    The failures of the runs beside the profile count, those since it was taken, too.
    """

    from autockpt.cli.shared import plan_choice
    from autockpt.cli.shared.decision_text import plan_object, print_decision

    if profile is None:
        raise click.UsageError(
            "Missing option '--profile'. Without a profile, `autockpt simulate --nodes N --mtbf "
            "DURATION` answers for a job that you describe."
        )
    measured = plan_choice.read_profile(profile)
    if failures is not None:
        from autockpt.cli.shared.failure_import import with_failures_of

        measured = with_failures_of(measured, failures)
    else:
        measured = plan_choice.with_logs_beside(measured, profile)
    scale = plan_choice.Scale(
        world_size=measured.fingerprint.world_size, nodes=measured.fingerprint.nodes
    )
    goal = plan_choice.read_goal(policy, settings, scale=scale)
    decision = plan_choice.decide(measured, goal)
    if out is not None:
        from autockpt.policies.policy_file import plan_to_yaml
        from autockpt.run_directory import RunDirectory

        target = out_file(out)
        RunDirectory(target.parent).write_text(target.name, plan_to_yaml(decision))
    shown = plan_object(decision.plan, decision)
    if trainer is not None:
        from autockpt.cli.planning.megatron import megatron_object, print_flags

        shown |= megatron_object(decision.plan, measured.fingerprint)
    console.object("plan", shown)
    print_decision(console, decision)
    if trainer is not None:
        print_flags(console, decision.plan, measured.fingerprint)
        return
    keep = (
        "" if failures is None else f"{shlex.join(['autockpt', 'failures', failures])} --save && "
    )
    console.next(keep + plan_choice.next_run(repeated(("profile", "policy", "settings"))))
