"""Rules 19 and 21: what a claim assumes of the data, and they contradict, is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsim
from fedsim.data.table import RangeColumn, TableFile, TableSource, TargetColumn
from fedsim.federation import refusals
from fedsim.results import rows
from fedsim.scenario import Scenario
from fedsim.scenario.resolve import resolve
from fedsim.training.source import load_dataset
from fedsim.training.workload import Workload
from fedsim.types import FedsimError, Table
from fedsim_defenses.gaussian_sampling import GaussianSampling
from fedsim_defenses.random_projection import largest_leverage

SKETCH = {"name": "sketch", "columns": 20}
ALS = {"name": "least_squares", "method": "als", "columns": 40}
NTK = {"name": "ntk", "kernel": "continuous"}


def scenario(defense: object, learner: object = SKETCH, **changes: Any) -> Scenario:
    images = isinstance(learner, dict) and learner["name"] == "ntk"
    source = {"name": "digits", "size": 8} if images else "breast_cancer"
    return resolve(
        {
            "name": "assumptions",
            "seed": 3,
            "data": {"source": source, "clients": 3},
            "learner": learner,
            "training": {"rounds": 1},
            "defenses": {"made": defense if isinstance(defense, list) else [defense]},
            "attacks": [],
            "privacy": {"delta": 1e-3},
            **changes,
        }
    )


def projection(leverage: float, **changes: Any) -> dict[str, Any]:
    parameters = {"epsilon": 1.0, "delta": 1e-3, "leverage": leverage, **changes}
    return {"name": "random_projection", **parameters}


def check(made: Scenario) -> None:
    refusals.check(Workload(made, "made"))


def leverages() -> list[float]:
    here = Workload(scenario([]), "made")
    assert isinstance(here.dataset, Table)
    rows = here.dataset.train_rows
    return [largest_leverage(part) for part in (*(rows[own] for own in here.parts), rows)]


def test_leverage_is_that_of_the_normal_equations() -> None:
    drawn = torch.randn(12, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    hat = drawn @ torch.linalg.inv(drawn.T @ drawn) @ drawn.T
    assert largest_leverage(drawn) == pytest.approx(float(hat.diagonal().max()), rel=1e-12)
    # A column twice: D'D has no inverse, and no row tells more than before.
    assert largest_leverage(torch.cat([drawn, drawn[:, :1]], 1)) == pytest.approx(
        largest_leverage(drawn), rel=1e-9
    )
    # A row that alone has an entry in its column is told apart for certain.
    alone = torch.block_diag(drawn, torch.ones(1, 1, dtype=torch.float64))
    assert largest_leverage(alone) == pytest.approx(1.0, abs=1e-12)
    assert largest_leverage(torch.zeros(0, 4, dtype=torch.float64)) == 0.0


@pytest.mark.parametrize(
    "made",
    [projection(0.2), [{"name": "least_squares", "epsilon": 1, "delta": 1e-3, "leverage": 0.2}]],
)
def test_leverage_that_a_row_exceeds_is_refused(made: Any) -> None:
    learner = SKETCH if isinstance(made, dict) else ALS
    with pytest.raises(FedsimError, match=r"defenses.made: .*leverage: expected no row above 0\.2"):
        check(scenario(made, learner))


def test_leverage_that_no_row_exceeds_passes() -> None:
    worst = max(leverages()[:3])
    check(scenario(projection(worst)))
    with pytest.raises(FedsimError, match="the claim would not hold"):
        check(scenario(projection(worst * 0.999)))


def test_of_shared_noise_the_union_counts() -> None:
    *each, union = leverages()
    between = (union + max(each)) / 2
    assert union < max(each)
    check(scenario([projection(between, shared_among=3), "aggregate"]))
    with pytest.raises(FedsimError, match="rows of client 0"):
        check(scenario(projection(between)))
    with pytest.raises(FedsimError, match="rows of all clients"):
        check(scenario([projection(union * 0.999, shared_among=3), "aggregate"]))


def test_a_probe_of_few_rows_has_rows_of_more_leverage() -> None:
    worst = max(leverages()[:3])
    with pytest.raises(FedsimError, match=r"leverage: expected no row above"):
        check(scenario(projection(worst), observe={"batch_sizes": [16], "rounds": [1]}))


def kernel(eta: float) -> dict[str, Any]:
    return {"name": "gaussian_sampling", "beta": 1e-6, "samples": 5, "least_eigenvalue": eta}


def test_an_eigenvalue_below_the_one_assumed_is_refused() -> None:
    with pytest.raises(
        FedsimError, match=r"defenses.made: .*least_eigenvalue: expected none below 5"
    ):
        check(scenario(kernel(5.0), NTK))


def test_an_eigenvalue_is_compared_with_the_least() -> None:
    assumed = GaussianSampling(beta=1e-6, samples=5, least_eigenvalue=0.5)
    assumed.check(0, torch.diag(torch.tensor([0.5, 3.0, 9.0], dtype=torch.float64)))
    with pytest.raises(FedsimError, match=r"got 0\.49 in the kernel matrix of client 4"):
        assumed.check(4, torch.diag(torch.tensor([0.49, 3.0, 9.0], dtype=torch.float64)))
    tiny = GaussianSampling(beta=1e-6, samples=5, least_eigenvalue=1e-15)
    with pytest.raises(FedsimError, match="got 0 "):  # what rounding makes of a singular matrix
        tiny.check(0, torch.ones(3, 3, dtype=torch.float64) + 1e-15 * torch.eye(3))


def test_a_run_is_refused_before_it_starts(tmp_path: Path) -> None:
    made = scenario(projection(0.2))
    with pytest.raises(FedsimError, match="leverage"):
        fedsim.run(made, out=tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoints/*"))


class Scaled(TableSource):
    """A third party's table, whose ranges are those of its rows; it does not say so."""

    def load(self) -> Table:
        raw = torch.rand(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        low, high = float(raw.min()), float(raw.max())
        columns = tuple(RangeColumn(name=name, low=low, high=high) for name in "ab")
        return self.table("scaled", raw, columns, TargetColumn("y", raw[:, 0]))


def test_a_table_that_does_not_say_claims_nothing() -> None:
    made = scenario(projection(1.0))
    own = load_dataset(made)
    assert isinstance(own, Table)
    assert rows.spent(Workload(made, "made", own), 1).epsilon == pytest.approx(1.0, rel=1e-6)
    told = rows.spent(Workload(made, "made", Scaled().load()), 1)
    assert told.epsilon == float("inf") and "Table.private_statistics" in str(told.reason)
    ranged = replace(own, private_statistics=("ranges of the columns",))
    told = rows.spent(Workload(made, "made", ranged), 1)
    assert told.epsilon == float("inf") and "ranges of the columns" in str(told.reason)


def test_rows_beyond_their_bound_are_refused() -> None:
    own = load_dataset(scenario(projection(1.0)))
    assert isinstance(own, Table)
    with pytest.raises(FedsimError, match=r"row 3 has an L2 norm of .* row_norm declares"):
        long = own.train_rows.clone()
        long[3] *= 1.01 * own.row_norm / long[3].norm()
        replace(own, train_rows=long)
    with pytest.raises(FedsimError, match="L2 norm of nan"):
        replace(own, train_rows=own.train_rows * float("nan"))
    exact = own.train_rows * (own.row_norm / own.train_rows.norm(dim=1, keepdim=True))
    replace(own, train_rows=exact)


def test_one_row_of_a_file_changes_one_row_of_the_table(tmp_path: Path) -> None:
    """Ranges are declared: an extreme value in one row scales no other."""
    tables = []
    for value in ("0.5", "1e9"):
        path = tmp_path / "rows.csv"
        lines = [f"{value if i == 3 else i / 50},{i / 60}" for i in range(50)]
        path.write_text("a,y\n" + "\n".join(lines) + "\n")
        columns = [RangeColumn(name=name, low=0, high=1) for name in "ay"]
        source = TableFile(path=str(path), features=(columns[0],), target=columns[1])
        tables.append(source.load())
    here, there = tables
    assert here.private_statistics == ()
    before, after = (
        {(split, *row) for split in ("train", "test") for row in rows[split].tolist()}
        for rows in ({"train": t.train_rows, "test": t.test_rows} for t in tables)
    )
    assert len(before) == 50 and len(before - after) == len(after - before) == 1
    assert here.row_norm == there.row_norm
