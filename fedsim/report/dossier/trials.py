"""Words what was tried, and what was not."""

from __future__ import annotations

from fedsim.report.dossier.attempts import tried, untried
from fedsim.report.dossier.document import Block, Heading, Paragraph, Points, Table
from fedsim.report.dossier.evidence import Evidence
from fedsim.words import number_of


def trials(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the blocks of the chapter."""
    if not evidence.results:
        yet = "" if evidence.ended else " so far"
        return (Paragraph(f"No attack was run{yet}."),)
    blocks: list[Block] = [
        Heading("Tried" if evidence.ended else "Tried so far"),
        Table(
            columns=("Attack", "What it does", "Settings", "Ended well", "Seconds"),
            rows=tuple(
                (
                    each.label,
                    each.summary or "not installed where this dossier was written",
                    each.parameters,
                    f"{each.ok} of {each.n}",
                    "–" if each.seconds is None else f"{each.seconds:.3g}",
                )
                for each in tried(evidence.results)
            ),
            widths=(2.2, 4, 3, 1.2, 1.1),
            note="Seconds: mean of one trial. Settings that are not named are at their "
            "defaults. A trial that failed counts as a guess in every figure.",
        ),
        Heading("Not tried"),
    ]
    left_out = untried(evidence.results, evidence.runs)
    if left_out:
        blocks.append(
            Table(
                columns=("Attack", "What it does", "Why it was not tried"),
                rows=tuple((e.name, e.summary, e.reason.replace("`", "")) for e in left_out),
                widths=(2.2, 4, 4),
            )
        )
    else:
        blocks.append(Paragraph("Every attack that is installed here was run."))
    blocks.append(
        Points(
            (
                *_unobserved(evidence),
                "Attacks that are published and not installed here were not tried. Neither "
                "were attacks that nobody has published.",
            )
        )
    )
    return tuple(blocks)


def _unobserved(evidence: Evidence) -> list[str]:
    """Words which vantages, clients and rounds nobody looked at."""
    lines = []
    seen = {row.vantage for row in evidence.results}
    for vantage, who in (
        ("client", "What another participant sees"),
        ("eavesdropper", "What somebody on the wire sees"),
    ):
        if vantage not in seen:
            lines.append(f"{who} was not attacked.")
    for run in evidence.runs[:1]:
        clients, rounds = run.setting("data", "clients"), run.setting("training", "rounds")
        attacked = {row.client for row in evidence.results if row.client >= 0}
        if isinstance(clients, int) and attacked:
            lines.append(
                f"{len(attacked)} of {number_of(clients, 'client')} were attacked on their own."
            )
        looked = sorted({row.round for row in evidence.results})
        if isinstance(rounds, int):
            lines.append(
                f"Updates of {len(looked)} of {number_of(rounds, 'round')} were attacked "
                f"({', '.join(map(str, looked))})."
            )
    return lines
