"""Every engine gives the local engine's results; Flower's on Ray leaves no process behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from federation_support import BATCH_NORM, STRATEGIES, TOPK, contents, results, scenario, train

from fedsim.federation import federate
from fedsim.federation.client_state import ClientState
from fedsim.federation.records import RoundRecord
from fedsim.federation.refusals import check_scenario
from fedsim.scenario import Scenario
from fedsim.types import FedsimError

STACKS = {**TOPK, "secure": [{"name": "aggregate"}]}


def demanding(engine: str, **changes: Any) -> Scenario:
    """Batch norm, an adaptive server, partial participation, probes and error feedback."""
    return scenario(
        **BATCH_NORM,
        defenses=STACKS,
        federation={"engine": engine, "strategy": "FedAdam", "participation": 0.75, **changes},
        observe={"rounds": [1, "last"], "clients": [0, 1], "batch_sizes": [2]},
    )


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FedsimError, match=r"pip install 'fedsim\[simulation\]'"):
        check_scenario(demanding("simulation"))
    check_scenario(demanding("local"))


@pytest.mark.by_hand
@pytest.mark.parametrize("stack", STACKS)
def test_each_engine_leaves_the_same_bytes(stack: str, tmp_path: Path) -> None:
    rounds: dict[str, list[dict[str, Any]]] = {}
    for name in ("local", "simulation"):
        rounds[name] = results(train(demanding(name), tmp_path / name, stack))
    assert rounds["simulation"] == rounds["local"]
    assert contents(tmp_path / "simulation") == contents(tmp_path / "local")


@pytest.mark.parametrize("engine", ["local", pytest.param("simulation", marks=pytest.mark.by_hand)])
def test_a_client_that_fails_is_counted_and_the_others_go_on(engine: str, tmp_path: Path) -> None:
    """Its memory on disk is damaged after the first round."""
    wanted = demanding(engine, participation=1.0)
    records: list[RoundRecord] = []

    def damage(record: RoundRecord) -> None:
        records.append(record)
        state = ClientState(tmp_path, "topk", 1)._path(record.round)
        if state.exists():
            state.write_bytes(b"damaged")

    federate(wanted, "topk", tmp_path, resume=False, on_round=damage)
    assert [record.failures["client_error"] for record in records] == [0, 1, 1]
    assert [record.aggregated for record in records] == [4, 3, 3]
    assert "cannot be read as safetensors" in records[1].details[0]


@pytest.mark.by_hand
def test_an_error_of_the_child_is_the_parents_error(tmp_path: Path) -> None:
    wrapper = "DifferentialPrivacyServerSideFixedClipping"
    parameters = {**STRATEGIES[wrapper], "num_sampled_clients": 9}
    wanted = demanding("simulation", strategy=wrapper, strategy_parameters=parameters)
    with pytest.raises(FedsimError, match="num_sampled_clients is 9, but 3 clients"):
        train(wanted, tmp_path, "topk")


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("sys.exit('no memory left')", "ended with status 1 .*no memory left"),
        ("""print('{"error": "no"}', flush=True); time.sleep(600)""", "no"),
    ],
)
def test_a_child_that_dies_is_reported_and_one_that_lingers_after_an_error_is_ended(
    does: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, children = subprocess.Popen, list[Any]()

    def instead(command: list[str], **options: Any) -> Any:
        code = f"import sys, time; sys.stdin.readline(); {does}"
        children.append(started([command[0], "-c", code], **options))
        return children[0]

    monkeypatch.setattr(subprocess, "Popen", instead)
    with pytest.raises(FedsimError, match=said):
        train(demanding("simulation"), tmp_path, "topk")
    assert children[0].poll() is not None


ORPHAN = """
import os, pathlib, queue, subprocess, sys
from fedsim.federation.simulation import _listen
os.setsid()
print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
_listen(sys.stdin.buffer, queue.Queue(), pathlib.Path(sys.argv[1]))
"""


def test_a_child_ends_with_its_parent_and_takes_all_that_it_started_with_it(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", ORPHAN, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdin and child.stdout
        started = Path(f"/proc/{int(child.stdout.readline())}/stat")
        assert started.exists()
        child.stdin.close()  # as the parent's death does
        assert child.wait(600) == -signal.SIGKILL
    assert not scratch.exists()
    while started.exists() and started.read_text().split()[2] != "Z":
        time.sleep(0.05)
