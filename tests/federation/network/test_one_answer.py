"""What a server may vary of a message, of a setting and of the order, varied: a node's answer is
byte-equal to the one that it has given, or it is refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, RecordDict
from nodes_support import nodes
from test_lying_server import BINS, NOISE, Lying, of_table
from test_node_app import RUN, ask, counted, resolved, settings

from fedsim.federation import wire
from fedsim.federation.network.home import run_folder
from fedsim.scenario import Scenario
from fedsim.training.client import Client
from fedsim.training.schedule import Probe
from fedsim.types import FedsimError, Tensors

DP_SGD = [{"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 1.0}]
CORRELATED = [
    {"name": "correlated_noise", "norm": 1.0, "noise_multiplier": 1.0, "correlation": 0.9}
]
TRAINED = {"rounds": 4, "local": {"batch_size": 64}}
PROBED = {"rounds": [2], "clients": [0], "batch_sizes": [1], "trials": 2}


def private(stack: list[dict[str, Any]] = NOISE, **changes: Any) -> Scenario:
    return resolved(defenses={"noise": stack}, **{"training": TRAINED, **changes})


def equal(one: Tensors, other: Tensors) -> bool:
    return list(one) == list(other) and all(torch.equal(one[n], other[n]) for n in one)


def secret_copied(source: Path, target: Path) -> None:
    """Give the node of `target` the secret of that of `source`, and nothing else of it."""
    target.mkdir(parents=True)
    shutil.copy(source / "secret", target / "secret")


def test_the_same_census_in_other_words_is_the_same_census(tmp_path: Path) -> None:
    """Each of them gave new noise on the same batch and weights: 300 answers averaged it out."""
    apps = nodes(tmp_path)
    first = Lying(private(), apps).train()
    for written in ("[480,479,479]", " [480, 479, 479]", "[480, 479,\n479 ]"):
        assert equal(first, Lying(private(), apps, held=written).train())


@pytest.mark.parametrize("stack", ["noise", "again"])
def test_another_census_of_a_run_is_refused_whatever_the_stack(stack: str, tmp_path: Path) -> None:
    both = resolved(defenses={"noise": NOISE, "again": NOISE}, training=TRAINED)
    apps = nodes(tmp_path)
    Lying(both, apps).train("again")
    for counts in ("[480, 479, 478]", "[480, 0, 479]", "[480, 479.0, 479]", "[480, true, 479]"):
        for action in ("train", "query.identify"):
            with pytest.raises(FedsimError, match="examples"):
                Lying(both, apps, held=counts).ask(action, wire.greeting(0), stack)


@pytest.mark.parametrize(
    "change", [{"description": "x"}, {"attacks": []}, {"attack_seed": 9}, {"name": "other"}]
)
def test_what_a_scenario_calls_itself_changes_no_answer(
    change: dict[str, Any], tmp_path: Path
) -> None:
    apps = nodes(tmp_path)
    first = Lying(private(), apps).train()
    assert equal(first, Lying(private().model_copy(update=change), apps).train())


@pytest.mark.parametrize("stack", [NOISE, CORRELATED, []])
def test_rounds_in_descending_order_are_refused(
    stack: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Under balls_in_bins every answer was of bin 0; correlated noise took z_1 back each time."""
    lying = Lying(private(stack, training=BINS), nodes(tmp_path))
    lying.train(round=2)
    first = lying.train(round=3)
    for round in (1, 2):
        with pytest.raises(FedsimError, match=f"round {round}"):
            lying.ask("query.identify", wire.greeting(0))
            lying.train(round=round, weights=0.1)
    with pytest.raises(FedsimError, match="round 1"):
        lying.train(round=1)
    assert equal(first, lying.train(round=3))


@pytest.mark.parametrize("stack", [CORRELATED, DP_SGD])
@pytest.mark.parametrize("greeted", [0, 1])
def test_a_greeting_takes_nothing_back_of_what_was_answered(
    stack: list[dict[str, Any]], greeted: int, tmp_path: Path
) -> None:
    """A node that forgets its steps begins with bin 0 again, and with noise that is taken back."""
    honest, forgetful = tmp_path / "one", tmp_path / "other"
    lying = Lying(private(stack, training=BINS), nodes(honest))
    expected = [lying.train(round=round) for round in (1, 2, 3)]
    secret_copied(honest / "node-0", forgetful / "node-0")
    lying = Lying(private(stack, training=BINS), nodes(forgetful))
    found = []
    for round in (1, 2, 3):
        lying.ask("query.identify", wire.greeting(greeted))
        found.append(lying.train(round=round))
    assert all(map(equal, found, expected))


def test_a_node_that_was_killed_answers_the_round_again_to_the_byte(tmp_path: Path) -> None:
    scenario = private(CORRELATED, training=BINS)
    first = [Lying(scenario, nodes(tmp_path)).train(round=round) for round in (1, 2)]
    lying = Lying(scenario, nodes(tmp_path))
    lying.ask("query.identify", wire.greeting(1))
    assert equal(first[1], lying.train(round=2))
    lying.train(round=3)


@pytest.mark.parametrize("moment", ["save", "note_release"])
def test_a_kill_between_two_writes_costs_an_answer_and_no_noise(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever of the round was written: it can be asked again, until a later one is answered."""
    from fedsim.federation.client_state import ClientState

    honest, killed = tmp_path / "one", tmp_path / "other"
    scenario = private(CORRELATED, training=BINS)
    expected = Lying(scenario, nodes(honest)).train(round=1)
    secret_copied(honest / "node-0", killed / "node-0")

    def kill(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    def kill_in(round: int) -> None:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(ClientState, moment, kill)
            Lying(scenario, nodes(killed)).train(round=round)

    kill_in(1)
    assert equal(expected, Lying(scenario, nodes(killed)).train(round=1))
    kill_in(2)
    Lying(scenario, nodes(killed)).train(round=3)
    with pytest.raises(FedsimError, match="round 2"):
        Lying(scenario, nodes(killed)).train(round=2)


def test_an_answer_that_comes_out_otherwise_is_not_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor rounds otherwise: of the same noise, on the bits that noise is to hide."""
    apps, update = nodes(tmp_path), Client.update
    Lying(private(), apps).train()

    def moved(self: Client, *given: Any, **named: Any) -> Any:
        result = update(self, *given, **named)
        tensors = {n: torch.nextafter(t, t + 1) for n, t in result.update.tensors.items()}
        object.__setattr__(result.update, "tensors", tensors)
        return result

    monkeypatch.setattr(Client, "update", moved)
    with pytest.raises(FedsimError, match="round 1"):
        Lying(private(), apps).train()


@pytest.mark.parametrize("stack", [NOISE, [{"name": "gaussian_noise", "std": 1.0}], []])
def test_a_probe_is_answered_at_one_model(stack: list[dict[str, Any]], tmp_path: Path) -> None:
    """Behind a stack that claims nothing, too: its noise was new at each model that was shown."""
    lying = Lying(private(stack, observe=PROBED), nodes(tmp_path))
    first = lying.train(round=2, probe=Probe(batch_size=1, trial=0))
    assert equal(first, lying.train(round=2, probe=Probe(batch_size=1, trial=0)))
    with pytest.raises(FedsimError, match="round 2"):
        lying.train(round=2, probe=Probe(batch_size=1, trial=0), weights=1e-9)
    lying.train(round=2)
    lying.train(round=3)
    with pytest.raises(FedsimError, match="round 2"):
        lying.train(round=2, probe=Probe(batch_size=1, trial=1))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"observe": {**PROBED, "releases": 2}}, "observe.releases"),
        ({"observe": {"rounds": [2], "clients": [0], "batch_sizes": None}}, "sampling"),
        ({"observe": {**PROBED, "rounds": [9]}}, "observe.rounds"),
        ({"training": {"algorithm": "fedsgd", "local": {"steps": 2}}}, "training.algorithm"),
    ],
)
def test_a_node_checks_the_scenario_itself(
    change: dict[str, Any], key: str, tmp_path: Path
) -> None:
    """A server that sends what `fedsim validate` refuses would choose how batches are drawn."""
    plain = private(DP_SGD, training=BINS, observe=PROBED).model_dump()
    for section, part in change.items():
        plain[section] |= part
    lying = Lying(private(DP_SGD, training=BINS, observe=PROBED), nodes(tmp_path))
    lying.scenario = Scenario.model_validate(plain)
    for kind in ("query.census", "query.identify"):
        with pytest.raises(FedsimError, match=key):
            lying.ask(kind, wire.greeting(0))


def test_assumptions_of_a_claim_are_checked_of_who_was_not_counted(tmp_path: Path) -> None:
    """Asked for its count, and asked again: a server may leave the census out."""
    stack = [{"name": "random_projection", "epsilon": 1.0, "delta": 1e-5, "leverage": 1e-6}]
    scenario = of_table({"name": "diabetes", "row_norm": 1.0}, 3, stack)
    (app, *_) = nodes(tmp_path)
    said = r"assumes of them: the node's own log says more$"
    with pytest.raises(FedsimError, match=said):
        counted(app, scenario)
    with pytest.raises(FedsimError, match=said):
        Lying(scenario, [app], held="[118, 118, 117]").ask("query.identify", wire.greeting(0))


@pytest.mark.parametrize("version", [None, "1", "3", "02"])
def test_another_version_is_refused_by_its_name(version: str | None, tmp_path: Path) -> None:
    (app, *_) = nodes(tmp_path)
    config = {"version": version} if version else {}
    base = {k: v for k, v in settings(private(), "noise").items() if k != "version"}
    for kind in ("query.census", "query.identify", "train"):
        with pytest.raises(FedsimError, match="version"):
            ask(app, kind, {**base, **config}, wire.greeting(0))


def test_a_run_on_other_data_is_refused(tmp_path: Path) -> None:
    apps = nodes(tmp_path)
    Lying(private(), apps).train()
    (run_folder(tmp_path / "node-0", RUN) / "data").write_text("0" * 64)
    with pytest.raises(FedsimError, match="other data"):
        Lying(private(), nodes(tmp_path)).train()


def _order(lying: Lying, round: int = 1) -> RecordDict:
    parameters, buffers = wire.encode(lying.parameters), wire.encode(lying.buffers)
    return wire.order(round, parameters, buffers, None)


def _with_config(**more: Any) -> Callable[[RecordDict], None]:
    def change(order: RecordDict) -> None:
        wire.config_of(order).update(more)

    return change


def _with_tensors(change: Callable[[dict[str, Array]], dict[str, Array]]) -> Any:
    def changed(order: RecordDict) -> None:
        order[wire.ARRAYS] = ArrayRecord(change(dict(wire.arrays_of(order, wire.ARRAYS))))

    return changed


def _with_arrays(convert: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> Any:
    def change(order: RecordDict) -> None:
        arrays = wire.arrays_of(order, wire.ARRAYS)
        for name, value in list(arrays.items()):
            arrays[name] = Array.from_numpy_ndarray(convert(value.numpy()))

    return change


ODD: dict[str, tuple[Callable[[RecordDict], None], bool]] = {
    "another key of the order": (_with_config(again=1), True),
    # Noise is drawn in the order of the tensors: in two orders, two answers tell it apart.
    "another order": (_with_tensors(lambda arrays: dict(reversed(arrays.items()))), True),
    "another record": (lambda order: order.update({"planted": ArrayRecord()}), True),
    "Fortran's order": (_with_arrays(np.asfortranarray), True),
    "bytes the other way round": (_with_arrays(lambda value: value.astype(">f4")), False),
    "half precision": (_with_arrays(lambda value: value.astype("f2")), False),
    "another sign of zero": (_with_arrays(lambda value: value * np.float32(-1)), False),
    "not a number": (_with_arrays(lambda value: value * np.float32("nan")), False),
    "an array of one more axis": (_with_arrays(lambda value: value[None]), False),
    "a tensor more": (_with_tensors(lambda arrays: {**arrays, "more": Array(np.zeros(3))}), False),
    "a tensor fewer": (_with_tensors(lambda arrays: dict(list(arrays.items())[:-1])), False),
    "no round": (lambda order: wire.config_of(order).pop(wire.ROUND), False),
    "a round that is none": (_with_config(**{wire.ROUND: 1.0}), False),
    "a probe of training": (_with_config(**{wire.PROBE_SIZE: 1}), False),
}


def test_an_order_in_another_form_is_the_same_order_or_refused(tmp_path: Path) -> None:
    lying = Lying(private(), nodes(tmp_path))
    first = lying.train()
    for name, (change, answered) in ODD.items():
        order = _order(lying)
        change(order)
        if answered:
            again = wire.decode(wire.arrays_of(lying.ask("train", order).content, wire.ARRAYS))
            assert equal(first, again), name
        else:
            with pytest.raises(FedsimError):
                lying.ask("train", order)
    lying.ask("query.left_out", wire.order(1, ArrayRecord(), ArrayRecord(), None))
    assert equal(first, lying.train())


def test_what_decides_no_release_is_free_to_vary(tmp_path: Path) -> None:
    """Also how often a server says that it saves: what a node remembers is no less for it."""
    honest, varied = tmp_path / "one", tmp_path / "other"
    scenario = private(CORRELATED, training=BINS)
    lying = Lying(scenario, nodes(honest))
    expected = [lying.train(round=round) for round in (1, 2, 3)]
    secret_copied(honest / "node-0", varied / "node-0")
    apps = nodes(varied)
    for round, every in ((1, 1), (2, 50), (3, 2)):
        free = {"checkpoint_every": every, "timeout": 7.0 * every, "engine": "deployment"}
        plain = scenario.model_dump()
        plain["federation"] |= free
        plain["defenses"] = {f"more{every}": [], **plain["defenses"]}
        lying = Lying(scenario, apps)
        lying.scenario = Scenario.model_validate(plain)
        lying.ask("query.identify", wire.greeting(every))
        assert equal(expected[round - 1], lying.train(round=round))
