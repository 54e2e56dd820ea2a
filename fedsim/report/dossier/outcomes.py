"""Words the results: each attack on each defense, with its interval, and the pictures."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from fedsim.report import facts
from fedsim.report.control import Control, warnings
from fedsim.report.dossier.document import (
    Block,
    Heading,
    Notice,
    Pair,
    Paragraph,
    Pictures,
    Points,
    Table,
    sentence,
)
from fedsim.report.dossier.evidence import Evidence
from fedsim.report.figures import format_number, format_signed
from fedsim.report.gallery import Plate, gallery
from fedsim.report.row import LeaderboardRow
from fedsim.scoring import METRICS, Summary

_PAIRS = 4
"""So many images of a batch are shown at most."""


def outcomes(evidence: Evidence) -> tuple[Block, ...]:
    """Returns the blocks of the chapter; what is INVALID stands apart, with the reason."""
    if not evidence.results:
        return (Paragraph("There are none: no attack was scored."),)
    blocks: list[Block] = [
        Paragraph(
            "Gain: how much better an attack does than the best guess of somebody who saw no "
            "update, on average over n trials. In brackets: the "
            f"{evidence.confidence:.0%} interval of that mean, for the same "
            "network and client: trials of one run share weights and partition. There is none "
            "of fewer than three trials, or of equal ones. Another: what the same attack makes of "
            "a different update. Only what exceeds it was read off this update."
        )
    ]
    failed = [control for control in evidence.controls if control.status != "passed"]
    for control in evidence.valid:
        if len(evidence.controls) > 1:
            blocks.append(Heading(evidence.title(control)))
        work = "work" if control.ended else "so far work"
        blocks.append(Paragraph(f"The attacks {work} without a defense: {control.reason}."))
        blocks += _of_comparison(evidence, control)
    if failed:
        marks = ", ".join(dict.fromkeys(control.mark for control in failed))
        blocks.append(Heading(f"Results from which nothing follows ({marks})"))
        for control in failed:
            blocks.append(
                Notice(
                    f"{control.mark}: {evidence.title(control)}",
                    (sentence(control.reason),),
                )
            )
            blocks.append(_table(evidence, control))
    if problems := warnings(evidence.lines):
        blocks += [Heading("Warnings"), Points(tuple(sentence(text) for text in problems))]
    failures = facts.failures(evidence.results)
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


def _of_comparison(evidence: Evidence, control: Control) -> list[Block]:
    blocks: list[Block] = [_table(evidence, control)]
    lines = evidence.of(control)
    cells = {line.cell for line in lines}
    members = [run for run in evidence.runs if any(row.cell in cells for row in run.rows)]
    plates = gallery(lines, members).plates
    for answer in evidence.answers(control):
        plate = _plate(plates, answer.judgement.strongest)
        if plate is not None:
            blocks.append(_pictures(plate))
    return blocks


def _table(evidence: Evidence, control: Control) -> Table:
    rows = []
    for line in evidence.of(control):
        name, found, guess, other, worst = _figures(line)
        done = [line.server] if line.threat.malicious else []
        grants = [*done, *line.threat.beyond, *([line.sight] if line.sight else [])]
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
                ", ".join(each.number for each in evidence.commands if each.repeats(line)) or "–",
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


def _figures(line: LeaderboardRow) -> tuple[str, str, str, str, str]:
    """Returns what ranks the attack: name, value with interval, guess, another update, worst."""
    name = line.ranked_by
    if not line.n_ok:  # its figures are the guess's
        label = "gain, dB" if name == "psnr" else METRICS[name].heading or name
        return f"{label}:", "–", format_number(line.baseline.get(name), 1), "–", "–"
    if name == "psnr":
        return (
            "gain, dB:",
            _signed(line.gain),
            format_number(line.baseline["psnr"], 1),
            line.no_control or format_number(_mean(line.other_update), 1),
            format_number(line.worst["psnr"], 1),
        )
    metric = METRICS[name]
    over = line.above_other(name)
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
