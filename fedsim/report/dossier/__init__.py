"""The dossier: what a run is evidence of, for whoever has to judge a deployment without running it.

It is the content of the page, set for paper: chapters in place of cells that open, and beside it
what a judge asks for, such as criteria, hashes and the commands that repeat each number.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory

from markupsafe import Markup

from fedsim.recording.files import write_bytes, write_text
from fedsim.report.content import Content
from fedsim.report.dossier.attempts import tried, unobserved, untried
from fedsim.report.dossier.guarantees import guarantees
from fedsim.report.dossier.opinion import criteria
from fedsim.report.dossier.repetition import check_command, hashes, numbered, whole
from fedsim.report.dossier.system import stacks_of, system_facts
from fedsim.report.page import read_style, render
from fedsim.report.threat import SOURCE, coverage, is_own, unworded
from fedsim.results.reading import Run, load_runs
from fedsim.system import paths
from fedsim.types import FedsimError

__all__ = ["dossier_of", "write_dossier"]

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
    write_text(page, dossier_of(load_runs([folder]), Path(folder)))
    if not pdf or browser is None:
        return [page]
    _print_page(page, printed, browser)
    return [page, printed]


def dossier_of(runs: Sequence[Run], root: Path) -> str:
    """Returns the dossier of `runs`, which were read below the folder `root`.

    It fetches nothing and has no script.
    """
    content = Content(runs)
    rows = content.rows

    def local(text: str) -> str:
        """Names runs by their folders' names, wherever they lie."""
        for run in runs:
            text = text.replace(str(run.folder), run.folder.name)
        return text

    return render(
        "dossier.html.j2",
        content,
        style=Markup(read_style()),  # noqa: S704 - files of this package
        local=local,
        descriptions=list(
            dict.fromkeys(
                " ".join(str(text).split()) for run in runs if (text := run.setting("description"))
            )
        ),
        ended=all(run.ended for run in runs),
        system=[(run, system_facts(run)) for run in runs],
        stacks=list(stacks_of(runs, content.results).items()),
        source=SOURCE,
        coverage=coverage(content.results),
        secrets=sorted({secret for row in rows for secret in row.knowledge.from_truth()}),
        unknown=sorted(
            {entry for row in rows for entry in unworded(row.threat) if not is_own(entry)}
        ),
        tried=tried(content.results),
        untried=untried(content.results, runs),
        unobserved=unobserved(content.results, runs),
        guarantees=guarantees(runs),
        criteria=criteria(runs, content.results, rows),
        whole=whole(runs, root),
        commands_of=numbered(rows, runs, root),
        hashes=hashes,
        check=check_command(runs[0].folder.name) if runs else (),
    )


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
