"""Sources for reading: highlighted, and as a difference."""

from __future__ import annotations

import difflib
import re

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name

from tuner.records import Source

_LIGHT, _DARK = "default", "github-dark"
_PLAIN = re.compile(r'<span class="(?:w|p|n)">(.*?)</span>')
"""Blanks, punctuation and names, which look like the rest: marking them triples a page."""


def source_html(source: Source) -> str:
    """Return a source as highlighted HTML."""
    return _html(source.text, "cpp" if source.language == "cpp" else "python")


def difference_html(default: Source, winner: Source) -> str:
    """Return the unified difference from the default as highlighted HTML; empty if none."""
    lines = difflib.unified_diff(
        default.text.splitlines(keepends=True),
        winner.text.splitlines(keepends=True),
        "default",
        "winner",
        n=2,
    )
    text = "".join(lines)
    return _html(text, "diff") if text else ""


def styles() -> str:
    """Return the style sheet of highlighted code, for light and for dark pages."""
    light = HtmlFormatter(style=_LIGHT).get_style_defs(".highlight")
    dark = HtmlFormatter(style=_DARK).get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"


def _html(text: str, lexer: str) -> str:
    html = str(highlight(text, get_lexer_by_name(lexer), HtmlFormatter(nowrap=True)))
    return _PLAIN.sub(r"\1", html)
