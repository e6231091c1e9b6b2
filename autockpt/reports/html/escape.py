"""Markup that is safe by construction: everything is text until `tag` says otherwise.

`Html` marks a string as markup.  `tag` escapes every child and attribute that is not markup.  So a
name, a path or a reason from a user can never become an element.  Templates escape by the same rule
(`template`).  Constants of the page itself are wrapped in `Html` where they stand.
"""

import html
import re

VOID = frozenset({"meta", "input", "br", "hr", "col", "link", "img"})

UNIT = re.compile(r"(\d) (%|[kMGT]?B(?:/s)?|us|ms|s|min|h|d)(?!\w)")
"""A number and its unit, which belong on one line."""
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"
)
_JSON_ESCAPES = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


class Html(str):
    """A string that is markup already."""

    __slots__ = ()

    def __html__(self) -> str:
        """Markup, as Jinja2 and `escape` ask for it."""
        return self


Child = Html | str | int | float | None
Attribute = str | int | float | bool | None


def plain(text: object) -> str:
    """`text` without characters that steer a terminal, reorder a line or break an encoder.

    Control characters (escape sequences among them), bidirectional overrides and lone surrogates
    become U+FFFD; tab and newline stay.
    """
    return _CONTROL.sub("\ufffd", str(text))


def escape(text: object) -> Html:
    """`text` as markup that shows it; `Html` passes unchanged."""
    if isinstance(text, Html):
        return text
    if hasattr(text, "__html__"):
        return Html(text.__html__())
    if isinstance(text, float):
        return Html(short(text))
    return Html(html.escape(plain(text), quote=True))


def short(number: float) -> str:
    """A coordinate with two decimals at most, e.g. 12.5."""
    return f"{number:.2f}".rstrip("0").rstrip(".") if "." in f"{number:.2f}" else f"{number:.2f}"


def join(*children: Child) -> Html:
    """All children, escaped, one after the other; None is nothing."""
    return Html("".join(escape(child) for child in children if child is not None))


def tag(element: str, /, *children: Child, **attributes: Attribute) -> Html:
    """One element; `class_` is class, `stroke_width` stroke-width; None and False are left out."""
    parts = [element]
    for name, value in attributes.items():
        if value is None or value is False:
            continue
        spelled = name.rstrip("_").replace("_", "-")
        parts.append(spelled if value is True else f'{spelled}="{escape(value)}"')
    opening = f"<{' '.join(parts)}>"
    return Html(opening if element in VOID else f"{opening}{join(*children)}</{element}>")


def json_script(text: str, *, element_id: str) -> Html:
    """JSON as a data block that no content can end or turn into markup."""
    for character, replacement in _JSON_ESCAPES.items():
        text = text.replace(character, replacement)
    return Html(f'<script type="application/json" id="{escape(element_id)}">{text}</script>')
