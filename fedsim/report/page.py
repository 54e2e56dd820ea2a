"""Writes the report: one HTML file that opens anywhere, with nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedsim.recording.files import write_text
from fedsim.report import facts
from fedsim.report.control import invalid_reasons, positive_controls
from fedsim.report.figures import (
    describe_variant,
    format_claim,
    format_epsilon,
    format_number,
    format_signed,
    format_summary,
)
from fedsim.report.glossary import terms_of
from fedsim.report.leaderboard import aggregate
from fedsim.report.row import population_of
from fedsim.report.section import build_section
from fedsim.report.threat import threat_model
from fedsim.report.utility import attacks_nothing, utility
from fedsim.report.wording import explained, straight, tip, unbroken
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run, load_runs, measurements
from fedsim.words import number_of

_QUESTION = "What do the clients’ updates show of their data, and which defense is worth its price?"


def write_report(folder: Path | str, out: Path | str | None = None) -> Path:
    """Writes the report of a run, or of all variants of a sweep, and returns its path.

    `out` is the file to write, by default `report.html` in `folder`.

    Raises:
        FedsimError: `folder` holds no results, or a file in it is damaged.
    """
    runs = load_runs([folder])
    path = Path(out) if out else Path(folder) / "report.html"
    write_text(path, _html(runs))
    return path


def _html(runs: Sequence[Run]) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["tip"] = tip
    environment.filters |= {
        "summary": format_summary,
        "number": format_number,
        "number_of": number_of,
        "epsilon": format_epsilon,
        "claim": lambda row: format_claim(row.epsilon, row.delta, row.unit, row.relation),
        "signed": format_signed,
        "unbroken": unbroken,
    }
    context = _context(runs)
    keys = [term.key for term in context["terms"]]
    environment.filters["explained"] = lambda text: explained(text, keys)
    return straight(environment.get_template("report.html.j2").render(context))


def _context(runs: Sequence[Run]) -> dict[str, Any]:
    results = measurements(runs)
    unattacked = not results and attacks_nothing(runs)
    awaited = facts.awaited(runs)
    confidence = confidence_of(runs)
    rows = aggregate(results, confidence=confidence)
    late = [] if awaited else [line.split(": ", 1) for line in facts.unfinished(runs)]
    settled = unattacked or awaited or (late and not rows)
    invalid = [] if settled else invalid_reasons(rows, unended=False)
    sections = [build_section(control, rows, runs) for control in positive_controls(rows)]
    return {
        "title": ", ".join(_names(runs, results)) or "no results",
        "summary": facts.UNATTACKED if unattacked else facts.sentence(runs, results),
        "utility": utility(runs) if unattacked or awaited else [],
        "awaited": awaited.mark if awaited else "",
        "late": late,
        "again": facts.again(runs),
        "covered": list(dict.fromkeys(row.privacy_covers for row in rows if row.privacy_covers)),
        "threats": threat_model(results),
        "invalid": invalid,
        "confidence": f"{confidence:.0%}",
        "population": population_of(rows),
        "question": next((t for run in runs if (t := run.setting("description"))), _QUESTION),
        "sections": sections,
        "defenses": list(dict.fromkeys(row.defense for row in rows)),
        "terms": terms_of(
            rows, invalid=bool(invalid), unscored=bool(awaited and awaited.mark == "UNSCORED")
        ),
        "show_intervals": any(
            summary and summary.low is not None
            for row in rows
            for summary in (row.metrics["psnr"], row.gain)
        ),
        "of_rows": any(row.subject == "rows" for row in rows),
        "of_images": any(row.subject == "images" for row in rows),
        "failures": facts.failures(results),
        "client_failures": facts.client_failures(runs),
        "notes": facts.notes(runs),
        "records": [
            {
                "name": run.folder.name,
                "variant": describe_variant(run.variant),
                "scenario": run.scenario_text,
                "facts": facts.made_with(run.record),
            }
            for run in runs
        ],
    }


def _names(runs: Sequence[Run], results: Sequence[ResultRow]) -> list[str]:
    """Returns the names of the scenarios, each once."""
    names = [row.scenario for row in results] or [run.setting("name") for run in runs]
    return list(dict.fromkeys(name for name in names if name))


def confidence_of(runs: Sequence[Run]) -> float:
    """Returns the scenario's confidence, which all variants of a sweep share; by default 95%."""
    for run in runs:
        value = run.setting("scoring", "confidence")
        if isinstance(value, float) and 0 < value < 1:
            return value
    return 0.95
