"""Says what a run is evidence of, chapter by chapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedsim.report import facts
from fedsim.report.answers import Answer
from fedsim.report.control import invalid_reasons
from fedsim.report.dossier.attackers import attackers
from fedsim.report.dossier.document import (
    Block,
    Chapter,
    Document,
    Facts,
    Heading,
    Notice,
    Paragraph,
    Points,
    sentence,
)
from fedsim.report.dossier.evidence import Evidence
from fedsim.report.dossier.guarantees import guarantees
from fedsim.report.dossier.opinion import criteria
from fedsim.report.dossier.outcomes import outcomes
from fedsim.report.dossier.provenance import how_to_repeat
from fedsim.report.dossier.system import system
from fedsim.report.dossier.trials import trials
from fedsim.report.glossary import terms
from fedsim.results.reading import Run


def dossier_of(runs: Sequence[Run], root: Path) -> Document:
    """Returns the dossier of `runs`, which were read below the folder `root`."""
    evidence = Evidence(runs, root)
    names = [row.scenario for row in evidence.results]
    names = names or [str(run.setting("name")) for run in runs if run.setting("name")]
    return Document(
        title=f"Evidence dossier: {', '.join(dict.fromkeys(names)) or 'no results'}",
        subtitle="What attackers recovered of clients’ data from a federated training, what "
        "is proven, and what was not tried",
        chapters=(
            Chapter(title="The question", blocks=_question(evidence)),
            Chapter(title="In short", blocks=_short(evidence)),
            Chapter(title="The system that was measured", blocks=system(evidence)),
            Chapter(title="Who attacks", blocks=attackers(evidence)),
            Chapter(title="What was tried, and what was not", blocks=trials(evidence)),
            Chapter(title="Results", blocks=outcomes(evidence)),
            Chapter(title="Guarantees and their assumptions", blocks=guarantees(runs)),
            Chapter(
                title="The criteria of the EDPB’s Opinion 28/2024",
                blocks=criteria(evidence),
            ),
            Chapter(title="Limits", blocks=_limits(evidence)),
            Chapter(title="How to repeat each number", blocks=how_to_repeat(evidence)),
            Chapter(
                title="Terms",
                blocks=(Facts(tuple((term.name, term.meaning) for term in terms().values())),),
            ),
        ),
    )


def _question(evidence: Evidence) -> tuple[Block, ...]:
    descriptions = dict.fromkeys(
        " ".join(str(text).split()) for run in evidence.runs if (text := run.setting("description"))
    )
    return (
        Paragraph(
            "Clients train a model together and keep their data. They send updates of the "
            "model. Can somebody who sees these updates recover the data that they were "
            "computed from?"
        ),
        *map(Paragraph, descriptions),
        Paragraph(
            "The attacks were run on recordings of a real training. Their answers were "
            "compared with the data that the clients really used, which no attack could "
            "reach. What counts is the gain over the best guess of somebody who saw no update."
        ),
    )


def _short(evidence: Evidence) -> tuple[Block, ...]:
    blocks: list[Block] = [*_banners(evidence)]
    for control in evidence.valid:
        if len(evidence.controls) > 1:
            blocks.append(Heading(evidence.title(control)))
        for answer in evidence.answers(control):
            if answer.finding == "no answer":
                blocks.append(Paragraph(answer.sentence))
            else:
                blocks += [Heading(_headline(answer)), Facts(tuple(_answered(answer)))]
    if not evidence.valid and evidence.results:
        blocks.append(Paragraph("No result of this run allows a conclusion."))
    if not evidence.results:
        blocks.append(Paragraph(evidence.summary))
    return (
        *blocks,
        Paragraph(
            "A defense against which no attack here found more than a guess is not shown to be "
            "safe. It withstood the attacks of chapter 5, as often as they were tried. Only "
            "the guarantees of chapter 7 hold against any attack, under their assumptions."
        ),
    )


def _banners(evidence: Evidence) -> list[Block]:
    early = facts.unfinished(evidence.runs)
    reasons = invalid_reasons(evidence.lines, unended=False) if evidence.results else []
    blocks: list[Block] = []
    if early:
        blocks.append(
            Notice("This run is not complete", tuple(sentence(evidence.local(t)) for t in early))
        )
    if reasons:
        part = " in part" if len(reasons) < len(evidence.controls) else ""
        blocks.append(Notice(f"INVALID{part}", tuple(sentence(reason) for reason in reasons)))
    return blocks


def _limits(evidence: Evidence) -> tuple[Block, ...]:
    general = (
        "A measurement shows what was possible. It cannot show that something is impossible.",
        "Intervals hold for the clients, rounds and batches that were attacked. Others may "
        "leak more.",
        "A likeness in dB is of pixels. It neither proves nor rules out that a person is "
        "recognized: look at the pictures.",
        "The attacks read updates of training. The finished model, its answers, logs and "
        "backups were not attacked.",
        "The implementation of the defenses was measured in this program. A deployment of "
        "another program has to be measured itself.",
    )
    own = [*facts.client_failures(evidence.runs), *facts.notes(evidence.runs)]
    blocks: list[Block] = [Points(general)]
    if own:
        blocks += [
            Heading("Of this run"),
            Points(tuple(sentence(evidence.local(text)) for text in own)),
        ]
    return tuple(blocks)


def _headline(answer: Answer) -> str:
    name = "Without a defense" if answer.undefended else answer.defense
    return f"{name}: {'rely on it' if answer.verdict == 'rely' else answer.verdict}"


def _answered(answer: Answer) -> list[tuple[str, str]]:
    """Returns the parts of an answer, each named."""
    parts = [
        ("An attacker", f"{answer.attacker} {answer.gets}"),
        ("Shown by", answer.evidence),
        ("It costs", answer.costs),
        ("It guarantees", answer.guarantee),
        ("Reliance", answer.reliance),
        ("Not tried", ", ".join(answer.untried)),
    ]
    cautions = " ".join(answer.judgement.cautions)
    return [(name, sentence(text)) for name, text in [*parts, ("Caution", cautions)] if text]
