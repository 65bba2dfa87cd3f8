"""Template + candidate -> source: readable code that depends on nothing but the candidate."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2

from tuner.records import Candidate, Source, UsageError, format_value

STAGE = re.compile(r"@stage (?P<stage>[^:@]+): (?P<mode>[^@]+)@")
"""What a template's stages leave in the render that lists them."""

_COMMENTS = {"cpp": "//", "triton": "#", "gluon": "#"}


@dataclass(frozen=True, slots=True)
class Twin:
    """A render with one stage changed: wrong on purpose, to be timed and never to be used.

    Attributes:
        stage: Name of the stage.
        mode: ``"left out"`` or ``"doubled"``.
    """

    stage: str
    mode: str

    def __str__(self) -> str:
        """Return the stage and its mode."""
        return f"{self.stage}, {self.mode}"


_ITSELF = Twin("", "")
_LIST = Twin("", "list")


class Renderer:
    """Renders the templates found in a list of folders, the first match winning.

    Args:
        folders: Folders that hold one folder of templates per kernel.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._environment = jinja2.Environment(
            loader=jinja2.FileSystemLoader([str(folder) for folder in folders]),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
            autoescape=False,
        )
        self._environment.filters["spell"] = format_value

    def render(self, kernel: str, language: str, candidate: Candidate) -> Source:
        """Return the source of one candidate.

        Args:
            kernel: Name of the kernel.
            language: Language of the candidate's template.
            candidate: The choice to render.

        Raises:
            UsageError: The template is missing, malformed, or uses an unknown name.
        """
        suffix = "cpp" if language == "cpp" else "py"
        text = self._text(kernel, suffix, candidate, _ITSELF)
        return Source(kernel, language, tidy(text))

    def twins(self, kernel: str, language: str, candidate: Candidate) -> dict[Twin, Source]:
        """Return the twins of a candidate that its template offers, none if it marks no stages."""
        suffix = "cpp" if language == "cpp" else "py"
        listed = self._text(kernel, suffix, candidate, _LIST)
        twins = dict.fromkeys(Twin(**match.groupdict()) for match in STAGE.finditer(listed))
        return {
            twin: Source(
                kernel,
                language,
                f"{_COMMENTS[language]} {twin}: wrong on purpose, for the clock alone\n"
                + tidy(self._text(kernel, suffix, candidate, twin)),
            )
            for twin in twins
        }

    def _text(self, kernel: str, suffix: str, candidate: Candidate, twin: Twin) -> str:
        path = f"{kernel}/{candidate.template}.{suffix}.j2"
        parameters = dict(candidate.parameters)
        try:
            return self._environment.get_template(path).render(
                parameters,
                kernel=kernel,
                template=candidate.template,
                parameters=parameters,
                twin=twin,
            )
        except jinja2.TemplateNotFound as error:
            raise UsageError(f"templates/{error.name}: no such file") from error
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"templates/{error.name}:{error.lineno}: {error.message}") from error
        except jinja2.UndefinedError as error:
            raise UsageError(
                f"templates/{path}: {error.message}; known: {', '.join(parameters)}"
            ) from error
        except Exception as error:  # what the template's own expressions raise, or its encoding
            raise UsageError(
                f"templates/{path}: {candidate}: {type(error).__name__}: {error}"
            ) from error


def tidy(text: str) -> str:
    """Return the text without trailing blanks, doubled blank lines and lines left at its ends.

    Python keeps the two blank lines between its top-level definitions.
    """
    text = re.sub(r"[ \t]+\n", "\n", text.strip() + "\n")
    return re.sub(r"\n{4,}", "\n\n\n", text)
