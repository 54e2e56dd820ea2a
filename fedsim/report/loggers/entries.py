"""What of a run a tool for experiments gets: parameters, figures by round, and pictures."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedsim.report.content import Content
from fedsim.report.figures import describe_stack, describe_variant, format_epsilon
from fedsim.report.pictures import NEAREST, Plate, from_png
from fedsim.report.row import LeaderboardRow
from fedsim.report.utility import utility
from fedsim.results.reading import Run
from fedsim.scoring import METRICS, Summary


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Holds one finite number of a round; parts of its name are separated by slashes."""

    name: str
    round: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Shows images of a client above, and what an attack made of them below, as a PNG file."""

    name: str
    round: int
    png: bytes


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Holds all that is copied of one run."""

    scenario: str
    variant: str
    """The sweep's assignment; empty for a run that is no variant."""
    parameters: dict[str, str]
    figures: list[Figure]
    pictures: list[Picture]


def entries(run: Run) -> Entries:
    """Returns what is copied of `run`.

    A reconstruction that is damaged has no picture.
    """
    content = Content([run])
    lines = content.rows
    return Entries(
        scenario=str(run.setting("name") or run.record.get("scenario") or run.folder.name),
        variant=describe_variant(run.record.get("variant") or {}),
        parameters=_parameters(run),
        figures=[*_of_rounds(run), *(figure for line in lines for figure in _of_line(line))],
        pictures=[
            _picture(line, plate)
            for line in lines
            if (plate := content.plates.get(line.cell)) and plate.pairs
        ],
    )


def _parameters(run: Run) -> dict[str, str]:
    """Returns the settings in words, and the ε of each defense with δ, unit and neighbours."""
    named = {
        "data": _described(run, "data", "source"),
        "model": _described(run, "model"),
        "algorithm": run.setting("training", "algorithm"),
        "rounds": run.setting("training", "rounds"),
        "clients": run.setting("data", "clients"),
        "engine": run.setting("federation", "engine"),
        "seed": run.setting("seed"),
    }
    parameters = {name: str(value) for name, value in named.items() if value is not None}
    for name, stack in (run.setting("defenses") or {}).items():
        parameters[f"defenses/{name}"] = describe_stack(stack) or "no defense"
    for row in utility([run]):
        terms = [format_epsilon(row.epsilon)]
        terms += [f"delta {row.delta:g}"] if row.delta is not None else []
        terms += [str(term) for term in (row.unit, row.relation, row.covers, row.reason) if term]
        parameters[f"epsilon/{row.defense}"] = ", ".join(terms)
    return parameters


def _described(run: Run, *path: str) -> str | None:
    value = run.setting(*path)
    return describe_stack([value]) if isinstance(value, dict) else value


def _of_rounds(run: Run) -> Iterator[Figure]:
    for row in run.rounds:
        epsilon = math.inf if row.epsilon == "inf" else row.epsilon
        values = {
            "train_loss": row.train_loss,
            "test_loss": row.test_loss,
            "test_accuracy": row.test_accuracy,
            "epsilon": epsilon,
        }
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                yield Figure(name=f"rounds/{row.defense}/{name}", round=row.round, value=value)


def _of_line(line: LeaderboardRow) -> Iterator[Figure]:
    """Yields the means over trials, with the ends of their intervals and the number of trials."""
    where = _name(line)
    shown = {name: line.metrics[name] for name, metric in METRICS.items() if metric.heading}
    summaries = {"gain": line.gain, **shown}
    for name, summary in summaries.items():
        for part, value in _parts(summary):
            yield Figure(name=f"attacks/{where}/{name}{part}", round=line.round, value=value)
    yield Figure(name=f"attacks/{where}/n", round=line.round, value=line.n)
    yield Figure(name=f"attacks/{where}/n_ok", round=line.round, value=line.n_ok)


def _name(line: LeaderboardRow) -> str:
    sight = f"{line.sight}/" if line.sight else ""
    threat = "" if line.threat.is_default else f"{line.threat.title.replace('/', '_')}/"
    return f"{line.defense}/{line.attack}/{threat}{sight}b{line.batch_size}"


def _parts(summary: Summary | None) -> list[tuple[str, float]]:
    if summary is None:
        return []
    parts = [("", summary.mean), ("_low", summary.low), ("_high", summary.high)]
    return [(part, value) for part, value in parts if value is not None and math.isfinite(value)]


def _picture(line: LeaderboardRow, plate: Plate) -> Picture:
    rows = [[p.truth for p in plate.pairs], [p.reconstruction for p in plate.pairs]]
    return Picture(
        name=f"reconstructions/{_name(line)}",
        round=line.round,
        png=_grid(rows, (plate.width, plate.height)),
    )


def _grid(rows: Sequence[Sequence[str]], size: tuple[int, int]) -> bytes:
    """Sets images of `data:` addresses in rows, each enlarged to `size` without smoothing."""
    from PIL import Image

    width, height = size
    sheet = Image.new("RGB", (width * len(rows[0]), height * len(rows)))
    for y, row in enumerate(rows):
        for x, uri in enumerate(row):
            image = from_png(base64.b64decode(uri.partition(",")[2]))
            sheet.paste(image.convert("RGB").resize(size, NEAREST), (x * width, y * height))
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()
