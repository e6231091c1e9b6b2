"""The report for programs: the model itself, versioned, and back again."""

from autockpt.reports.model import ReportModel
from autockpt.values.record import from_json, to_json


def render(model: ReportModel) -> str:
    """Canonical JSON with schema_version; one line per value so that it can be compared."""
    return to_json(model, indent=1) + "\n"


def read(text: str | bytes, *, where: str = "report") -> ReportModel:
    """The model written by `render`.  Raises ConfigError naming `where` and the field."""
    return from_json(ReportModel, text, where=where)
