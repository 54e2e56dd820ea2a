"""What a server that keeps to no rule gets of a node, and of several whose sum is secure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from federation_support import identities
from flwr.app import Message, RecordDict
from nodes_support import LINK, TINY, connect, nodes
from test_node_app import RUN, ask, counted, resolved, settings

from fedsim import pipeline
from fedsim.federation import client_app, wire
from fedsim.federation.network.node_app import NodeApp
from fedsim.federation.network.policy import Policy
from fedsim.federation.secure_aggregation import messages
from fedsim.scenario import Scenario, expand
from fedsim.training.schedule import Probe
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Tensors

HELD = "[480, 479, 479]"
CLIP = {"name": "clip", "norm": 1.0}
NOISE = [CLIP, {"name": "gaussian_noise", "multiplier": 1.0}]
BATCH_NORM = {
    "data": {"source": {"name": "digits", "size": 16}, "clients": 3},
    "model": {"name": "convnet", "norm": "batch", "depth": 4, "width": 4},
}
EVAL = {"rounds": 2, "local": {"steps": 1, "batch_size": 4, "lr": 0.1, "mode": "eval"}}
BINS = {"rounds": 3, "local": {"batch_size": 64, "sampling": "balls_in_bins"}}


class Lying:
    """A server of one scenario, which asks one node whatever it likes."""

    def __init__(
        self, scenario: Scenario, apps: list[NodeApp], client: int = 0, **changes: str
    ) -> None:
        """`changes`: of the run's settings."""
        self.scenario, self.app = scenario, apps[client]
        self.settings = {"held": HELD, **changes}
        start = Workload(scenario, next(iter(scenario.defenses)))
        self.parameters, self.buffers = start.initial()

    def train(
        self,
        stack: str = "noise",
        round: int = 1,
        *,
        weights: float = 0.0,
        buffers: float = 0.0,
        probe: Probe | None = None,
        run: str = RUN,
    ) -> Tensors:
        """The update that the node answers with, at shifted weights and buffers."""
        order = wire.order(
            round,
            wire.encode({name: value + weights for name, value in self.parameters.items()}),
            wire.encode({n: v + buffers for n, v in wire.floating(self.buffers).items()}),
            probe,
        )
        return wire.decode(
            self.ask("train.probe" if probe else "train", order, stack, run).content[wire.ARRAYS]
        )  # type: ignore[arg-type]

    def ask(self, kind: str, content: Any, stack: str = "noise", run: str = RUN) -> Message:
        config = {**settings(self.scenario, stack, run=run), **self.settings}
        return ask(self.app, kind, config, content)


def distance(one: Tensors, other: Tensors) -> float:
    """RMS difference of an entry."""
    parts = [(one[name] - other[name]).flatten() for name in one]
    return float(torch.cat(parts).square().mean().sqrt())


def test_two_stacks_of_a_run_have_no_noise_in_common(tmp_path: Path) -> None:
    """Else the difference of their answers, at two weights, were free of noise."""
    lying = Lying(resolved(defenses={"noise": NOISE, "again": NOISE}), nodes(tmp_path))
    first, again = lying.train("noise"), lying.train("again", weights=0.1)
    assert distance(first, again) > 1.2, "√2, of two independent draws of σ = 1"


def test_noise_without_a_claim_is_of_one_value_alone(tmp_path: Path) -> None:
    noise = [{"name": "gaussian_noise", "std": 1.0}]
    lying = Lying(resolved(defenses={"noise": noise}), nodes(tmp_path))
    first = lying.train()
    assert distance(first, lying.train()) == 0, "a resumed run gets the same"
    with pytest.raises(FedsimError, match="not used twice"):
        lying.train(weights=0.1)


def test_a_round_at_other_buffers_is_refused(tmp_path: Path) -> None:
    scenario = resolved(defenses={"noise": NOISE}, training=EVAL, **BATCH_NORM)
    lying = Lying(scenario, nodes(tmp_path))
    lying.train()
    with pytest.raises(FedsimError, match="not used twice"):
        lying.train(buffers=1.0)


def test_a_round_at_another_memory_is_refused(tmp_path: Path) -> None:
    """What is remembered of the round before is gone, as from a folder that was restored."""
    dp_sgd = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 1.0}]
    lying = Lying(resolved(defenses={"noise": dp_sgd}, training=BINS), nodes(tmp_path))
    lying.train(round=2)
    lying.train(round=3)
    for path in tmp_path.rglob("client_state/**/round-*.safetensors"):
        path.unlink()
    with pytest.raises(FedsimError, match="not used twice"):
        lying.train(round=3)


def test_a_run_is_of_one_scenario(tmp_path: Path) -> None:
    """Else the truth of one would take the place of the other's."""
    apps = nodes(tmp_path)
    Lying(resolved(defenses={"noise": NOISE}), apps).train()
    kept = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    louder = [NOISE[0], {**NOISE[1], "multiplier": 2.0}]
    other = Lying(resolved(defenses={"noise": louder}), apps)
    with pytest.raises(FedsimError, match="the run of another scenario"):
        other.train()
    with pytest.raises(FedsimError, match="the run of another scenario"):
        other.ask("query.identify", wire.greeting(0))
    for path, content in kept.items():
        assert path.name == "releases.json" or path.read_bytes() == content
    other.train(run=RUN[::-1])


def test_a_client_is_asked_what_is_planned_of_it_alone(tmp_path: Path) -> None:
    lying = Lying(resolved(defenses={"noise": NOISE}), nodes(tmp_path), client=1)
    with pytest.raises(FedsimError, match="no such probe is planned for round 2 of client 1"):
        lying.train(round=2, probe=Probe(batch_size=1, trial=0))
    scenario = resolved(defenses={"noise": NOISE}, federation={"participation": 0.34})
    taking_part = Workload(scenario, "noise").plan(1).participants
    for client in range(3):
        lying = Lying(scenario, nodes(tmp_path / "few"), client)
        if client in taking_part:
            lying.train()
        else:
            with pytest.raises(FedsimError, match=f"client {client} takes no part in round 1"):
                lying.train()


@pytest.mark.parametrize(
    "data",
    [
        {"source": {"name": "mnist", "root": "elsewhere", "download": True}, "clients": 3},
        {
            "source": {"name": "digits", "size": 8},
            "clients": 3,
            "partition": {"name": "file", "path": "elsewhere"},
        },
    ],
)
def test_no_file_is_opened_that_a_policy_does_not_list(
    data: dict[str, Any], tmp_path: Path
) -> None:
    (app, *_) = nodes(tmp_path)
    with pytest.raises(FedsimError, match=r"elsewhere: .*\(paths\)"):
        counted(app, resolved(data=data))


def test_a_home_directory_is_no_folder_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = Policy(paths=[str(tmp_path)])
    policy.check_path("weights.safetensors")
    with pytest.raises(FedsimError, match="paths"):
        policy.check_path("~/weights.safetensors")


def test_what_a_stack_of_a_policy_leaves_out_has_its_default() -> None:
    projection = {"name": "random_projection", "epsilon": 1.0, "delta": 1e-5}
    policy = Policy(stacks=[[projection]])
    plain = resolved().model_dump()

    def asked(**more: Any) -> Scenario:
        parameters = {"epsilon": 1.0, "delta": 1e-5, **more}
        stack = [{"name": "random_projection", "parameters": parameters}]
        return Scenario.model_validate({**plain, "defenses": {"own": stack}})

    policy.check(asked(), "own")
    policy.check(asked(shared_among=1), "own")
    with pytest.raises(FedsimError, match="stacks"):
        policy.check(asked(shared_among=10_000), "own")


def test_nothing_passes_by_a_stack_that_a_policy_lists(tmp_path: Path) -> None:
    """Batch norm's statistics of a client's data, which no defense acts on."""
    scenario = resolved(defenses={"none": [], "noise": NOISE}, **BATCH_NORM)
    (app, *_) = nodes(tmp_path, policy=Policy(stacks=[[], NOISE]))
    with pytest.raises(FedsimError, match=r"defenses\.noise: batch-norm statistics"):
        counted(app, scenario)
    config = settings(scenario, "noise", held=HELD)
    with pytest.raises(FedsimError, match=r"defenses\.noise: batch-norm statistics"):
        ask(app, "query.identify", config, wire.greeting(0))
    counted(app, resolved(defenses={"noise": NOISE}, training=EVAL, **BATCH_NORM))


def of_table(source: dict[str, Any], clients: int, stack: list[dict[str, Any]]) -> Scenario:
    changes = {
        "data": {"source": source, "clients": clients},
        "learner": {"name": "sketch", "columns": 4},
        "training": {"rounds": 1},
        "defenses": {"noise": stack},
        "attacks": [{"name": "membership_inference"}],
        "observe": {"batch_sizes": [1]},
        "knowledge": {"rows": "others"},
    }
    (variant,) = expand({**{k: v for k, v in TINY.items() if k != "model"}, **changes})
    return variant.scenario


def owned(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = ["age,name,outcome", "0.5,Ada Lovelace,ill", "0.25,Kurt Gödel,well"]
    path = folder / "patients.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("features", "target"),
    [
        ("name", {"name": "outcome", "classes": ["ill", "well"]}),
        ("age", {"name": "name", "classes": ["a", "b"]}),
        ("other", {"name": "outcome", "classes": ["ill", "well"]}),
    ],
)
def test_a_refusal_tells_nothing_of_the_data(
    features: str, target: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A schema that does not fit were otherwise answered with a cell, or with the columns."""
    source = {
        "name": "table",
        "path": "theirs.csv",
        "features": [{"name": features, "low": 0.0, "high": 1.0}],
        "target": target,
        "row_norm": 1.0,
    }
    scenario = of_table(source, 1, [])
    (app,) = nodes(tmp_path / "homes", 1, data=str(owned(tmp_path / "mine")))
    with pytest.raises(FedsimError, match="the node's own log says more") as refusal:
        counted(app, scenario)
    words = ("Ada", "ill", "well", "outcome", "patients", str(tmp_path))
    assert not [word for word in words if word in str(refusal.value)]
    assert "patients.csv" in capsys.readouterr().err


def test_an_error_of_another_kind_is_told_by_its_name_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = Lying(resolved(defenses={"noise": NOISE}), nodes(tmp_path))

    def fail(*_: object) -> None:
        raise KeyError("a cell of the data")

    monkeypatch.setattr(client_app._FederationClient, "compute", fail)
    with pytest.raises(FedsimError, match=r"^KeyError: the node's own log says more$"):
        lying.train()


EPSILON = {"name": "dp_sgd", "norm": 1.0, "epsilon": 4.0, "delta": 1e-5}


def promised(**changes: Any) -> Scenario:
    training = {"rounds": 2, "local": {"batch_size": 20}}
    return resolved(**{"defenses": {"noise": [EPSILON]}, "training": training, **changes})


@pytest.mark.slow
def test_a_node_holds_a_server_to_epsilon_and_delta(tmp_path: Path) -> None:
    (app, *_) = nodes(tmp_path, policy=Policy(stacks=[[EPSILON]]))
    counted(app, promised())
    for other in ({"epsilon": 5.0}, {"delta": 1e-3}, {"norm": 2.0}):
        with pytest.raises(FedsimError, match="does not allow this stack"):
            counted(app, promised(defenses={"noise": [{**EPSILON, **other}]}))
    with pytest.raises(FedsimError, match=r"delta: 1e-05, .*privacy.delta, which is 0.01"):
        counted(app, promised(privacy={"delta": 1e-2}))


@pytest.mark.slow
def test_no_probes_are_outside_of_the_epsilon_of_a_policy(tmp_path: Path) -> None:
    asked = {"observe": {"batch_sizes": [1], "trials": 20}}
    outside = promised(**asked, privacy={"probes": "outside"})
    (app, *_) = nodes(tmp_path, policy=Policy(stacks=[[EPSILON]]))
    with pytest.raises(FedsimError, match=r"privacy.probes: .*\(stacks\)"):
        counted(app, outside)
    with pytest.raises(FedsimError, match=r"privacy.probes: .*\(stacks\)"):
        ask(app, "query.identify", settings(outside, "noise", held=HELD), wire.greeting(0))
    counted(app, promised(**asked))
    (free, *_) = nodes(tmp_path / "free")
    counted(free, outside)


@pytest.mark.slow
def test_a_node_does_not_answer_behind_an_epsilon_that_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for its count, and asked again: a server may leave the first out."""
    by_label = {"name": "dirichlet", "alpha": 5.0}
    scenario = promised(data={**TINY["data"], "partition": by_label})
    (app, *_) = nodes(tmp_path)
    said = r"defenses.noise: epsilon: 4 at δ = 1e-05 per example cannot be promised: .*labels"
    with pytest.raises(FedsimError, match=said):
        counted(app, scenario)
    held = json.dumps([len(own) for own in Workload(scenario, "noise").parts])
    with pytest.raises(FedsimError, match=said):
        ask(app, "query.identify", settings(scenario, "noise", held=held), wire.greeting(0))


SECURE = [CLIP, {"name": "secure_aggregation"}]
ALL = [CLIP, {"name": "secure_aggregation", "threshold": 1.0}]
STACKS = {"none": [CLIP], "secure": SECURE, "all": ALL}
FEWER = {"federation": {"participation": 0.67}}


def secure(**changes: Any) -> Scenario:
    return resolved(defenses=STACKS, **changes)


def answer(
    app: NodeApp, scenario: Scenario, stage: str, table: Mapping[int, bytes], stack: str = "secure"
) -> Message:
    content = messages.table(1, table)
    return ask(app, f"train.{stage}", settings(scenario, stack, held=HELD), content)


def test_no_two_keys_of_a_node_are_one(tmp_path: Path) -> None:
    app, *_ = nodes(tmp_path, identities=identities(3))
    first, second = (
        messages.read_table(answer(app, secure(), "keys", {}).content) for _ in range(2)
    )
    assert first != second


def test_nodes_that_were_shown_different_scenarios_are_in_no_sum(tmp_path: Path) -> None:
    """The server tells 1 and 2 of a learning rate of nothing, so that the sum were 0's update."""
    apps = nodes(tmp_path, identities=identities(3))
    local = {"steps": 1, "batch_size": 4}
    told = [
        secure(training={"rounds": 2, "local": {**local, "lr": lr}}) for lr in (0.1, 1e-12, 1e-12)
    ]
    keys: dict[int, bytes] = {}
    for app, scenario in zip(apps, told, strict=True):
        keys |= messages.read_table(answer(app, scenario, "keys", {}).content)
    for app, scenario in zip(apps, told, strict=True):
        with pytest.raises(FedsimError, match="are not signed by it"):
            answer(app, scenario, "shares", keys)


@pytest.mark.parametrize(
    ("policy", "stack", "changes", "said"),
    [
        ({"minimum_cohort": 2}, "secure", {}, None),
        ({"minimum_cohort": 3}, "secure", {}, r"opens with 2 of the 3 .*\(minimum_cohort\)"),
        ({"minimum_cohort": 3}, "all", {}, None),
        ({"minimum_cohort": 4}, "all", {}, r"opens with 3 of the 3 .*\(minimum_cohort\)"),
        ({"minimum_cohort": 3}, "none", {}, r"releases none as it is \(minimum_cohort\)"),
        ({"minimum_cohort": 3}, "all", FEWER, r"opens with 2 of the 2 .*\(minimum_cohort\)"),
        ({"stacks": [SECURE]}, "secure", {}, None),
        *(
            ({"stacks": [[CLIP, {**SECURE[1], **other}]]}, "secure", {}, "does not allow this")
            for other in ({"threshold": 0.9}, {"noise_multiplier": 1.0})
        ),
    ],
)
def test_a_policy_holds_of_sums(
    policy: dict[str, Any], stack: str, changes: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    (app, *_) = nodes(tmp_path, policy=Policy.model_validate(policy), identities=identities(3))
    if said is None:
        assert answer(app, secure(**changes), "keys", {}, stack).has_content()
        return
    for kind in ("train", "train.probe", "train.keys", "train.masked", "train.unmask"):
        with pytest.raises(FedsimError, match=said):
            config = settings(secure(**changes), stack, held=HELD)
            ask(app, kind, config, RecordDict())


SECURE_RUN = {**TINY, "defenses": {"secure": SECURE}, "federation": {"engine": "deployment"}}


@pytest.mark.usefixtures("attacks_here")
def test_nodes_with_secrets_of_their_own_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No two runs have the same masked vector, and the truth of it stays with the node."""
    seen = []
    for run in ("one", "two"):
        out, homes = tmp_path / run / "out", tmp_path / run / "homes"
        connect(monkeypatch, nodes(homes, identities=identities(3)))
        pipeline.run(SECURE_RUN, out=out, workers=1, link=LINK)
        rounds = (out / "rounds.jsonl").read_text().splitlines()
        assert [json.loads(row)["aggregated"] for row in rounds] == [3, 3]
        masked = out / "observations" / "secure" / "round-0002"
        seen.append((masked / "client-0000-b1-t0.safetensors").read_bytes())
        assert not (out / "truth").exists()
        pipeline.collect(out, homes=sorted(homes.iterdir()), workers=1)
        rows = (out / "results.jsonl").read_text().splitlines()
        assert {json.loads(row)["status"] for row in rows} == {"ok"}
    assert seen[0] != seen[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("none", "knows no keys of its peers"),
        ("swapped", "client 0 has another key there than --signing-key"),
        ("few", "no key of client 2, who is to take part"),
        ("cohort", "minimum_cohort"),
    ],
)
def test_a_node_that_cannot_know_its_peers_takes_no_part(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = None if change == "none" else identities(3)
    if known and change == "swapped":
        known[0] = replace(known[0], key=known[1].key)
    if known and change == "few":
        known[0] = replace(known[0], peers={n: known[0].peers[n] for n in (0, 1)})
    policy = Policy(minimum_cohort=4) if change == "cohort" else None
    apps = nodes(tmp_path / "homes", identities=known, policy=policy)
    connect(monkeypatch, apps)
    with pytest.raises(FedsimError, match=message):
        pipeline.run(SECURE_RUN, out=tmp_path / "out", workers=1, link=LINK)
    for app in apps:
        if change == "swapped" and app is apps[0]:
            with pytest.raises(FedsimError, match="check --client"):
                app.refuse_other_identity()
        else:
            app.refuse_other_identity()
