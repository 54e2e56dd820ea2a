"""Defines commands of a federation over a network: `up`, `keys`, `register`, `node`, `collect`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from fedsim.cli.shared import (
    Quiet,
    RootCertificates,
    ScenarioFile,
    Settings,
    SharedSeed,
    exits,
    show,
)
from fedsim.system import addresses


def _up(
    scenario: ScenarioFile,
    out: Annotated[Path, typer.Option(help="Folder to fill, with the nodes' folders in it.")],
    nodes: Annotated[
        int | None,
        typer.Option("-n", "--nodes", min=1, help="Clients, a node each; default: the scenario's."),
    ] = None,
    settings: Settings = None,
    shared_seed: SharedSeed = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")] = False,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that attack.")] = None,
    quiet: Quiet = False,
) -> None:
    """Run a scenario over a whole federation on this machine: SuperLink, gate, and a node each.

    SCENARIO is a YAML file. TLS, keys and database are made for it and thrown away. The nodes keep
    the truth: attacks are scored once it is collected (`fedsim collect`), which with --shared-seed
    is done at once.
    """
    with exits():
        from fedsim.deploying import up

        finished = up(
            scenario,
            out=out,
            nodes=nodes,
            overrides=settings or [],
            shared_seed=shared_seed,
            resume=resume,
            workers=workers,
            quiet=quiet,
        )
        if not quiet:
            show(finished)


def _keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    nodes: Annotated[int, typer.Option("-n", "--nodes", min=1, help="Clients, a node each.")],
    hosts: Annotated[
        list[str],
        typer.Option(
            "--host",
            help="Name or address of the SuperLink, and of its gate, as they are reached; may be "
            "repeated.",
        ),
    ],
    days: Annotated[int, typer.Option(min=1, help="After which the certificates end.")] = 30,
) -> None:
    """Make certificates, node keys and the SuperLink's secret: a folder for each party.

    DIR gets superlink/, gate/, runner/, node-0/, and so on; hand each to its owner alone. A node's
    has what it signs secure sums with, too: signing.key, and peers.json of all public halves. The
    authority's key is forgotten: for another node, make all keys anew.
    """
    with exits():
        from fedsim.federation.network.keys import make_keys

        for party in make_keys(folder, nodes, hosts, days=days):
            typer.echo(party)


def _register(
    public: Annotated[list[Path], typer.Argument(metavar="KEY...")],
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="Of the SuperLink itself.")],
    roots: RootCertificates = None,
) -> None:
    """Tell a SuperLink which nodes it may let in.

    KEY is a node's public key, as `fedsim keys` makes it: runner/node-0.pub, say.
    """
    with exits():
        from fedsim.federation.network import flower, link
        from fedsim.system import paths
        from fedsim.types import FedsimError

        flower.check_version()
        link.check(superlink, roots)
        reached = link.Link(superlink=superlink, roots=roots)
        # All files are read before the first is sent, so that a wrong path registers nobody.
        contents = [paths.read_named(path, "KEY", paths.TEXT) for path in public]
        for path, content in zip(public, contents, strict=True):
            try:
                # Nodes that were registered before stay so: the command can be repeated.
                is_new = flower.register(reached, content)
            except FedsimError as error:
                raise FedsimError(f"{path}: {error}") from error
            typer.echo(f"{path.name}: {'registered' if is_new else 'was registered already'}")


def _node(
    superlink: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Of the SuperLink, or of its gate.")
    ],
    data: Annotated[
        str,
        typer.Option(
            help="Your file or folder, in place of the scenario's; `scenario`: your client's share "
            "of the scenario's own source."
        ),
    ],
    client: Annotated[int, typer.Option(min=0, help="Which client you are, from 0.")],
    home: Annotated[
        Path, typer.Option(help="Your own folder: secret, truth and state are kept here.")
    ] = Path("fedsim-node"),
    roots: RootCertificates = None,
    key: Annotated[
        Path | None, typer.Option(help="Your private key, by which the SuperLink knows you.")
    ] = None,
    policy: Annotated[
        Path | None, typer.Option(help="YAML: what you let a server ask (docs/network.md).")
    ] = None,
    signing_key: Annotated[
        Path | None, typer.Option(help="Your private key, with which you sign in secure sums.")
    ] = None,
    peers: Annotated[
        Path | None,
        typer.Option(help="JSON: each client's public signing key, of those you add yours to."),
    ] = None,
    shared_seed: SharedSeed = False,
) -> None:
    """Take part in federations as one client, until you are told to stop."""
    # Before the imports, of torch among others, which take seconds.
    refuse_unfit(superlink, roots)
    with exits():
        from fedsim.federation.network.keys import read_identity
        from fedsim.federation.network.node import NodeMembership, serve, until_told
        from fedsim.federation.network.node_app import NodeApp
        from fedsim.federation.network.policy import Policy

        # Before anything is opened, so that a signal from now on ends the node in order.
        stop = until_told()
        app = NodeApp(
            client,
            data,
            home,
            Policy.read(policy),
            shared_seed=shared_seed,
            identity=read_identity(signing_key, peers),
        )
        member = NodeMembership(superlink=superlink, roots=roots, key=key, home=home)
        serve(app, member, lambda line: typer.echo(line, err=True), stop)


def _collect(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    homes: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", help="A node's folder, or a copy; may be repeated. Default: DIR/nodes/*."
        ),
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that attack.")] = None,
    quiet: Quiet = False,
) -> None:
    """Join the truth that nodes have kept to a run, then attack and score.

    DIR is the run's folder.
    """
    with exits():
        from fedsim.pipeline import collect

        finished = collect(folder, homes=homes or [], workers=workers, quiet=quiet)
        if not quiet:
            show(finished)


def refuse_unfit(superlink: str, roots: Path | None) -> None:
    """Prints why nobody may connect to HOST:PORT `superlink`, and raises `typer.Exit` of status 2.

    Nothing happens on loopback, and with `roots` (TLS root certificates) on any host.
    """
    if reason := addresses.unfit(superlink, has_roots=roots is not None):
        typer.secho(f"--superlink: {reason}", err=True, fg="red")
        raise typer.Exit(2)


def refuse_without_superlink(superlink: str | None, given: Mapping[str, bool]) -> None:
    """Raises `typer.Exit` of status 2, with a printed reason, for a network option of a local run.

    `given` has, by option, whether the user gave it. A run without HOST:PORT `superlink` is local.
    """
    lonely = [option for option, is_given in given.items() if is_given]
    if superlink is None and lonely:
        typer.secho(
            f"{lonely[0]}: of a run over a network; name its SuperLink with --superlink HOST:PORT",
            err=True,
            fg="red",
        )
        raise typer.Exit(2)


def add_to(app: typer.Typer) -> None:
    """Adds the commands `up`, `keys`, `register`, `node` and `collect` to `app`, in place."""
    for command in (_up, _keys, _register, _node, _collect):
        app.command(command.__name__[1:])(command)
