"""The shell of a page: style sheet, script and the policy that lets nothing else run.

The page is one file, asks no network for anything, and is complete without its script.  A content
security policy names the one script by its hash, so injected markup could not run even if there
were any.  Colours come in pairs for light and dark; print is always light and opens folded blocks.
"""

import base64
import hashlib
from collections.abc import Sequence
from typing import Any

from autockpt.reports.analysis import what_if
from autockpt.reports.html.escape import Html
from autockpt.reports.html.sections.parts import Section
from autockpt.reports.html.template import asset, fill


def script() -> str:
    """The page's script with the formulas that Python has, so that both compute the same."""
    return asset("page.js").replace("/* formulas */", what_if.javascript())


def policy(code: str) -> str:
    """Content security policy: nothing from anywhere, this script only."""
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    return (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )


def page(template: str, *, sections: Sequence[Section], data: Html, **values: Any) -> str:
    """A document that extends `page.html` around the sections."""
    code = script()
    shell = {"policy": Html(policy(code)), "style": asset("page.css"), "script": Html(code)}
    return f"{fill(template, sections=sections, data=data, **shell, **values)}\n"
