"""Sketches and regressions, alone and as a Flower federation computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict

import fedsim
from fedsim import rng
from fedsim.federation import client_app, federate, local, refusals, server_app
from fedsim.federation.checkpoint import Checkpoints
from fedsim.federation.client_app import FederationJob
from fedsim.federation.records import RoundRecord
from fedsim.learners.closed_form import VALUE, regularize, sketch
from fedsim.learners.least_squares import normal_solution, solve
from fedsim.results.record import read_lines
from fedsim.scenario import Scenario, ScenarioError, dump, open_document
from fedsim.scenario.resolve import resolve
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Table

BASE: dict[str, Any] = {
    "name": "closed",
    "seed": 5,
    "data": {
        "source": {"name": "breast_cancer", "features": ["mean radius", "mean area"]},
        "clients": 4,
    },
    "learner": {"name": "least_squares", "columns": 50},
    "training": {"rounds": 1},
    "attacks": [],
}


def scenario(**changes: Any) -> Scenario:
    return resolve({**BASE, **changes})


def workload(wanted: Scenario, stack: str = "none") -> Workload:
    return Workload(wanted, stack)


def trained(wanted: Scenario, out: Path, stack: str = "none") -> tuple[torch.Tensor, RoundRecord]:
    """What the server has after the round."""
    records: list[RoundRecord] = []
    federate(wanted, stack, out, resume=False, on_round=records.append)
    saved = Checkpoints(out, wanted, stack).load()
    assert saved is not None
    return saved.parameters[VALUE], records[0]


def table(workload: Workload) -> Table:
    assert isinstance(workload.dataset, Table)
    return workload.dataset


def by_hand(workload: Workload, columns: int, sigma: float) -> torch.Tensor:
    """The sum of all clients' sketches."""
    total = torch.zeros(())
    for client, part in enumerate(workload.parts):
        own = rng.generator(5, "learner", 1, client)
        total = total + sketch(regularize(table(workload).train_rows[part], sigma), columns, own)
    return total


def test_a_sketch_has_the_moments_of_a_random_projection() -> None:
    """Over many columns: SS'/r -> D'D + σ² I, each entry within five standard deviations."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(7, 3, generator=draw, dtype=torch.float64)
    count, sigma = 200_000, 2.0
    projection = sketch(regularize(rows, sigma), count, draw)
    expected = rows.T @ rows + sigma**2 * torch.eye(3, dtype=torch.float64)
    spread = ((expected.diag().outer(expected.diag()) + expected.square()) / count).sqrt()
    assert bool(((projection @ projection.T / count - expected).abs() < 5 * spread).all())
    assert bool((projection.mean(1).abs() < 5 * (expected.diag() / count).sqrt()).all())


def test_sigma_zero_is_the_sketch_itself_and_noise_is_added_to_it() -> None:
    """The part of G that belongs to the rows is the same: what differs is σ times the noise."""
    rows = torch.randn(37, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, one, two = (
        sketch(regularize(rows, sigma), 2001, torch.Generator().manual_seed(3))
        for sigma in (0.0, 1.0, 2.0)
    )
    assert regularize(rows, 0.0) is rows
    torch.testing.assert_close(2 * (one - plain), two - plain, rtol=0, atol=1e-9)
    assert float((one - plain).std()) == pytest.approx(1.0, abs=0.05)


def test_least_squares_of_a_known_solution() -> None:
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(40, 3, generator=draw, dtype=torch.float64)
    wanted = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    rows = torch.cat([features, (features @ wanted)[:, None]], dim=1)
    torch.testing.assert_close(solve(rows), wanted)
    # On any sketch of rows that fit exactly the solution is exact, too.
    torch.testing.assert_close(solve(sketch(rows, 5, draw).T), wanted)
    torch.testing.assert_close(normal_solution(rows, 7, draw), wanted)


@pytest.mark.slow
def test_the_normal_solution_is_the_limit_of_solving_on_sketches() -> None:
    """Mean x and covariance |e|² (B'B)^-1 / r; on sketches of 400 columns, within ten percent."""
    draw = torch.Generator().manual_seed(4)
    rows = torch.randn(60, 3, generator=draw, dtype=torch.float64)
    columns, count = 400, 4000
    best = solve(rows)
    residual = rows[:, :2] @ best - rows[:, 2]
    expected = residual.square().sum() * torch.linalg.inv(rows[:, :2].T @ rows[:, :2]) / columns
    normal = torch.stack([normal_solution(rows, columns, draw) for _ in range(count)])
    solved = torch.stack([solve(sketch(rows, columns, draw).T) for _ in range(count)])
    for draws, tolerance in ((normal, 0.08), (solved, 0.1)):
        error = torch.linalg.matrix_norm(draws.T.cov() - expected)
        assert float(error / torch.linalg.matrix_norm(expected)) < tolerance
        assert bool(((draws.mean(0) - best).abs() < 5 * (expected.diag() / count).sqrt()).all())


@pytest.mark.parametrize("stack", ["none", "sum", "noise", "shared"])
def test_a_federation_computes_the_sketch_of_the_union(tmp_path: Path, stack: str) -> None:
    """Through Flower's messages, with and without secure aggregation and the noise."""
    noise = {"name": "random_projection", "epsilon": 1.0, "delta": 1e-3}
    wanted = scenario(
        learner={"name": "sketch", "columns": 20},
        defenses={
            "none": [],
            "sum": ["aggregate"],
            "noise": [noise],
            "shared": [{**noise, "shared_among": 4}, "aggregate"],
        },
    )
    release, record = trained(wanted, tmp_path, stack)
    here = workload(wanted, stack)
    assert here.release is not None
    sigma = here.stack.sigma(here.release)
    assert (sigma > 0) == (stack in ("noise", "shared"))
    torch.testing.assert_close(release, by_hand(here, 20, sigma), rtol=1e-12, atol=1e-9)
    assert record.aggregated == 4 and record.train_loss is None and record.test_accuracy is None
    rows = table(here).test_rows
    gram, estimate = rows.T @ rows, release @ release.T / 20
    error = torch.linalg.matrix_norm(
        estimate / torch.linalg.matrix_norm(estimate) - gram / torch.linalg.matrix_norm(gram)
    )
    assert record.test_loss == pytest.approx(float(error), rel=1e-9)


@pytest.mark.parametrize("method", ["sketch", "als", "ls", "ols"])
def test_what_the_server_makes_of_regressions(tmp_path: Path, method: str) -> None:
    """It solves on the sum of sketches; of coefficients it takes the plain mean."""
    learner = {"name": "least_squares", "method": method}
    if method != "ols":
        learner["columns"] = 50
    wanted = scenario(learner=learner)
    release, record = trained(wanted, tmp_path)
    here = workload(wanted)
    data = table(here)
    if method == "sketch":
        torch.testing.assert_close(release, by_hand(here, 50, 0.0), rtol=1e-12, atol=1e-9)
        coefficients = solve(release.T)
    else:
        coefficients = release
    if method == "ols":
        each = [solve(data.train_rows[part]) for part in here.parts]
        torch.testing.assert_close(release, torch.stack(each).mean(0))
    predicted, target = data.test_rows[:, :-1] @ coefficients, data.test_rows[:, -1]
    assert record.test_loss == pytest.approx(float((predicted - target).square().mean()))
    assert record.test_accuracy == pytest.approx(
        float((predicted.sign() == target.sign()).double().mean())
    )
    assert record.test_accuracy > 0.75


def test_no_client_tells_how_many_rows_it_has() -> None:
    """The count of one row more or less would tell what the mechanism hides."""
    here = workload(
        scenario(data={**BASE["data"], "partition": {"name": "dirichlet", "alpha": 1.0}})
    )
    updates = [here.client_update(client, 1, *here.initial(), {}) for client in range(4)]
    assert len({len(part) for part in here.parts}) > 1
    assert {result.update.num_examples for result in updates} == {1}
    assert {tuple(result.update.tensors) for result in updates} == {(VALUE,)}
    assert all(result.loss is None and result.truth is None for result in updates)


def test_nothing_is_combined_when_a_client_that_shares_the_noise_is_missing(tmp_path: Path) -> None:
    shared = {"name": "random_projection", "epsilon": 1.0, "delta": 1e-3, "shared_among": 4}
    wanted = scenario(defenses={"none": [shared, "aggregate"]})
    here = workload(wanted)
    job = FederationJob(scenario=wanted.model_dump_json(), stack="none", out=str(tmp_path))
    honest = client_app.build(job, here)

    def faulty(message: Message, context: Context) -> Message:
        if (
            message.metadata.message_type.startswith("train")
            and context.node_config["partition-id"] == 2
        ):
            raise RuntimeError("gone")
        return honest(message, context)

    records: list[RoundRecord] = []
    server = server_app.build(here, tmp_path, records.append)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with local.identity():
        server(local.LocalGrid(faulty, 4, 60.0), context)  # type: ignore[arg-type]
    (record,) = records
    assert record.aggregated == 0 and record.failures["client_error"] == 1
    assert any("shared noise" in line for line in record.details)
    saved = Checkpoints(tmp_path, wanted, "none").load()
    assert saved is not None and not saved.parameters[VALUE].any()


def test_a_whole_run_states_what_was_spent(tmp_path: Path) -> None:
    noise = {"name": "random_projection", "epsilon": 2.0, "delta": 1e-5}
    plain = {**BASE, "defenses": {"none": [], "noise": [noise]}}
    fedsim.run(plain, out=tmp_path / "run")
    none, noisy = read_lines(tmp_path / "run" / "rounds.jsonl")
    assert none["epsilon"] == "inf"
    assert noisy["epsilon"] == pytest.approx(2.0, rel=1e-6)
    assert noisy["bytes_up"] == none["bytes_up"] > 0
    assert (tmp_path / "run" / "report.html").exists()
    written = tmp_path / "run" / "scenario.yaml"
    assert dump(resolve(open_document(written))) == written.read_text()
    fedsim.run(plain, out=tmp_path / "run", resume=True)


NOISE = {"name": "random_projection", "epsilon": 1.0, "delta": 1e-3}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "mlp"}, "model: learner least_squares trains no model; remove it"),
        ({"training": {"rounds": 2}}, "training.rounds: .* use `rounds: 1`"),
        ({"training": {"rounds": 1, "local": {"lr": 1.0}}}, "training.local: .* does not train"),
        ({"attacks": ["idlg"]}, "idlg reads updates of a model"),
        ({"learner": {"name": "least_squares"}}, "takes columns with the methods"),
        ({"learner": {"name": "least_squares", "method": "ols", "columns": 9}}, "none with ols"),
    ],
)
def test_what_a_scenario_cannot_mean(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        resolve({**BASE, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"source": "digits", "clients": 2}}, "data.source: digits is images"),
        (
            {"learner": "sgd", "model": "lenet", "training": {}},
            "model: model lenet takes images, and the data are rows of",
        ),
        ({"learner": {"name": "least_squares", "columns": 3}}, "learner: .* columns of at least 4"),
        ({"defenses": {"a": [{"name": "dropout", "rate": 0.5}]}}, "defenses.a: Dropout changes"),
        (
            {"defenses": {"a": [{**NOISE, "shared_among": 5}, "aggregate"]}},
            "defenses.a: the noise is shared among 5 clients, and 4 take part",
        ),
        (
            {"defenses": {"a": [NOISE]}, "learner": {"name": "least_squares", "method": "ols"}},
            "defenses.a: random_projection protects a sketch",
        ),
        ({"federation": {"strategy": "FedMedian"}}, "federation.strategy: .* use FedAvg"),
    ],
)
def test_what_cannot_work_is_refused_before_any_work(changes: dict[str, Any], message: str) -> None:
    wanted = scenario(**changes)
    with pytest.raises(FedsimError, match=message):
        refusals.check_scenario(wanted)
        refusals.check(Workload(wanted, next(iter(wanted.defenses))))
