"""Words how each number is repeated, and by which hashes, versions and machine it is known."""

from __future__ import annotations

from fedsim.report import facts
from fedsim.report.dossier import repetition
from fedsim.report.dossier.document import Block, Commands, Facts, Heading, Literal, Paragraph
from fedsim.report.dossier.evidence import Evidence


def how_to_repeat(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the blocks of the chapter."""
    whole = repetition.whole(evidence.runs, evidence.root)
    promise = facts.again(evidence.runs).promise.removeprefix("; ")
    blocks: list[Block] = []
    if whole:
        blocks += [
            Paragraph(
                "One command repeats all numbers. It is run in the folder that holds the run’s "
                f"folder, with the versions below; {promise}."
            ),
            Commands(tuple(whole)),
        ]
    else:
        blocks.append(
            Paragraph(
                "The scenario of this run is lost (scenario.yaml), so that no command repeats it."
            )
        )
    if evidence.commands:
        blocks += [
            Heading("Each attack on each defense alone"),
            Paragraph(
                "These repeat one attack on one defense, at all its batch sizes and rounds. "
                "The numbers are the same as in chapter 6. Where the undefended stack is "
                "left out, the table says INVALID, since it lacks its positive control."
            ),
            Commands(tuple((each.title, each.words) for each in evidence.commands)),
        ]
    for run in evidence.runs:
        suffix = f": {run.folder.name}" if len(evidence.runs) > 1 else ""
        blocks += [
            Heading(f"Versions and hardware{suffix}"),
            Facts(tuple(facts.made_with(run.record)) or (("record.json", "missing"),)),
            Heading(f"SHA-256{suffix}"),
            Facts(tuple(repetition.hashes(run))),
        ]
    names = [run.folder.name for run in evidence.runs]
    blocks += [
        Paragraph(
            "The digest of a folder is the SHA-256 of what sha256sum prints of its files, in "
            "the order of their names."
        ),
        Commands((("This prints that of the recordings:", repetition.check_command(names[0])),)),
    ]
    for run in evidence.runs:
        if run.scenario_text is not None:
            suffix = f" of {run.folder.name}" if len(evidence.runs) > 1 else ""
            blocks += [
                Heading(f"The scenario{suffix}, with every default written out"),
                Literal(run.scenario_text.rstrip("\n")),
            ]
    return tuple(blocks)
