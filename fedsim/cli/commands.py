"""Defines the command line, each of whose commands calls the Python function of the same name.

Exit status: 0 done, 1 the work failed, 2 the input was refused before any work, 130 interrupted.
Everything heavy is imported inside the commands, so that `fedsim --help` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from fedsim.cli import assess, network
from fedsim.cli.privacy import app as privacy_app
from fedsim.cli.shared import (
    Quiet,
    RootCertificates,
    ScenarioFile,
    Settings,
    SharedSeed,
    TableFormat,
    exits,
    leaderboard,
    say_what_lacks,
    show,
)
from fedsim.cli.stand_ins import read_without_libraries

if TYPE_CHECKING:
    from fedsim.types import Reconstruction

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="What a federated-learning deployment leaks, and which defense is worth its price.",
)
app.add_typer(privacy_app, name="privacy")

Kind = Literal[
    "attacks", "defenses", "learners", "models", "data", "engines", "mechanisms", "targets"
]


@app.command("run")
def _run(
    scenario: ScenarioFile,
    out: Annotated[
        Path | None, typer.Option(help="Folder to fill; default runs/<name of the scenario>.")
    ] = None,
    settings: Settings = None,
    seed: Annotated[int | None, typer.Option(help="Short for --set seed=...")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:N or auto; short for --set device=...")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Processes that attack; default: cores / threads of the scenario."
        ),
    ] = None,
    superlink: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Deploy: the SuperLink whose nodes train. See docs/network.md.",
        ),
    ] = None,
    roots: RootCertificates = None,
    secret: Annotated[
        Path | None,
        typer.Option("--superexec-secret", help="The SuperLink's secret of those who execute."),
    ] = None,
    shared_seed: SharedSeed = False,
    log: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOOL[=DIR]",
            help="At the end, copy figures and pictures to a local store of mlflow or tensorboard; "
            "may be repeated.",
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Train the federations of a scenario, attack what was seen, score, and report.

    SCENARIO is a YAML file; docs/scenarios.md describes it.
    """
    # Asked before the imports below, which take seconds.
    if superlink is not None:
        network.refuse_unfit(superlink, roots)
    network.refuse_without_superlink(
        superlink,
        {
            "--root-certificates": roots is not None,
            "--superexec-secret": secret is not None,
            "--shared-seed": shared_seed,
        },
    )
    # Put last, since later overrides win over those of --set.
    short = {"seed": seed, "device": device}
    overrides = [*(settings or []), *(f"{k}={v}" for k, v in short.items() if v is not None)]
    with exits():
        from fedsim.federation.network.link import Link
        from fedsim.pipeline import run

        link = None
        if superlink is not None:
            link = Link(superlink=superlink, roots=roots, secret=secret, shared_seed=shared_seed)
            overrides.append("federation.engine=deployment")
        finished = run(
            scenario,
            out=out,
            overrides=overrides,
            resume=resume,
            workers=workers,
            log=log or [],
            quiet=quiet,
            link=link,
        )
        if not quiet:
            show(finished)


@app.command("attack")
def _attack(
    observation: Annotated[Path, typer.Argument(metavar="OBSERVATION")],
    name: Annotated[str, typer.Option("--attack", metavar="NAME", help="See fedsim list attacks.")],
    settings: Settings = None,
    restarts: Annotated[int, typer.Option(min=1, max=1000, help="Starting points.")] = 1,
    grants: Annotated[
        list[str] | None,
        typer.Option(
            "--grant",
            metavar="KEY=VALUE",
            help="What the attacker is granted, as in a scenario's `knowledge`: labels=known, say; "
            "may be repeated.",
        ),
    ] = None,
    truth: Annotated[
        Path | None,
        typer.Option(help="Run folder with truth/; found by itself beside the recording."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Default: that of the recorded run.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N or auto.")] = "cpu",
    threads: Annotated[
        int, typer.Option(min=1, help="That compute; those of the recorded run give its bytes.")
    ] = 1,
    out: Annotated[
        Path | None, typer.Option(help="Folder for reconstruction.safetensors and result.json.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")] = False,
) -> None:
    """Attack one recording again, anywhere; print the result as JSON.

    OBSERVATION is a recording: a .json file below the observations/ of a run's folder.
    """
    with exits():
        from fedsim import progress
        from fedsim.attacking.replay import attack
        from fedsim.contracts.attack import Progress
        from fedsim.scenario import grant_of, parameters_of
        from fedsim.system.paths import writable_folder

        parameters = parameters_of(
            "fedsim.attacks", name, settings or [], origin=f"--attack {name}"
        )
        grant = grant_of(grants or [])
        if out:
            # Before the attack: it may take hours, and would be lost.
            writable_folder(out, "--out")
        # Progress goes to the standard error: the standard output is JSON for programs.
        with progress.display(quiet) as display:
            begun: list[Progress] = []

            def on_progress(at: Progress) -> None:
                if not begun:  # an attack may refuse a recording until its first iteration
                    display.stage(name, restarts)
                    begun.append(at)
                said = f"start {at.restart + 1}: iteration {at.iteration}, loss {at.loss:.2e}"
                display.detail(name, said)

            reconstruction, row = attack(
                observation,
                name,
                parameters,
                restarts=restarts,
                grant=grant,
                seed=seed,
                device=device,
                threads=threads,
                truth=truth,
                on_progress=on_progress,
            )
        typer.echo(json.dumps(row, indent=2))
        if out:
            _save(reconstruction, row, out)


@app.command("leaderboard")
def _leaderboard(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    format: Annotated[TableFormat, typer.Option(help="How to write it.")] = "table",
    html: Annotated[
        Path | None, typer.Option(help="Page to write instead: one HTML file that opens offline.")
    ] = None,
) -> None:
    """Rank attacks against defenses over one or several runs.

    DIR is the folder of a run, or one that holds folders of runs, as of a sweep.
    """
    with exits():
        from fedsim.report import load_runs
        from fedsim.system.paths import writable_file

        if html:
            from fedsim.report import write_page

            writable_file(html, "--html")
            typer.echo(write_page(folders, html))
        runs = load_runs(folders)
        if not html:
            typer.echo(leaderboard(runs, format), nl=False)
        say_what_lacks(runs)


@app.command("serve")
def _serve(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    host: Annotated[
        str, typer.Option(help="To listen on; off the loopback interface a token is needed.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8321,
    token: Annotated[
        bool, typer.Option("--token", help="Demand a token on the loopback interface, too.")
    ] = False,
) -> None:
    """Serve the leaderboard as a page that follows runs while they go on.

    DIR is the folder of a run, or one that holds folders of runs. Ctrl-C ends it.
    """
    with exits():
        from fedsim.report.serving import PageServer, serve
        from fedsim.system.addresses import is_loopback

        def on_ready(server: PageServer) -> None:
            typer.echo(f"leaderboard: {server.address}")
            if not is_loopback(host):
                typer.echo(
                    "The connection is not encrypted: on a network of others, listen on 127.0.0.1 "
                    "and open the page through a tunnel.",
                    err=True,
                )

        serve(folders, host=host, port=port, demand_token=token, on_ready=on_ready)


@app.command("check")
def _check(
    folders: Annotated[list[Path], typer.Argument(metavar="DIR...")],
    max_psnr: Annotated[
        float | None, typer.Option(help="dB that the best image of any attack may have.")
    ] = None,
    max_gain: Annotated[
        float | None,
        typer.Option(
            help="dB over guessing that any attack may gain, at the interval's upper end."
        ),
    ] = None,
    max_epsilon: Annotated[
        float | None, typer.Option(help="ε of all that a run releases; ∞ is above any.")
    ] = None,
    defenses: Annotated[
        list[str] | None,
        typer.Option("--defense", help="That counts; may be repeated. Default: all defended."),
    ] = None,
) -> None:
    """Hold runs to limits: status 1 with a line for each that is broken, or was not measured.

    DIR is the folder of a run, or of a sweep. A table that is INVALID keeps to no limit.
    """
    with exits():
        from fedsim.report.limits import broken_limits

        lines = broken_limits(
            folders,
            max_psnr=max_psnr,
            max_gain=max_gain,
            max_epsilon=max_epsilon,
            defenses=defenses or [],
        )
        _judge(lines, "all limits are kept")


@app.command("compare")
def _compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE")],
    after: Annotated[Path, typer.Argument(metavar="AFTER")],
) -> None:
    """Compare two runs: status 1 with a line for all that leaks more, or was measured otherwise.

    BEFORE and AFTER are folders of runs, or of sweeps. A larger ε, other data or attacks under one
    name, and what is not measured any more, are lines, too.
    """
    with exits():
        from fedsim.report.limits import grown

        _judge(grown(before, after), f"nothing leaks more in {after} than in {before}")


def _judge(lines: list[str], good: str) -> None:
    typer.echo("\n".join(lines) if lines else good)
    if lines:
        raise typer.Exit(1)


@app.command("report")
def _report(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: Annotated[
        Path | None, typer.Option(help="File to write; default report.html in the folder.")
    ] = None,
) -> None:
    """Write the report of a run again: one HTML file that opens offline.

    DIR is the folder of a run, or of a sweep.
    """
    with exits():
        from fedsim.report import load_runs, write_report
        from fedsim.system.paths import writable_file

        if out:
            writable_file(out, "--out")
        typer.echo(write_report(folder, out))
        say_what_lacks(load_runs([folder]))


@app.command("dossier")
def _dossier(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default DIR.")] = None,
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Print dossier.pdf, too, through an installed browser.")
    ] = False,
) -> None:
    """Write what a run is evidence of, for whoever has to judge a deployment.

    DIR is the folder of a run, or of a sweep; of a run that has not ended, the pages say so.
    """
    with exits():
        from fedsim.report import load_runs
        from fedsim.report.dossier import write_dossier
        from fedsim.system.paths import writable_folder

        writable_folder(out or folder, "--out" if out else "DIR")
        for path in write_dossier(folder, out, pdf=pdf):
            typer.echo(path)
        say_what_lacks(load_runs([folder]))


@app.command("list")
def _list(
    kind: Annotated[Kind | None, typer.Argument(metavar="KIND")] = None,
    format: Annotated[Literal["table", "json"], typer.Option(help="How to write it.")] = "table",
) -> None:
    """Show the installed plugins, of all kinds or of one.

    KIND is one of attacks, defenses, learners, models, data, engines, mechanisms and targets;
    without it, all are shown.
    """
    with exits():
        from shutil import get_terminal_size

        kinds = [kind] if kind else list(get_args(Kind))
        width = get_terminal_size((80, 24)).columns

        def read() -> str:
            # Imported here, where a child process may have stand-ins in the place of libraries.
            from fedsim.contracts import listing

            rows = listing.rows(kinds)
            return json.dumps(rows, indent=2) if format == "json" else listing.render(rows, width)

        typer.echo(read_without_libraries(read, *(f"fedsim.{each}" for each in kinds)))


@app.command("schema")
def _schema() -> None:
    """Print the JSON Schema of scenario files, for completion in editors."""
    with exits():

        def read() -> object:
            from fedsim.scenario import json_schema

            return json_schema()

        kinds = ("attacks", "data", "defenses", "learners", "models")
        found = read_without_libraries(read, *(f"fedsim.{each}" for each in kinds))
        typer.echo(json.dumps(found, indent=2))


@app.command("validate")
def _validate(
    scenario: ScenarioFile,
    settings: Settings = None,
    resolved: Annotated[
        bool, typer.Option("--resolved", help="Print it with every default written out.")
    ] = False,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Read the file alone, as where the data are not.")
    ] = False,
) -> None:
    """Check all that a run checks before its work: status 2 if a run would be refused.

    SCENARIO is a YAML file. Its data are loaded; nothing is trained, attacked or written.
    """
    with exits():
        from fedsim.scenario import cautions, dump, expand, open_document
        from fedsim.words import describe_variant

        document = open_document(scenario, settings or [])
        variants = expand(document)
        # Variants share most warnings: each is shown once.
        for line in dict.fromkeys(line for v in variants for line in cautions(v.scenario)):
            typer.secho(f"{scenario}: WARNING: {line}", err=True, fg="yellow")
        facts: list[list[str]] = [[] for _ in variants]
        if not without_data:
            from fedsim.acceptance import validate

            accepted = validate(scenario, overrides=settings or [], quiet=False)
            facts = [variant.lines() for variant in accepted]
        if resolved:
            # Several documents in one stream of YAML, as a sweep is several scenarios.
            typer.echo("---\n".join(dump(variant.scenario) for variant in variants), nl=False)
            return
        typer.echo(f"{scenario}: valid{', its data aside' if without_data else ''}")
        for variant, lines in zip(variants, facts, strict=True):
            indent = "  "
            if variant.label:
                words = describe_variant(variant.assignment)
                # Words are added only where they say more than the label.
                same = words.replace(", ", ",") == variant.label
                typer.echo(f"  {variant.label}{'' if same else f'  ({words})'}")
                indent = "    "
            for line in lines:
                typer.echo(f"{indent}{line}")


@app.command("preflight")
def _preflight(
    origin: Annotated[Path, typer.Argument(metavar="SCENARIO|DIR")],
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, with all indicators.")
    ] = False,
) -> None:
    """Tell before any run whether updates are attackable, by what, and why; runs no attack.

    SCENARIO is a YAML file; DIR is the folder of a run, of which up to three rounds are looked at.
    """
    with exits():
        from fedsim.forecasting.forecast import render
        from fedsim.forecasting.preflight import preflight_file
        from fedsim.privacy.numerics import work
        from fedsim.progress import report_work
        from fedsim.system.threads import fix_within

        with fix_within(1), report_work("preflight", "the forecasts"):
            forecasts = preflight_file(origin, settings or [], tell=work.tell)
        rows = [forecast.as_row() for forecast in forecasts]
        # The rendered text ends with a newline of its own.
        typer.echo(json.dumps(rows, indent=2) if as_json else render(forecasts), nl=as_json)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from fedsim import __version__

        typer.echo(f"fedsim {__version__}")
        raise typer.Exit


def make_printable() -> None:
    """Changes `sys.stdout` and `sys.stderr` in place, so that printing does not end the process.

    A character that a terminal lacks is printed as its escape; a missing stream discards text.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        # A process may be started without the stream, and printing to None would end it.
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
        elif isinstance(stream, TextIOWrapper):
            # A terminal that has no ε shows its escape, instead of ending a run with an error.
            stream.reconfigure(errors="backslashreplace")


def _save(reconstruction: Reconstruction, row: dict[str, Any], out: Path) -> None:
    from fedsim.recording.files import write_json, write_tensors

    parts = ("images", "labels", "features", "rows", "membership", "determined", "certified")
    found = {name: getattr(reconstruction, name) for name in parts}
    # Readable for their owner alone (`write_tensors`), since these may be a client's images.
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    write_tensors(out / "reconstruction.safetensors", tensors)
    write_json(out / "result.json", row)


assess.add_to(app)
network.add_to(app)
