"""Words who attacks: what they see and know, and which numbered threat models were measured."""

from __future__ import annotations

from fedsim.report.dossier.document import Block, Facts, Heading, Paragraph, Table
from fedsim.report.dossier.evidence import Evidence
from fedsim.report.dossier.literature import SOURCE, coverage
from fedsim.report.threat import threat_model, unworded
from fedsim.results.threat_model import own


def attackers(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the blocks of the chapter."""
    threats = threat_model(evidence.results)
    blocks: list[Block] = [Facts(tuple(threats))] if threats else []
    blocks += [
        Heading("Threat models A to H"),
        Paragraph(
            f"The literature numbers attackers from A to H by what they have ({SOURCE}). A to "
            "E only look, F to H also act."
        ),
    ]
    if evidence.results and all(row.subject == "rows" for row in evidence.results):
        blocks.append(
            Paragraph(
                "That numbering is of attacks on updates of a model. This run releases "
                "something else, so that none of them is measured. The attacker of this run is "
                "the one above."
            )
        )
    blocks.append(
        Table(
            columns=("", "Attacker", "Has", "In this run"),
            rows=tuple(
                (
                    each.model.letter,
                    each.model.name,
                    each.model.has,
                    f"{each.coverage}: {each.reason}",
                )
                for each in coverage(evidence.results)
            ),
            widths=(0.4, 2.2, 3.6, 4),
        )
    )
    secrets = sorted({s for line in evidence.lines for s in line.knowledge.from_truth()})
    if secrets:
        blocks.append(
            Paragraph(
                f"Some attacks were given what only the victim knows ({', '.join(secrets)}). "
                "None of A to H has that. Their figures are an upper bound."
            )
        )
    unknown = sorted({e for line in evidence.lines for e in unworded(line.threat) if not own(e)})
    if unknown:
        blocks.append(
            Paragraph(
                f"Some attacks were granted what this version of fedsim does not know "
                f"({', '.join(unknown)}). None of A to H is said to have that."
            )
        )
    return tuple(blocks)
