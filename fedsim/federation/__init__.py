"""The federation: the only part of fedsim that imports Flower.

`federate` trains one defense stack as a Flower ServerApp and ClientApps and records what the server
sees. Importing this package sets Flower's environment and imports nothing of Flower itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedsim.federation.records import RoundRecord

if TYPE_CHECKING:
    from fedsim.federation.network.link import Link
    from fedsim.scenario import Scenario
    from fedsim.training.server import Server

__all__ = ["NO_LINK", "RoundRecord", "check", "check_sums", "federate"]

NO_LINK = (
    "federation.engine: deployment needs a SuperLink: name it with --superlink, or start a whole "
    "federation on this machine with fedsim up"
)
"""Why an engine that is elsewhere cannot be used."""

# Flower reads these when it is imported: it must not phone home, nor touch the user's own
# configuration, nor print its progress between ours.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ.setdefault(
    "FLWR_HOME",
    str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedsim" / "flower"),
)
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")


def federate(
    scenario: Scenario,
    stack: str,
    out: Path,
    *,
    resume: bool,
    on_round: Callable[[RoundRecord], None],
    server: Server | None = None,
    link: Link | None = None,
) -> None:
    """Train `stack` (a key of `scenario.defenses`) and record what its server sees below `out`.

    `on_round` is called after each round trained in this call, in order, before the round's
    checkpoint is written: after a kill, the rounds since the last checkpoint come again, and the
    last report of each counts. A stack that is already complete returns at once. Same scenario,
    same kind of processor: same results, bit for bit, on every engine and any number of cores,
    interrupted or not. `server` spares building it again; the local engine takes a workload. `link`
    is for the deployment engine.

    Raises:
        FedsimError: see `check`; or `out` holds results of this stack and `resume` is false, or of
            another scenario; or the engine cannot run here; or the strategy failed.
    """
    from fedsim.federation.engine import run

    run(scenario, stack, out, resume=resume, on_round=on_round, server=server, link=link)


def check(scenario: Scenario) -> None:
    """Refuse before any training what no engine, strategy or defense stack can do.

    Raises:
        FedsimError: the strategy or one of its parameters does not exist (with the nearest name),
            does not fit a defense stack, or the engine's extra is not installed.
    """
    from fedsim.federation.engine import check as check_engine

    check_engine(scenario)


def check_sums(server: Server) -> None:
    """Refuse before any training secure sums of `server`'s stack that cannot work.

    Raises:
        FedsimError: see `fedsim.federation.secure_aggregation.plan.check`.
    """
    from fedsim.federation.secure_aggregation import plan

    plan.check(server)
