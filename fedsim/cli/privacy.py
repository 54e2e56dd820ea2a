"""Defines `fedsim privacy`, the privacy calculator on the command line."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedsim.cli.shared import exits
from fedsim.cli.stand_ins import read_without_libraries

app = typer.Typer(
    # Without a command, the mechanisms are listed.
    no_args_is_help=False,
    help="How private a release is, and how much noise makes it so.",
)

MechanismArgument = Annotated[str | None, typer.Argument(metavar="MECHANISM")]
KeysArgument = Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...")]
Epsilon = Annotated[float | None, typer.Option(help="ε, at least 0.")]
Delta = Annotated[float | None, typer.Option(help="δ, above 0 and below 1.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON; null is what does not apply.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Also draw the whole curve, log δ over ε.")
]


@app.callback(invoke_without_command=True)
def _privacy(context: typer.Context, as_json: AsJson = False) -> None:
    """Without a command: list the mechanisms with their keys, units and ranges."""
    if context.invoked_subcommand is None:
        with exits():
            _list(as_json)


@app.command("delta")
def _delta(
    mechanism: MechanismArgument = None,
    keys: KeysArgument = None,
    epsilon: Epsilon = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The least δ at an ε; where the two directions differ, the larger.

    `fedsim privacy` lists the mechanisms, and the keys that each asks for.
    """
    _ask("delta", mechanism, keys, as_json, plot, epsilon=epsilon)


@app.command("epsilon")
def _epsilon(
    mechanism: MechanismArgument = None,
    keys: KeysArgument = None,
    delta: Delta = None,
    as_json: AsJson = False,
    plot: Plot = None,
) -> None:
    """The least ε at a δ; inf if there is none.

    `fedsim privacy` lists the mechanisms, and the keys that each asks for.
    """
    _ask("epsilon", mechanism, keys, as_json, plot, delta=delta)


@app.command("calibrate")
def _calibrate(
    mechanism: MechanismArgument = None,
    keys: KeysArgument = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    as_json: AsJson = False,
) -> None:
    """The least noise that makes a mechanism (ε, δ)-private.

    `fedsim privacy` lists the mechanisms, and the keys that each asks for.
    """
    _ask("calibrate", mechanism, keys, as_json, None, epsilon=epsilon, delta=delta)


@app.command("audit")
def _audit(
    mechanism: MechanismArgument = None,
    keys: KeysArgument = None,
    delta: Delta = None,
    method: Annotated[
        Literal["two_worlds", "one_run"],
        typer.Option(help="One row in many releases, or many rows in one, by coins."),
    ] = "two_worlds",
    draws: Annotated[
        int | None,
        typer.Option(
            help="Releases to draw under each of the two neighbours, by default 1000000; rows of "
            "one run, by default 10000."
        ),
    ] = None,
    confidence: Annotated[
        float, typer.Option(help="With which a true claim is not refuted, above 0 and below 1.")
    ] = 0.99,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Try to refute what a mechanism claims; exit status 1 if that succeeds.

    `fedsim privacy` lists the mechanisms, and the keys that each asks for.
    """
    with exits():
        from fedsim.audit import mechanisms
        from fedsim.progress import report_work

        if mechanism is None:
            _list(as_json)
            return
        parsed = _parse_keys(mechanism, keys, "audit")
        with report_work(mechanism):
            verdict = mechanisms.audit(
                mechanism,
                parsed,
                delta=_require("delta", delta),
                draws=draws,
                confidence=confidence,
                seed=seed,
                method=method,
            )
        _print({**asdict(verdict), "holds": verdict.holds, "verdict": verdict.text}, as_json)
        if not verdict.holds:
            raise typer.Exit(1)


@app.command("recovery")
def _recovery(keys: KeysArgument = None, as_json: AsJson = False) -> None:
    """What theory says of feature recovery behind each defense, from above and below.

    Keys are those of a two-layer head, its batch and the defenses: width and dimension at least.
    Without any, they are listed.
    """
    with exits():
        from fedsim.privacy import calculator, recovery

        if not keys:
            typer.echo(recovery.list_keys(as_json))
            return
        found = recovery.recovery(calculator.parse(keys))
        if as_json:
            typer.echo(json.dumps([asdict(each) for each in found], indent=2))
            return
        for each in found:
            typer.echo(recovery.describe(each))


def _parse_keys(mechanism: str, keys: list[str] | None, question: str) -> dict[str, Any]:
    """Parses the keys of a mechanism; refuses keys, or a mechanism, that do not fit `question`."""
    from fedsim.privacy import calculator

    parsed = calculator.parse(keys)
    # Made only to be checked: the calculator makes its own.
    calculator.make(mechanism, calculator.QUESTIONS[question], parsed)
    return parsed


def _ask(
    question: str,
    mechanism: str | None,
    keys: list[str] | None,
    as_json: bool,
    plot: Path | None,
    **given: float | None,
) -> None:
    with exits():
        from fedsim.privacy import calculator
        from fedsim.progress import report_work
        from fedsim.system.paths import writable_file
        from fedsim.types import FedsimError

        if mechanism is None:
            _list(as_json)
            return
        # Keys come before options: who errs in both is told of the mechanism first.
        parsed = _parse_keys(mechanism, keys, question)
        # Before the answer, which may take minutes.
        if plot is not None:
            writable_file(plot, "--plot")
            if not plot.parent.is_dir():
                raise FedsimError(f"--plot {plot}: there is no folder {plot.parent}; make it first")
        options = {name: _require(name, value) for name, value in given.items()}
        with report_work(mechanism):
            answer = getattr(calculator, question)(mechanism, parsed, **options)
        if plot is not None:
            from fedsim.privacy.calculator import draw

            draw(plot, mechanism, parsed, answer)
        _print(asdict(answer), as_json)


def _require(name: str, value: float | None) -> float:
    from fedsim.types import FedsimError

    if value is None:
        raise FedsimError(f"--{name} is missing; add for instance --{name} {_EXAMPLES[name]}")
    return value


_EXAMPLES = {"epsilon": "1", "delta": "1e-5"}


def _print(fields: dict[str, Any], as_json: bool) -> None:
    if as_json:
        # Strict JSON has no infinity: what is infinite is written as text.
        infinite = (float("inf"), float("-inf"))
        strict = {k: str(v) if v in infinite else v for k, v in fields.items()}
        typer.echo(json.dumps(strict, indent=2))
        return
    lines = {name: value for name, value in fields.items() if value is not None}
    # An ε means nothing without δ, unit and neighbours, so no line has one alone.
    unit, neighbours = lines.pop("unit"), lines.pop("neighbours")
    scope = f" (δ {_text(lines['delta'])}, {unit}, {neighbours})"
    width = max(map(len, lines))
    for name, value in lines.items():
        suffix = scope if name in _EPSILONS else ""
        typer.echo(f"{name.ljust(width)}  {'ε = ' * bool(suffix)}{_text(value)}{suffix}")


_EPSILONS = ("epsilon", "claim", "lower_bound", "bounds")
"""Names of fields of answers and verdicts that hold one ε or several."""


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.10g}"
    if isinstance(value, dict):
        return ", ".join(f"{_text(part)} ({name})" for name, part in value.items())
    if isinstance(value, tuple):
        return " to ".join(map(_text, value))
    return str(value)


def _list(as_json: bool) -> None:
    from shutil import get_terminal_size

    width = get_terminal_size((80, 24)).columns

    def read() -> str:
        from fedsim.privacy import calculator

        rows = calculator.listing()
        return json.dumps(rows, indent=2) if as_json else calculator.render(rows, width)

    # The rendered text ends with a newline of its own.
    typer.echo(read_without_libraries(read, "fedsim.mechanisms"), nl=as_json)
