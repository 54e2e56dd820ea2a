"""Every engine gives the local engine's results; Flower's on Ray leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from federation_support import STRATEGIES, contents, results, scenario, train

from fedsim.federation import federate
from fedsim.federation.client_state import ClientState
from fedsim.federation.records import RoundRecord
from fedsim.federation.refusals import check_scenario
from fedsim.scenario import Scenario
from fedsim.types import FedsimError

STACKS = {
    "topk": [{"name": "top_k", "parameters": {"ratio": 0.1}}],
    "secure": [{"name": "aggregate"}],
}


def demanding(engine: str, **changes: Any) -> Scenario:
    """Batch norm, an adaptive server, partial participation, probes and error feedback."""
    return scenario(
        data__source={"name": "digits", "parameters": {"size": 9}},
        model={"name": "convnet", "parameters": {"width": 2, "norm": "batch"}},
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
    assert not ray_processes()


def test_a_child_that_dies_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent = ["-c", "import sys; sys.stdin.readline(); sys.exit('no memory left')"]
    started = subprocess.Popen

    def instead(command: list[str], **options: Any) -> Any:
        return started([command[0], *silent], **options)

    monkeypatch.setattr(subprocess, "Popen", instead)
    with pytest.raises(FedsimError, match=r"ended with status 1 .*no memory left"):
        train(demanding("simulation"), tmp_path, "topk")


CHILD = """
import sys
from pathlib import Path
from fedsim.federation import federate
from fedsim.scenario import Scenario

def say(record):
    print(record.round, flush=True)

federate(Scenario.model_validate_json(sys.argv[1]), "topk", Path(sys.argv[2]), resume=True,
         on_round=say)
"""


@pytest.mark.by_hand
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_or_interrupted_nothing_is_left_and_any_engine_goes_on(
    how: signal.Signals, tmp_path: Path
) -> None:
    def lasting(engine: str) -> Scenario:
        wanted = demanding(engine)
        longer = wanted.training.model_copy(update={"rounds": 30})
        return wanted.model_copy(update={"training": longer})

    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, lasting("simulation").model_dump_json(), str(tmp_path / "a")],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert parent.stdout is not None
    for line in parent.stdout:
        if int(line) >= 3:
            assert ray_processes()
            parent.send_signal(how)
            break
    assert parent.wait() != 0
    parent.stdout.close()
    deadline = time.monotonic() + 600  # for a busy machine
    while (left := ray_processes()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left
    resumed = results(train(lasting("local"), tmp_path / "a", "topk", resume=True))
    whole = results(train(lasting("local"), tmp_path / "b", "topk"))
    assert 3 <= len(resumed) < 30 and resumed == whole[-len(resumed) :]
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def ray_processes() -> list[str]:
    """Running processes of Ray, or of the engine's child, that this user started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if entry.stat().st_uid != os.getuid():
                continue
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if "ray::" in command or "raylet" in command or "gcs_server" in command:
            found.append(command[:120])
        if "fedsim.federation.simulation" in command:
            found.append(command[:120])
    return found
