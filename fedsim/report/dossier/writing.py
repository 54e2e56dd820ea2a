"""Writes the dossier of a run: one HTML file and one PDF, of the same document."""

from __future__ import annotations

from pathlib import Path

from fedsim.recording.files import write_bytes, write_text
from fedsim.report.dossier.content import dossier_of
from fedsim.report.dossier.html import html_of
from fedsim.report.dossier.pdf import pdf_of
from fedsim.results.reading import load_runs


def write_dossier(folder: Path | str, out: Path | str | None = None) -> tuple[Path, Path]:
    """Writes `dossier.html` and `dossier.pdf` of a run, or of all variants of a sweep.

    The same run gives the same bytes: no time is in them but what the run has recorded. `out` is
    the folder to write to, by default `folder`. Returns both paths.

    Raises:
        FedsimError: `folder` holds no results, or a file in it is damaged.
    """
    document = dossier_of(load_runs([folder]), Path(folder))
    target = Path(out) if out else Path(folder)
    page, printed = target / "dossier.html", target / "dossier.pdf"
    write_text(page, html_of(document))
    write_bytes(printed, pdf_of(document))
    return page, printed
