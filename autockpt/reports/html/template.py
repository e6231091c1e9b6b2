"""The page's templates and assets: Jinja2 with escaping always on.

A value in a template is text unless it is markup already, as in `escape`.  No content lives here.
"""

from collections.abc import Callable
from typing import Any

import jinja2

from autockpt.reports.html.escape import UNIT, Html, escape

_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("autockpt.reports.html", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: Html("") if value is None else escape(value),
    trim_blocks=True,
    lstrip_blocks=True,
)


def prose(text: str) -> str:
    """Text in which a number and its unit stay on one line."""
    return UNIT.sub("\\1\u00a0\\2", text)


_TEMPLATES.filters["prose"] = prose


def fill(name: str, **values: Any) -> Html:
    """The markup of a template with these values."""
    return Html(_TEMPLATES.get_template(name).render(values))


def macro(name: str) -> Callable[..., Html]:
    """A macro of `macros.html`, to be called from Python."""
    return lambda *args, **named: Html(_macros(name)(*args, **named))


def asset(name: str) -> Html:
    """A style sheet or script as it stands in its file."""
    loader = _TEMPLATES.loader
    assert loader is not None
    return Html(loader.get_source(_TEMPLATES, name)[0])


def _macros(name: str) -> Callable[..., str]:
    found: Callable[..., str] = getattr(_TEMPLATES.get_template("macros.html").module, name)
    return found
