"""Flower apps as their authors publish them, with the few lines that tap and witness them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stock_apps_runner import APP, build, changed_lines, imported, run
from torch import nn

from fedsim.assessment import assess, built_model
from fedsim.recording.exchanges import Exchange, read_exchanges, run_folder
from fedsim.recording.files import read_tensors
from fedsim.recording.witnessed import Testimony, read_witnessed


def recorded(folder: Path) -> tuple[list[Exchange], dict[str, Testimony]]:
    exchanges = read_exchanges(run_folder(folder / "tapped"))
    return exchanges, dict(read_witnessed(folder / "witnessed", exchanges[0].run_id))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs an app once, with as many nodes as it has here."""
    made: dict[str, Path] = {}

    def folder_of(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp("apps") / name
            build(name, folder)
            run(name, folder, nodes=4 if name == "resnet" else 20)
            made[name] = folder
        return made[name]

    return folder_of


@pytest.mark.parametrize("name", APP)
def test_at_most_ten_lines_of_an_app_change(name: str) -> None:
    assert 2 <= changed_lines(name, "tap") <= 10
    assert changed_lines(name, "data") <= 2


def retrained(model: nn.Module, exchange: Exchange, testimony: Testimony) -> dict[str, Any]:
    """The weights after SGD on what the witness says, from what the tap says was sent."""
    model.load_state_dict(dict(exchange.read_broadcast()))
    model.train()
    said = testimony.said
    optimizer = torch.optim.SGD(
        model.parameters(), lr=said.settings["lr"], momentum=said.settings["momentum"]
    )
    images, labels = testimony.images()
    order = read_tensors(testimony.path.with_suffix(".safetensors"))["order"]
    for batch in order.split(said.sizes):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    return dict(model.state_dict())


@pytest.mark.parametrize(
    "name",
    [
        "quickstart",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("advanced", "embedded")),
        pytest.param("resnet", marks=pytest.mark.by_hand),
    ],
)
def test_training_on_what_was_witnessed_gives_what_was_tapped(name: str, ran: Any) -> None:
    """Tap and witness together hold the whole truth: the same steps lead to the same answer."""
    folder = ran(name)
    exchanges, said = recorded(folder)
    assert {each.message_id for each in exchanges} == set(said)
    exchange = exchanges[0]
    with imported(folder):
        model = built_model(APP[name].model)
    reply = exchange.read_reply()
    found = retrained(model, exchange, said[exchange.message_id])
    assert found.keys() == reply.keys()
    moved = 0.0
    for key, value in reply.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[key], value, rtol=1e-4, atol=2e-5)
            moved = max(moved, float((value - exchange.read_broadcast()[key]).abs().max()))
    assert moved > 1e-3  # else weights that never moved would pass, too
    assert exchange.number("num-examples") == said[exchange.message_id].said.images


@pytest.mark.slow
def test_a_tap_sees_what_a_local_defense_lets_out(ran: Any) -> None:
    """Clipped to 0.1, with noise on every entry: not what the client computed."""
    exchanges, said = recorded(ran("local_dp"))
    exchange = exchanges[0]
    sent, reply = exchange.read_broadcast(), exchange.read_reply()
    change = torch.cat([(reply[name] - sent[name]).flatten() for name in sent])
    expected = APP["local_dp"].defenses[1]["std"]
    assert float(change.std()) == pytest.approx(expected, rel=0.05)
    with imported(ran("local_dp")):
        found = retrained(built_model(APP["local_dp"].model), exchange, said[exchange.message_id])
    true = torch.cat([(found[name] - sent[name]).flatten() for name in sent])
    assert float(torch.nn.functional.cosine_similarity(true, change, dim=0)) < 0.9


@pytest.mark.slow
def test_a_tapped_app_computes_what_the_untapped_does(tmp_path: Path) -> None:
    weights = []
    for tapped in (True, False):
        folder = build("quickstart", tmp_path / str(tapped), tapped=tapped)
        run("quickstart", folder, nodes=10)
        weights.append(torch.load(folder / "final_model.pt", weights_only=True))
        assert (folder / "tapped").exists() == (folder / "witnessed").exists() == tapped
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])


@pytest.mark.usefixtures("attacks_here")
def test_a_report_of_the_quickstart_app(ran: Any) -> None:
    folder = ran("quickstart")
    app = APP["quickstart"]
    with imported(folder):
        finished = assess(
            folder / "tapped",
            app.model,
            truth=folder / "witnessed",
            out=folder / "report",
            mean=app.mean,
            std=app.std,
            attacks={"label_inference": {}},
            clients=3,
            workers=1,
        )
    rows = finished.rows()
    assert [row["client"] for row in rows] == [0, 1, 2]
    # One step on all images of a client: its labels can be read off exactly.
    assert [row["training"]["steps"] for row in rows] == [1, 1, 1]
    assert [row["metrics"]["label_accuracy"] for row in rows] == [1.0, 1.0, 1.0]
    assert all(row["control"]["other_update"]["label_accuracy"] < 1 for row in rows)
    assert {row["scenario"] for row in rows} == {"pytorchexample"}
    # Labels need no picture to be recovered, which the page's first answer says.
    page = finished.report.read_text(encoding="utf-8")
    assert "labels are recovered; of their inputs nothing can be said" in page
    notes = json.loads((finished.out / "record.json").read_text())["notes"].values()
    assert not any(note.startswith("guess:") for note in notes)
    assert all(row["baseline"]["public"] for row in rows)
