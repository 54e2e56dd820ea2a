"""Defines the command that reports on what a tap recorded of somebody's Flower app."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from fedsim.cli.shared import Quiet, exits, show

_Model = Annotated[
    str,
    typer.Option(
        metavar="MODULE:NAME",
        help="The app's model: a class, or a function with its arguments, as in "
        '"my_app.task:get_model(num_classes=10)"; found from the current folder.',
    ),
]
_Truth = Annotated[
    list[Path],
    typer.Option(help="What fedsim.witness wrote to; may be repeated, once a client's disk."),
]
_Out = Annotated[Path, typer.Option(help="Folder to fill with results and report.html.")]
_Mean = Annotated[
    str | None, typer.Option(help="What the app normalizes by, as 0.5,0.5,0.5; default 0.")
]
_Std = Annotated[str | None, typer.Option(help="As --mean; default 1.")]
_InputShape = Annotated[
    str | None, typer.Option(help="C,H,W; default that of the witnessed images.")
]
_Classes = Annotated[
    int | None, typer.Option(min=2, help="Outputs of the model; default as many as it has.")
]
_Answer = Annotated[
    Literal["weights", "delta", "gradient"],
    typer.Option(help="What clients answer: weights, delta (less those sent), gradient."),
]
_Prefix = Annotated[str, typer.Option(help="Before the app's names in the model's own, as heads.")]
_BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Of the app's clients; default as witnessed.")
]
_Lr = Annotated[float | None, typer.Option(help="Of the app's clients, with --batch-size.")]
_Epochs = Annotated[int, typer.Option(min=1, help="Of a round, with --batch-size.")]
_Momentum = Annotated[float, typer.Option(help="Of SGD, with --batch-size.")]
_Attacks = Annotated[
    list[str] | None,
    typer.Option(
        "--attack", metavar="NAME[:KEY=VALUE,...]", help="See fedsim list attacks; may be repeated."
    ),
]
_Defenses = Annotated[
    list[str] | None,
    typer.Option(
        "--defense",
        metavar="NAME[:KEY=VALUE,...]",
        help="What clients do to their update, in order; see fedsim list defenses.",
    ),
]
_Grants = Annotated[
    list[str] | None,
    typer.Option("--grant", metavar="KEY=VALUE", help="As of fedsim attack; may be repeated."),
]


def _assess(
    tapped: Annotated[Path, typer.Argument(metavar="TAPPED")],
    model: _Model,
    truth: _Truth,
    out: _Out,
    mean: _Mean = None,
    std: _Std = None,
    input_shape: _InputShape = None,
    classes: _Classes = None,
    answer: _Answer = "weights",
    prefix: _Prefix = "",
    batch_size: _BatchSize = None,
    lr: _Lr = None,
    epochs: _Epochs = 1,
    momentum: _Momentum = 0.0,
    attacks: _Attacks = None,
    defenses: _Defenses = None,
    grants: _Grants = None,
    rounds: Annotated[str, typer.Option(help="Which are attacked: 1,3 or last.")] = "last",
    clients: Annotated[int, typer.Option(min=1, help="Attacked in each round.")] = 2,
    run: Annotated[int | None, typer.Option(help="Id of the recorded run; default newest.")] = None,
    name: Annotated[str | None, typer.Option(help="Title of the report.")] = None,
    seed: Annotated[int, typer.Option(help="Of attacks.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that attack.")] = None,
    quiet: Quiet = False,
) -> None:
    """Attack what a tap recorded of a Flower app, score it against the witness, and report.

    TAPPED is the folder that fedsim.tap wrote to. See docs/your-own-flower-app.md.
    """
    with exits():
        from fedsim.assessment import assess
        from fedsim.results.record import strict_json
        from fedsim.scenario import grant_of
        from fedsim.system import paths
        from fedsim.types import FedsimError

        # Together they replace the witness's account of the training; one alone would mix the two.
        if (batch_size is None) != (lr is None):
            raise FedsimError("--batch-size, --lr: expected both or none")
        local = {"batch_size": batch_size, "lr": lr, "epochs": epochs, "momentum": momentum}
        # Without --attack the argument is left out, so that the function's own default holds.
        chosen = dict(_plugins("attack", attacks))
        finished = assess(
            tapped,
            model,
            truth=truth,
            out=out,
            mean=_numbers("--mean", mean, float, _CHANNELS),
            std=_numbers("--std", std, float, _CHANNELS),
            input_shape=_numbers("--input-shape", input_shape, int, "C,H,W"),
            classes=classes,
            answer=answer,
            prefix=prefix,
            local=None if batch_size is None else local,
            grant=grant_of(grants or []),
            defenses=[{"name": own, **given} for own, given in _plugins("defense", defenses)],
            rounds=rounds
            if rounds == "last"
            else _numbers("--rounds", rounds, int, "last, or numbers as 1,3"),
            clients=clients,
            run=run,
            name=name,
            seed=seed,
            workers=workers,
            quiet=quiet,
            **({"attacks": chosen} if chosen else {}),
        )
        if not quiet:
            show(finished)
            notes = strict_json(paths.content(finished.out / "record.json", paths.TEXT))["notes"]
            for note in notes.values():
                typer.echo(note, err=True)


def add_to(app: typer.Typer) -> None:
    """Adds the command `assess` to the command-line application `app`, in place."""
    app.command("assess")(_assess)


def _plugins(kind: str, texts: list[str] | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Parses texts as `name:key=value,key=value`; yields name and parameters of each plugin."""
    from fedsim.scenario import parameters_of

    for text in texts or []:
        name, _, rest = text.partition(":")
        settings = [part for part in rest.split(",") if part]
        yield name, parameters_of(f"fedsim.{kind}s", name, settings, origin=f"--{kind} {name}")


_CHANNELS = "numbers as 0.5,0.5,0.5"
_Number = TypeVar("_Number", int, float)


def _numbers(
    option: str, text: str | None, kind: type[_Number], expected: str
) -> list[_Number] | None:
    from fedsim.types import FedsimError

    try:
        return None if text is None else [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise FedsimError(f"{option}: expected {expected}, got {text!r}") from error
