"""Says what a run is evidence of, chapter by chapter."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path

from fedsim.report import facts
from fedsim.report.answers import Answer, answers
from fedsim.report.control import (
    Control,
    describe_comparison,
    invalid_reasons,
    positive_controls,
    warnings,
)
from fedsim.report.dossier import repetition
from fedsim.report.dossier.attempts import Tried, Untried, tried, untried
from fedsim.report.dossier.document import (
    Block,
    Chapter,
    Commands,
    Document,
    Facts,
    Heading,
    Literal,
    Notice,
    Pair,
    Paragraph,
    Pictures,
    Points,
    Table,
)
from fedsim.report.dossier.guarantees import guarantees
from fedsim.report.dossier.literature import SOURCE, coverage
from fedsim.report.dossier.opinion import criteria
from fedsim.report.figures import (
    describe_stack,
    describe_variant,
    format_number,
    format_signed,
)
from fedsim.report.gallery import Plate, gallery
from fedsim.report.glossary import TERMS
from fedsim.report.leaderboard import aggregate
from fedsim.report.page import confidence_of
from fedsim.report.row import LeaderboardRow
from fedsim.report.threat import threat_model
from fedsim.results.lines import ResultRow
from fedsim.results.reading import Run, measurements
from fedsim.scoring import METRICS, Summary
from fedsim.words import number_of

_PAIRS = 4
"""So many images of a batch are shown at most."""


def dossier_of(runs: Sequence[Run], root: Path) -> Document:
    """Returns the dossier of `runs`, which were read below the folder `root`."""
    return _Content(runs, root).document()


class _Content:
    """Words the chapters of one dossier from what its runs hold."""

    def __init__(self, runs: Sequence[Run], root: Path) -> None:
        self.runs, self.root = runs, root
        self.results: list[ResultRow] = measurements(runs)
        self.confidence = confidence_of(runs)
        self.lines = aggregate(self.results, confidence=self.confidence)
        self.controls = positive_controls(self.lines)
        self.tried: list[Tried] = tried(self.results)
        self.untried: list[Untried] = untried(self.results) if self.results else []
        self.numbers = self._number_commands()

    def document(self) -> Document:
        """Returns all chapters."""
        names = [row.scenario for row in self.results]
        names = names or [str(run.setting("name")) for run in self.runs if run.setting("name")]
        return Document(
            title=f"Evidence dossier: {', '.join(dict.fromkeys(names)) or 'no results'}",
            subtitle="What attackers recovered of clients’ data from a federated training, what "
            "is proven, and what was not tried",
            chapters=(
                Chapter(title="The question", blocks=self._question()),
                Chapter(title="In short", blocks=self._short()),
                Chapter(title="The system that was measured", blocks=self._system()),
                Chapter(title="Who attacks", blocks=self._attackers()),
                Chapter(title="What was tried, and what was not", blocks=self._attempts()),
                Chapter(title="Results", blocks=self._results()),
                Chapter(title="Guarantees and their assumptions", blocks=guarantees(self.runs)),
                Chapter(
                    title="The criteria of the EDPB’s Opinion 28/2024",
                    blocks=criteria(self.runs, self.lines, self.tried, self.untried),
                ),
                Chapter(title="Limits", blocks=self._limits()),
                Chapter(title="How to repeat each number", blocks=self._repetition()),
                Chapter(
                    title="Terms",
                    blocks=(Facts(tuple((term.name, term.meaning) for term in TERMS.values())),),
                ),
            ),
        )

    def _question(self) -> tuple[Block, ...]:
        descriptions = dict.fromkeys(
            " ".join(str(text).split()) for run in self.runs if (text := run.setting("description"))
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

    def _short(self) -> tuple[Block, ...]:
        blocks: list[Block] = [*self._banners()]
        valid = [control for control in self.controls if control.status == "passed"]
        for control in valid:
            if len(self.controls) > 1:
                blocks.append(Heading(describe_comparison(control.comparison)))
            for answer in self._answers(control):
                if answer.finding == "no answer":
                    blocks.append(Paragraph(answer.sentence))
                else:
                    blocks += [Heading(_headline(answer)), Facts(tuple(_answered(answer)))]
        if not valid and self.results:
            blocks.append(Paragraph("No result of this run allows a conclusion."))
        if not self.results:
            blocks.append(Paragraph(facts.sentence(self.runs, self.results)))
        return (
            *blocks,
            Paragraph(
                "A defense against which no attack here found more than a guess is not shown to be "
                "safe. It withstood the attacks of chapter 5, as often as they were tried. Only "
                "the guarantees of chapter 7 hold against any attack, under their assumptions."
            ),
        )

    def _banners(self) -> list[Block]:
        early = facts.unfinished(self.runs)
        reasons = invalid_reasons(self.lines) if self.results else []
        blocks: list[Block] = []
        if early:
            blocks.append(Notice("This run is not complete", tuple(_stop(t) for t in early)))
        if reasons:
            part = " in part" if len(reasons) < len(self.controls) else ""
            blocks.append(Notice(f"INVALID{part}", tuple(_stop(reason) for reason in reasons)))
        return blocks

    def _answers(self, control: Control) -> list[Answer]:
        lines = [line for line in self.lines if line.comparison == control.comparison]
        return answers(lines, control, self.runs)

    def _system(self) -> tuple[Block, ...]:
        blocks: list[Block] = [Paragraph(facts.sentence(self.runs, self.results))]
        for run in self.runs:
            if len(self.runs) > 1:
                variant = describe_variant(run.record.get("variant") or {})
                blocks.append(Heading(variant or run.folder.name))
            blocks.append(Facts(tuple(_system_facts(run))))
        stacks = {
            name: describe_stack(stack)
            for run in self.runs
            for name, stack in (run.setting("defenses") or {}).items()
        } or {row.defense.name: describe_stack(row.defense.stack) for row in self.results}
        if stacks:
            blocks += [
                Heading("Defenses"),
                Table(
                    columns=("Name", "What it consists of, in the order in which it is applied"),
                    rows=tuple((name, stack or "no defense") for name, stack in stacks.items()),
                    widths=(1, 4),
                ),
            ]
        return tuple(blocks)

    def _attackers(self) -> tuple[Block, ...]:
        threats = threat_model(self.results)
        blocks: list[Block] = [Facts(tuple(threats))] if threats else []
        blocks += [
            Heading("Threat models A to H"),
            Paragraph(
                f"The literature numbers attackers from A to H by what they have ({SOURCE}). A to "
                "E only look, F to H also act."
            ),
        ]
        if self.results and all(row.subject == "rows" for row in self.results):
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
                    for each in coverage(self.results)
                ),
                widths=(0.4, 2.2, 3.6, 4),
            )
        )
        secrets = sorted({s for line in self.lines for s in line.knowledge.from_truth()})
        if secrets:
            blocks.append(
                Paragraph(
                    f"Some attacks were given what only the victim knows ({', '.join(secrets)}). "
                    "None of A to H has that. Their figures are an upper bound."
                )
            )
        return tuple(blocks)

    def _attempts(self) -> tuple[Block, ...]:
        if not self.results:
            return (Paragraph("No attack was run."),)
        blocks: list[Block] = [
            Heading("Tried"),
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
                    for each in self.tried
                ),
                widths=(2.2, 4, 3, 1.2, 1.1),
                note="Seconds: mean of one trial. Settings that are not named are at their "
                "defaults. A trial that failed counts as a guess in every figure.",
            ),
            Heading("Not tried"),
        ]
        if self.untried:
            blocks.append(
                Table(
                    columns=("Attack", "What it does", "Why it was not tried"),
                    rows=tuple(
                        (e.name, e.summary, e.reason.replace("`", "")) for e in self.untried
                    ),
                    widths=(2.2, 4, 4),
                )
            )
        else:
            blocks.append(Paragraph("Every attack that is installed here was run."))
        blocks.append(
            Points(
                (
                    *self._unobserved(),
                    "Attacks that are published and not installed here were not tried. Neither "
                    "were attacks that nobody has published.",
                )
            )
        )
        return tuple(blocks)

    def _unobserved(self) -> list[str]:
        """Words which vantages, clients and rounds nobody looked at."""
        lines = []
        seen = {row.vantage for row in self.results}
        for vantage, who in (
            ("client", "What another participant sees"),
            ("eavesdropper", "What somebody on the wire sees"),
        ):
            if vantage not in seen:
                lines.append(f"{who} was not attacked.")
        for run in self.runs[:1]:
            clients, rounds = run.setting("data", "clients"), run.setting("training", "rounds")
            attacked = {row.client for row in self.results if row.client >= 0}
            if isinstance(clients, int) and attacked:
                lines.append(
                    f"{len(attacked)} of {number_of(clients, 'client')} were attacked on their own."
                )
            looked = sorted({row.round for row in self.results})
            if isinstance(rounds, int):
                lines.append(
                    f"Updates of {len(looked)} of {number_of(rounds, 'round')} were attacked "
                    f"({', '.join(map(str, looked))})."
                )
        return lines

    def _results(self) -> tuple[Block, ...]:
        if not self.results:
            return (Paragraph("There are none: no attack was scored."),)
        blocks: list[Block] = [
            Paragraph(
                "Gain: how much better an attack does than the best guess of somebody who saw no "
                "update, on average over n trials. In brackets: the "
                f"{self.confidence:.0%} interval of that mean; there is none of fewer than three "
                "trials, or of equal ones. Another: what the same attack makes of a different "
                "update. Only what exceeds it was read off this update."
            )
        ]
        passed = [control for control in self.controls if control.status == "passed"]
        failed = [control for control in self.controls if control.status != "passed"]
        for control in passed:
            if len(self.controls) > 1:
                blocks.append(Heading(describe_comparison(control.comparison)))
            blocks.append(Paragraph(f"The attacks work without a defense: {control.reason}."))
            blocks += self._of_comparison(control)
        if failed:
            blocks.append(Heading("Results from which nothing follows (INVALID)"))
            for control in failed:
                blocks.append(
                    Notice(
                        f"INVALID: {describe_comparison(control.comparison)}",
                        (_stop(control.reason),),
                    )
                )
                blocks.append(self._table(control))
        if problems := warnings(self.lines):
            blocks += [Heading("Warnings"), Points(tuple(_stop(text) for text in problems))]
        failures = facts.failures(self.results)
        if failures:
            blocks += [
                Heading("Attacks that failed"),
                Table(
                    columns=("Defense", "Attack", "Reason", "Trials"),
                    rows=tuple((*names, str(count)) for *names, count in failures),
                    widths=(2, 2, 5, 1),
                ),
            ]
        return tuple(blocks)

    def _of_comparison(self, control: Control) -> list[Block]:
        blocks: list[Block] = [self._table(control)]
        lines = [line for line in self.lines if line.comparison == control.comparison]
        cells = {line.cell for line in lines}
        members = [run for run in self.runs if any(row.cell in cells for row in run.rows)]
        plates = gallery(lines, members).plates
        for answer in self._answers(control):
            plate = _plate(plates, answer.judgement.strongest)
            if plate is not None:
                blocks.append(_pictures(plate))
        return blocks

    def _table(self, control: Control) -> Table:
        rows = []
        for line in self.lines:
            if line.comparison != control.comparison:
                continue
            name, found, guess, other, worst = _figures(line)
            grants = [*line.knowledge.from_truth(), *([line.sight] if line.sight else [])]
            rows.append(
                (
                    line.defense,
                    line.attack + (f" ({', '.join(grants)})" if grants else ""),
                    f"{line.batch_size} / {line.round}",
                    f"{line.n_ok} / {line.n}",
                    f"{name} {_fixed(found)}",
                    guess,
                    other,
                    worst,
                    ", ".join(self.numbers.get((line.defense, line.attack), [])) or "–",
                )
            )
        return Table(
            columns=(
                "Defense",
                "Attack",
                "Batch / round",
                "Ok / n",
                "Found",
                "Guess",
                "Another",
                "Worst",
                "Repeat",
            ),
            rows=tuple(rows),
            widths=(1.9, 2.6, 1.2, 1.1, 3, 1.1, 1.3, 1.1, 1.1),
            note="Worst: the most that leaked in one trial or of one image. Repeat: the command in "
            "chapter 10. The strongest attack on each defense comes first.",
        )

    def _limits(self) -> tuple[Block, ...]:
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
        own = [*facts.client_failures(self.runs), *facts.notes(self.runs)]
        blocks: list[Block] = [Points(general)]
        if own:
            blocks += [Heading("Of this run"), Points(tuple(_stop(text) for text in own))]
        return tuple(blocks)

    def _number_commands(self) -> dict[tuple[str, str], list[str]]:
        """Numbers the commands: those of each (defense, attack) are C1, C2 and so on."""
        self.commands: list[tuple[str, tuple[str, ...]]] = []
        numbers: dict[tuple[str, str], list[str]] = {}
        known: dict[tuple[str, ...], str] = {}
        for line in self.lines:
            for words in repetition.of_line(line, self.runs, self.root):
                if words not in known:
                    known[words] = f"C{len(known) + 1}"
                    title = f"{known[words]}: {line.attack} on {line.defense}"
                    self.commands.append((title, words))
                names = numbers.setdefault((line.defense, line.attack), [])
                if known[words] not in names:
                    names.append(known[words])
        return numbers

    def _repetition(self) -> tuple[Block, ...]:
        whole = repetition.whole(self.runs, self.root)
        promise = facts.again(self.runs).promise.removeprefix("; ")
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
                    "The scenario of this run is lost (scenario.yaml), so that no command repeats "
                    "it."
                )
            )
        if self.commands:
            blocks += [
                Heading("Each attack on each defense alone"),
                Paragraph(
                    "These repeat one attack on one defense, at all its batch sizes and rounds. "
                    "The numbers are the same as in chapter 6. Where the undefended stack is "
                    "left out, the table says INVALID, since it lacks its positive control."
                ),
                Commands(tuple(self.commands)),
            ]
        for run in self.runs:
            suffix = f": {run.folder.name}" if len(self.runs) > 1 else ""
            blocks += [
                Heading(f"Versions and hardware{suffix}"),
                Facts(tuple(facts.made_with(run.record)) or (("record.json", "missing"),)),
                Heading(f"SHA-256{suffix}"),
                Facts(tuple(repetition.hashes(run))),
            ]
        names = [run.folder.name for run in self.runs]
        blocks += [
            Paragraph(
                "The digest of a folder is the SHA-256 of what sha256sum prints of its files, in "
                "the order of their names. This prints that of the recordings:"
            ),
            Literal(repetition.check_command(names[0])),
        ]
        for run in self.runs:
            if run.scenario_text is not None:
                suffix = f" of {run.folder.name}" if len(self.runs) > 1 else ""
                blocks += [
                    Heading(f"The scenario{suffix}, with every default written out"),
                    Literal(run.scenario_text.rstrip("\n")),
                ]
        return tuple(blocks)


def _headline(answer: Answer) -> str:
    name = "Without a defense" if answer.undefended else answer.defense
    return f"{name}: {'rely on it' if answer.verdict == 'rely' else answer.verdict}"


def _answered(answer: Answer) -> list[tuple[str, str]]:
    """Returns the parts of an answer, each named."""
    parts = [
        ("An attacker", f"{answer.attacker} {answer.gets}"),
        ("It costs", answer.costs),
        ("It guarantees", answer.guarantee),
        ("Reliance", answer.reliance),
        ("Not tried", ", ".join(answer.untried)),
    ]
    cautions = " ".join(answer.judgement.cautions)
    return [(name, _stop(text)) for name, text in [*parts, ("Caution", cautions)] if text]


def _stop(text: str) -> str:
    """Makes a sentence of `text`: a capital at its beginning, a stop at its end, no backticks."""
    text = text.replace("`", "")
    # Greek letters stay: a capital ε is another symbol.
    first = text[:1].upper() if text[:1].isascii() else text[:1]
    return f"{first}{text[1:]}" + ("" if text.endswith((".", "!", "?")) else ".")


def _system_facts(run: Run) -> list[tuple[str, str]]:
    def setting(*path: str) -> str:
        value = run.setting(*path)
        return "" if value is None else str(value)

    source = run.setting("data", "source") or {}
    partition = run.setting("data", "partition") or {}
    model = run.setting("model") or {}
    local = run.setting("training", "local") or {}
    learner = run.setting("learner") or {}
    named = {
        "data": describe_stack([source]) if source else "",
        "partition": describe_stack([partition]) if partition else "",
        "clients": setting("data", "clients"),
        "model": describe_stack([model]) if model else "",
        "learner": describe_stack([learner]) if learner else "",
        "algorithm": setting("training", "algorithm"),
        "rounds": setting("training", "rounds"),
        "local training": ", ".join(f"{key}={value}" for key, value in local.items()),
        "strategy": setting("federation", "strategy"),
        "participation": setting("federation", "participation"),
        "engine": setting("federation", "engine"),
        "seed": setting("seed"),
    }
    return [(name, value) for name, value in named.items() if value]


def _figures(line: LeaderboardRow) -> tuple[str, str, str, str, str]:
    """Returns what ranks the attack: name, value with interval, guess, another update, worst."""
    name = line.ranked_by
    if name == "psnr":
        return (
            "gain, dB:",
            _signed(line.gain),
            format_number(line.baseline["psnr"], 1),
            line.no_control or format_number(_mean(line.other_update), 1),
            format_number(line.worst["psnr"], 1),
        )
    metric = METRICS[name]
    over = {
        "subspace_error": line.span_over_other,
        "label_accuracy": line.label_over_other,
        "membership_auc": line.membership_over_other,
    }[name]
    summary = line.metrics[name]
    return (
        f"{metric.heading or metric.name}:",
        _interval(summary, 2),
        format_number(line.baseline.get(name), 2),
        line.no_control or (f"{format_signed(over.mean, 2)} over it" if over else "–"),
        format_number(line.worst.get(name), 2),
    )


def _mean(summary: Summary | None) -> float | None:
    return summary.mean if summary else None


def _signed(summary: Summary | None) -> str:
    if summary is None:
        return "–"
    if summary.low is None or summary.high is None:
        return format_signed(summary.mean)
    ends = f"{format_signed(summary.low)} to {format_signed(summary.high)}"
    return f"{format_signed(summary.mean)} [{ends}]"


def _interval(summary: Summary | None, digits: int) -> str:
    if summary is None:
        return "–"
    mean = format_number(summary.mean, digits)
    if summary.low is None or summary.high is None:
        return mean
    ends = f"{format_number(summary.low, digits)} to {format_number(summary.high, digits)}"
    return f"{mean} [{ends}]"


def _plate(plates: Sequence[Plate], strongest: LeaderboardRow) -> Plate | None:
    """Returns the plate of the strongest attack, or of the same attack at another round."""
    own = [
        plate
        for plate in plates
        if plate.pairs
        and (plate.line.defense, plate.line.attack) == (strongest.defense, strongest.attack)
    ]
    same = [plate for plate in own if plate.line.cell == strongest.cell]
    return next(iter(same or own), None)


def _pictures(plate: Plate) -> Pictures:
    line = plate.line
    return Pictures(
        title=f"{line.defense}: {line.attack}, batch of {line.batch_size}, round {line.round}, "
        "the median trial. Left: the client’s image. Right: what the attack made of it.",
        pairs=tuple(
            Pair(
                truth=_png(pair.truth),
                reconstruction=_png(pair.reconstruction),
                caption=f"{format_number(pair.psnr, 1)} dB",
            )
            for pair in plate.pairs[:_PAIRS]
        ),
        side=plate.width,
    )


def _fixed(text: str) -> str:
    """Keeps a figure with its interval on one line."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def _png(uri: str) -> bytes:
    return base64.b64decode(uri.partition(",")[2])
