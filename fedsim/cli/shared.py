"""What commands share: options, exit statuses, and what they print of a finished run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedsim.system import interrupts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedsim.report.judge import Judgement
    from fedsim.results import reading
    from fedsim.results.record import Run

TableFormat = Literal["table", "json", "csv"]


def show(finished: Run) -> None:
    """Prints the leaderboard and the path of the report; lines on missing rows go to stderr."""
    from fedsim.report import load_runs

    runs = load_runs([finished.out])
    typer.echo(outcome(runs))
    say_what_lacks(runs)
    typer.echo(f"report: {finished.report}")


def say_what_lacks(runs: Sequence[reading.StoredRun]) -> None:
    """Prints a line on the standard error for each run that lacks rows, as unfinished runs do."""
    from fedsim.report import facts

    for line in facts.unfinished(runs) + facts.unseen(runs):
        typer.echo(line, err=True)


def outcome(runs: Sequence[reading.StoredRun]) -> str:
    """Returns the leaderboard of `runs`, or what their defenses cost if no attack is scored.

    Lines on undeclared effects of defenses, and on training that stands still, follow.
    """
    from fedsim.report import facts

    shown = (
        facts.describe(facts.utility(runs))
        if facts.attacks_nothing(runs) or facts.awaited(runs)
        else leaderboard(runs, "table")
    )
    return "\n".join([shown.rstrip("\n"), *facts.undeclared(runs), *facts.standing_still(runs)])


def leaderboard(runs: Sequence[reading.StoredRun], format: TableFormat) -> str:
    """Returns the leaderboard of `runs` as text; a `table` stands below verdicts on defenses."""
    from shutil import get_terminal_size

    from fedsim.report import facts, render
    from fedsim.report.judge import judgements
    from fedsim.report.leaderboard import aggregate
    from fedsim.results.reading import measurements

    width = get_terminal_size((120, 24)).columns
    # One reading of the runs serves the table and the verdicts, which then cannot disagree.
    rows = aggregate(measurements(runs))
    judged = judgements(rows, runs)
    table = render(
        rows,
        format,
        width=width,
        color=sys.stdout.isatty(),
        awaited=facts.awaited(runs),
        unfinished=facts.unfinished(runs),
        judged=judged,
    )
    return _answers(judged, width) + table if format == "table" else table


def _answers(judged: Sequence[Judgement], width: int) -> str:
    """Words for each defense, in a line or two, what an attacker gets and whether to rely on it."""
    from textwrap import fill

    from fedsim.report.messages import brief, describe_statement
    from fedsim.report.threat import describe_comparison
    from fedsim.words import printable

    lines = []
    shown = [each.comparison for each in judged]
    for each in judged:
        lines += [f"{printable(describe_comparison(each.comparison, shown))}:"]
        defended = [verdict for verdict in each.verdicts if not verdict.undefended]
        if defended and all(v.finding == "no answer" and not v.labels_stand for v in each.verdicts):
            # Where no defense has an answer, one reason stands for all.
            reason = describe_statement(defended[0].reason)
            lines += [f"- nothing can be said of any defense: {reason}."]
        else:
            lines += [f"- {printable(brief(verdict))}" for verdict in each.verdicts]
    return "".join(f"{fill(line, width, subsequent_indent='  ')}\n" for line in lines)


@contextmanager
def exits() -> Iterator[None]:
    """Turns an error of its `with` block that a user can act on into a printed message.

    It then raises `typer.Exit` of status 130 for KeyboardInterrupt, 1 for RunFailed, AttackFailed
    and OSError, and 2 for any other FedsimError. Others, and a BrokenPipeError, pass through.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        # The message says how to go on; 130 is what shells take for an interrupted command.
        interrupts.say(lambda text: typer.secho(text, err=True, fg="red"))
        raise typer.Exit(interrupts.STATUS) from error
    except BrokenPipeError:
        raise  # whoever read the output has left: typer ends in silence
    except Exception as error:
        status = _status(error)
        if status is None:
            raise
        remedy = ""
        if isinstance(error, OSError):  # the system's own message has none
            remedy = f"; check the path and the space left, then {interrupts.how_to_go_on()}"
        typer.secho(f"{error}{remedy}", err=True, fg="red")
        raise typer.Exit(status) from error


def _status(error: Exception) -> int | None:
    """Returns the exit status for `error`; None if the user cannot act on it."""
    from fedsim.contracts.attack import AttackFailed
    from fedsim.types import FedsimError, RunFailed

    # Asked first, since the two are FedsimErrors as well: work had begun when they were raised.
    if isinstance(error, RunFailed | AttackFailed | OSError):
        return 1
    return 2 if isinstance(error, FedsimError) else None


ScenarioFile = Annotated[Path, typer.Argument(metavar="SCENARIO")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key; may be repeated."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
RootCertificates = Annotated[
    Path | None,
    typer.Option("--root-certificates", help="Of who vouches for the SuperLink; none: no TLS."),
]
SharedSeed = Annotated[
    bool,
    typer.Option(
        "--shared-seed",
        help="Draw batches and noise from the scenario's seed, for the same bytes as on other "
        "engines; such noise protects nobody.",
    ),
]
