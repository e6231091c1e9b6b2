"""The advice: findings, the policy and its reasons, and the method."""

from autockpt.reports.findings import Finding
from autockpt.reports.html.escape import Child, Html, join, tag
from autockpt.reports.html.sections.parts import Section, copyable, details, table
from autockpt.reports.html.template import prose
from autockpt.reports.model import ReportModel
from autockpt.reports.verdict import worth
from autockpt.values.plan import Choice
from autockpt.values.profile import Profile
from autockpt.values.units import format_fraction


def findings(model: ReportModel) -> Section | None:
    """Ranked problems; what passed folds away."""
    if not model.findings:
        return None
    open_ = [finding for finding in model.findings if not finding.passed]
    passed = [finding for finding in model.findings if finding.passed]
    rows = [(f.title, f.evidence, tag("code", f.id)) for f in passed]
    body = join(
        tag("ol", *[_finding(f, model.profile) for f in open_], class_="findings")
        if open_
        else tag("p", "Nothing to improve was found."),
        details(f"{len(passed)} checks passed",
                table(("check", "evidence", "id"), rows, caption="Passed checks"))
        if passed
        else None,
    )  # fmt: skip
    return Section(id="findings", title="Findings", body=body)


def policy(model: ReportModel) -> Section | None:
    """Each decision with its reason and runner-up, then the file."""
    decision = model.decision
    if decision is None and not model.plan_yaml:
        return None
    rows = [_choice(choice) for choice in decision.choices] if decision else []
    run = model.verdict.command if model.kind == "profile" else ""
    body = join(
        table(("decision", "chosen", "because", "runner-up"), rows,
              caption="Each choice, its reason, and what the runner-up would lose")
        if rows
        else None,
        details("The plan as a file",
                copyable(model.plan_yaml, element_id="plan-yaml", what="the policy"))
        if model.plan_yaml
        else None,
        details("Difference to the current policy", tag("pre", tag("code", _diff(model))))
        if model.policy_diff
        else None,
        join(tag("h3", "Train under it"),
             copyable(run, element_id="run-command", what="the command")) if run else None,
    )  # fmt: skip
    return Section(id="policy", title="Decisions and policy", body=body)


def method(model: ReportModel) -> Section:
    """Environment, and the missing measurements."""
    profile = model.profile
    versions = [(name, version) for name, version in model.versions.items()]
    status = [(name, value) for name, value in model.status.items()]
    body = join(
        tag("ul", *[tag("li", prose(warning)) for warning in model.warnings])
        if model.warnings
        else None,
        details("Versions", table(("software", "version"), versions, caption="Versions"))
        if versions
        else None,
        details("status.json",
                table(("status", ""), status, caption="status.json when this was written"))
        if status
        else None,
        _fingerprint(profile) if profile else None,
        tag("p", "All figures of this page, and those behind them, are embedded in it as JSON "
            "(element report-data); autockpt report reads them again.", class_="lead"),
    )  # fmt: skip
    return Section(id="method", title="Environment and method", body=body)


def _finding(finding: Finding, profile: Profile | None) -> Html:
    saving: Child = None
    if finding.saving:
        unit = worth(finding.saving, profile).removeprefix("Saves ").rstrip(".")
        saving = tag("div", f"about {format_fraction(finding.saving)} of the time",
                     tag("span", unit) if unit else None, class_="save")  # fmt: skip
    return tag(
        "li",
        tag("span", finding.severity, class_=f"level {finding.severity}"),
        tag("h3", finding.title),
        saving if saving is not None else tag("span"),
        tag("p", prose(finding.evidence)),
        tag("p", tag("b", "Do: "), finding.fix, " ", tag("code", finding.id, class_="dim")),
        id=f"finding-{finding.id}",
    )


def _choice(choice: Choice) -> tuple[Child, ...]:
    runner = choice.runner_up or "\u2013"
    if choice.runner_up_waste is not None and choice.chosen_waste is not None:
        more = choice.runner_up_waste - choice.chosen_waste
        runner += f" ({'+' if more >= 0 else ''}{format_fraction(more)} lost)"
    because = choice.reason + (f" Limited by {choice.binding}." if choice.binding else "")
    return (choice.name, choice.chosen, because, runner)


def _diff(model: ReportModel) -> Html:
    lines = []
    for line in model.policy_diff.splitlines(keepends=True):
        class_ = {"+": "add", "-": "del"}.get(line[:1])
        lines.append(tag("span", line, class_=class_) if class_ else join(line))
    return join(*lines)


def _fingerprint(profile: Profile) -> Html:
    mark = profile.fingerprint
    rows = [
        ("fingerprint", mark.digest),
        ("measured", profile.created),
        ("with", profile.command),
        ("CPU", f"{mark.cpu}, {mark.cores} cores"),
        ("GPUs", ", ".join(dict.fromkeys(mark.gpus)) or "none"),
        ("torch", mark.torch_version),
        ("storage", mark.storage),
        ("layout", mark.layout_digest),
    ]
    return details("The profile's fingerprint",
                   table(("", ""), rows, caption="What this profile is valid for"))  # fmt: skip
