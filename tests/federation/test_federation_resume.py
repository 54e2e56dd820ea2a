"""A run that was killed goes on and ends as if it had not been."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import (
    STRATEGIES,
    TOPK,
    contents,
    final_model,
    observation,
    plugin,
    results,
    same,
    scenario,
    train,
    workload,
)

from fedsim.federation import federate, strategies
from fedsim.federation.checkpoint import Checkpoints
from fedsim.federation.records import RoundRecord
from fedsim.recording import files
from fedsim.scenario import Scenario
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import Dataset, FedsimError


def demanding(**changes: Any) -> Scenario:
    """An adaptive server, error feedback, partial participation and probes."""
    return scenario(
        defenses=TOPK,
        federation={"strategy": "FedAdam", "participation": 0.5, "checkpoint_every": 2},
        observe={"rounds": [2, 4], "clients": [0, 1], "batch_sizes": [1]},
        training__rounds=5,
        **changes,
    )


class Killed(BaseException):
    """What a kill is like inside the process: nothing catches it."""


def count_writes(monkeypatch: pytest.MonkeyPatch, kill_at: int | None) -> list[int]:
    """Count every file that is committed; die before the commit of number `kill_at`."""
    counted = [0]
    replace = os.replace

    def counting(source: str, target: str) -> None:
        if counted[0] == kill_at:
            raise Killed
        counted[0] += 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", counting)
    return counted


def test_a_kill_before_any_write_changes_nothing(tmp_path: Path) -> None:
    wanted = demanding()
    with pytest.MonkeyPatch.context() as patch:
        writes = count_writes(patch, None)
        expected = {r["round"]: r for r in results(train(wanted, tmp_path / "whole", "topk"))}
    whole = contents(tmp_path / "whole")
    assert writes[0] > 20
    for moment in range(1, writes[0], 9):
        out = tmp_path / f"killed-{moment}"
        with pytest.MonkeyPatch.context() as patch:
            count_writes(patch, moment)
            with pytest.raises(Killed):
                train(wanted, out, "topk")
        again = results(train(wanted, out, "topk", resume=True))
        assert again == [expected[record["round"]] for record in again], moment
        assert again[-1]["round"] == 5
        assert contents(out) == whole, moment


@pytest.mark.parametrize("name", strategies.names())
def test_every_strategy_trains_and_resumes(name: str, tmp_path: Path) -> None:
    """And does not change what the tap has seen: the client's own update."""
    # A bound that no update reaches, for the strategy that demands one.
    clip = [plugin("clip", norm=100.0)]
    wanted = scenario(
        federation={"strategy": name, "strategy_parameters": STRATEGIES.get(name, {})},
        training__rounds=3,
        training__algorithm="fedavg" if "ClientSide" in name else None,
        defenses={"none": clip if "ClientSide" in name else []},
    )
    records = train(wanted, tmp_path / "whole")
    assert [record.aggregated for record in records] == [4, 4, 4], records[0].details
    assert not any(record.details for record in records)
    after, plan = final_model(tmp_path / "whole", wanted), workload(wanted)
    assert all(bool(torch.isfinite(value).all()) for value in after.values())
    assert not same(after, dict(plan.initial()[0]))
    seen = observation(tmp_path / "whole", "none/round-0001/client-0000-training")
    honest = plan.client_update(0, 1, *plan.initial(), {})
    assert same(dict(seen.update), dict(honest.update.tensors))

    with pytest.MonkeyPatch.context() as patch:
        save = Checkpoints.save

        def save_once(self: Checkpoints, checkpoint: Any) -> None:
            if checkpoint.round == 2:
                raise Killed
            save(self, checkpoint)

        patch.setattr(Checkpoints, "save", save_once)
        with pytest.raises(Killed):
            train(wanted, tmp_path / "killed")
    resumed = results(train(wanted, tmp_path / "killed", resume=True))
    assert resumed == results(records)[1:]
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_recordings_after_the_checkpoint_are_made_again(tmp_path: Path) -> None:
    """So that one recording never mixes what two runs saw."""
    wanted = scenario(federation={"checkpoint_every": 2}, observe={"rounds": [1, 2, 3]})
    stopped = tmp_path / "killed"

    def stop(record: RoundRecord) -> None:
        if record.round == 3:
            raise Killed

    with pytest.raises(Killed):
        federate(wanted, "none", stopped, resume=False, on_round=stop)
    for name in ("observations", "truth"):
        (later,) = (stopped / name / "none").glob("round-0003")
        for path in later.rglob("*.safetensors"):
            path.write_bytes(b"of another run")
    train(wanted, stopped, resume=True)
    train(wanted, tmp_path / "whole")
    assert contents(stopped) == contents(tmp_path / "whole")


def test_memory_of_no_checkpoint_is_forgotten(tmp_path: Path) -> None:
    wanted = demanding()
    for client in range(4):
        stale = tmp_path / "used" / f"client_state/topk/client-000{client}/round-0002.safetensors"
        files.write_bytes(stale, b"of another run")
    assert results(train(wanted, tmp_path / "used", "topk", resume=True)) == results(
        train(wanted, tmp_path / "new", "topk")
    )
    assert contents(tmp_path / "used") == contents(tmp_path / "new")


def test_a_complete_run_is_left_alone(tmp_path: Path) -> None:
    """It trains nothing more, nor another scenario; what changes no result may change."""
    wanted = scenario()
    assert len(train(wanted, tmp_path)) == 3
    before = contents(tmp_path)
    changed = scenario(federation={"timeout": 5.0, "checkpoint_every": 2}, description="other")
    for same_run in (wanted, changed):
        assert train(same_run, tmp_path, resume=True) == []
    with pytest.raises(FedsimError, match="holds results of the stack 'none'; resume"):
        train(wanted, tmp_path)
    changes: list[dict[str, Any]] = [
        {"seed": 4},
        {"training__rounds": 4},
        {"federation": {"strategy": "FedAvgM"}},
    ]
    for change in changes:
        with pytest.raises(FedsimError, match="a checkpoint of another scenario"):
            train(scenario(**change), tmp_path, resume=True)
    assert contents(tmp_path) == before


def test_a_checkpoint_of_more_data_is_refused(tmp_path: Path) -> None:
    """The ε of all rounds would be that of the data there are at the last of them."""
    wanted, told = scenario(), []

    def go(images: int, *, resume: bool) -> None:
        data = load_dataset(wanted)
        assert isinstance(data, Dataset)
        fewer = replace(
            data, train_images=data.train_images[:images], train_labels=data.train_labels[:images]
        )
        own = Workload(wanted, "none", fewer)
        federate(wanted, "none", tmp_path, resume=resume, on_round=told.append, server=own)

    go(400, resume=False)
    with pytest.raises(FedsimError, match=r"of other data: .*restore the data"):
        go(800, resume=True)
    go(400, resume=True)
    assert len(told) == wanted.training.rounds


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    wanted = demanding()
    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        count_writes(patch, 22)
        train(wanted, tmp_path, "topk")
    path = tmp_path / "checkpoints" / "topk.safetensors"
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:100], whole.replace(b"fingerprint", b"finger-rint")):
        path.write_bytes(damaged)
        with pytest.raises(FedsimError, match="not a checkpoint of fedsim"):
            train(wanted, tmp_path, "topk", resume=True)
    path.write_bytes(whole)
    assert train(wanted, tmp_path, "topk", resume=True)[-1].round == 5
