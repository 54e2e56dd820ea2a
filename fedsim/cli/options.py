"""Defines options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
