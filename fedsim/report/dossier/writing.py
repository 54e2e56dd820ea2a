"""Writes the dossier of a run as one HTML file that opens anywhere, and prints it as a PDF."""

from __future__ import annotations

import base64
import os
import subprocess
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from fedsim.recording.files import write_bytes, write_text
from fedsim.report.dossier.content import dossier_of
from fedsim.report.dossier.document import Document, command_lines
from fedsim.report.wording import straight
from fedsim.results.reading import load_runs
from fedsim.system import paths
from fedsim.types import FedsimError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "msedge")
"""Commands of the browsers that can print a page without a window."""
_SECONDS = 120
"""Time that a browser has to print."""


def write_dossier(
    folder: Path | str, out: Path | str | None = None, *, pdf: bool = False
) -> list[Path]:
    """Writes `dossier.html` of a run, or of all variants of a sweep, and with `pdf` prints it.

    The same run gives the same page, byte for byte: it holds no time but what the run has recorded.
    `out` is the folder to write to, by default `folder`. Returns the paths of the files.

    Raises:
        FedsimError: `folder` holds no results, a file in it is damaged, or `pdf` is asked for and
            no browser is installed that prints.
    """
    target = Path(out) if out else Path(folder)
    page, printed = target / "dossier.html", target / "dossier.pdf"
    browser = next((path for path in map(which, BROWSERS) if path), None)
    if pdf and browser is None:
        raise FedsimError(
            f"--pdf: none of {', '.join(BROWSERS)} is installed: leave --pdf out, open {page} in"
            " any browser and print it to a file"
        )
    write_text(page, html_of(dossier_of(load_runs([folder]), Path(folder))))
    if not pdf or browser is None:
        return [page]
    _print_page(page, printed, browser)
    return [page, printed]


def html_of(document: Document) -> str:
    """Returns the page, which fetches nothing and has no script; what it shows is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "uri": lambda png: f"data:image/png;base64,{base64.b64encode(png).decode()}",
        "command": lambda words: "\n".join(command_lines(words)),
    }
    return straight(environment.get_template("dossier.html.j2").render(document=document))


def _print_page(page: Path, printed: Path, browser: str) -> None:
    with TemporaryDirectory() as profile:
        options = ["--headless", "--disable-gpu", "--no-pdf-header-footer"]
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Browsers refuse their sandbox to root. The page has no script and fetches nothing.
            options.append("--no-sandbox")
        draft = Path(profile) / "dossier.pdf"
        command = [browser, *options, f"--user-data-dir={profile}", f"--print-to-pdf={draft}"]
        try:
            done = subprocess.run(  # noqa: S603  # the browser that this machine has
                [*command, page.resolve().as_uri()],
                capture_output=True,
                text=True,
                timeout=_SECONDS,
            )
            said = done.stderr.strip()[-300:]
        except subprocess.TimeoutExpired:
            said = f"no answer within {_SECONDS} s"
        if not draft.exists():
            raise FedsimError(f"--pdf: {browser} printed nothing: {said}: print {page} yourself")
        write_bytes(printed, paths.content(draft, paths.TEXT))
