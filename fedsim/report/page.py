"""Writes the page of runs: one HTML file that opens anywhere, with nothing to fetch."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from markupsafe import Markup

from fedsim.recording.files import write_text
from fedsim.report import messages
from fedsim.report.content import Content
from fedsim.report.facts import made_with
from fedsim.report.figures import format_accuracy, format_number, format_signed, format_summary
from fedsim.report.glossary import explain_terms, mark_code, remove_turns, sentence_of, shorten, tip
from fedsim.results.reading import load_runs
from fedsim.system import paths
from fedsim.words import describe_variant, format_bound, format_claim, number_of

if TYPE_CHECKING:
    from jinja2 import Environment

_FOLDER = Path(__file__).parent


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Writes the page of a run, or of all variants of a sweep, and returns its path.

    `out` is the file to write, by default `report.html` in `folder`. A FedsimError says that
    `folder` holds no results, or a file in it is damaged; an OSError that `out` cannot be written.
    """
    return write_page([folder], Path(out) if out else Path(folder) / "report.html")


def write_page(folders: Iterable[Path | str], path: Path | str) -> Path:
    """Writes the page of all runs below `folders` to `path`, and returns it; see `write_report`."""
    write_text(Path(path), html_of(Content(load_runs(folders))))
    return Path(path)


def html_of(content: Content, *, live: bool = False, problem: str = "") -> str:
    """Returns the HTML page of `content`; a `live` page asks its server for newer figures.

    `problem` says why newer figures cannot be read, or is empty. A damaged answer is a FedsimError.
    """
    script = _text("page.js")
    return render(
        "page.html.j2",
        content,
        policy=_policy(script, live),
        script=Markup(script),  # noqa: S704 - a file of this package
        live=live,
        problem=problem,
    )


def render(template: str, content: Content, **context: object) -> str:
    """Returns the HTML, all values escaped, of a Jinja template in fedsim/report (a file's name).

    `context` has its variables besides `content`; a missing one is an UndefinedError of Jinja.
    """
    keys = [term.key for term in content.terms]
    page = _environment().get_template(template)
    own = {
        "content": content,
        "style": Markup(_text("page.css")),  # noqa: S704 - a file of this package
        "explained": lambda text: explain_terms(text, keys),
        "local": lambda text: text,
    }
    return remove_turns(page.render(own | context))


def _policy(script: str, live: bool = False) -> str:
    """Returns the content security policy of a page whose only script has the text `script`."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src 'sha256-{digest}'",
            "style-src 'unsafe-inline'",
            "img-src data:",
            "connect-src 'self'" if live else "connect-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Markup is made here, and only text that was marked with `e` in a template is whole.
        finalize=lambda value: shorten(value) if type(value) is str else value,
    )
    environment.globals["tip"] = tip
    environment.filters |= {
        "accuracy": lambda row: format_accuracy(row.test_accuracy, row.accuracy),
        "bound": format_bound,
        "brief": messages.brief,
        "cautions": messages.describe_cautions,
        "control": messages.describe_control,
        "grounds": messages.grounds,
        "told": messages.describe_told,
        "untried": messages.describe_untried,
        "variant": describe_variant,
        "claim": lambda row: format_claim(row.epsilon, row.delta, row.unit, row.relation),
        "made_with": made_with,
        "number": format_number,
        "number_of": number_of,
        "sentence": sentence_of,
        "signed": format_signed,
        "summary": format_summary,
        "unbroken": mark_code,
    }
    return environment


def _text(name: str) -> str:
    return paths.text(_FOLDER / name, paths.TEXT)
