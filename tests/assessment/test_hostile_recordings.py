"""Recordings and testimonies that no tap and no witness writes are refused, with the cause."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedsim.assessment import assess
from fedsim.assessment.clients import Examples, guesser_of
from fedsim.recording.exchanges import Recorder
from fedsim.recording.files import read_tensors, write_tensors
from fedsim.recording.witnessed import Witnessed, read_witnessed, save_witnessed
from fedsim.report import leaderboard_rows
from fedsim.types import FedsimError

pytestmark = pytest.mark.usefixtures("attacks_here")

State = dict[str, Tensor]
RUN, NODE, ORDER = 1, 2, "order"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))


def copied(model: nn.Module) -> State:
    return {name: value.clone() for name, value in model.state_dict().items()}


def arrays(state: State) -> dict[str, Any]:
    return {name: value.numpy() for name, value in state.items()}


def witnessed(node: int, order: str, count: int) -> Witnessed:
    return Witnessed(
        run_id=RUN,
        round=1,
        node_id=node,
        message_id=order,
        partition=None,
        images=count,
        left_out=0,
        sizes=[count],
        optimizer="SGD",
        settings={"lr": 0.1},
        training_mode=True,
    )


def recorded(
    folder: Path,
    reply: Callable[[State], State] = dict,
    sent: Callable[[State], State] = dict,
    told: dict[str, Any] | None = None,
) -> Path:
    """Records one client's step on four images, and what a witness saw of it."""
    model = net()
    images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    recorder = Recorder(
        folder / "tapped", RUN, "server", rounds=None, clients=None, max_bytes=1 << 20
    )
    digest = recorder.save_broadcast(1, arrays(sent(copied(model))))
    assert digest
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    recorder.save_reply(
        arrays(reply(copied(model))),
        round=1,
        node_id=NODE,
        message_id=ORDER,
        broadcast=digest,
        config={},
        metrics={"m": told or {"num-examples": 4}},
    )
    said = witnessed(NODE, ORDER, count=4)
    seen = {"images": images, "labels": labels, "order": torch.arange(4)}
    save_witnessed(folder / "witnessed", said, seen)
    return folder


def assessed(folder: Path) -> Any:
    return assess(
        folder / "tapped",
        net(),
        truth=folder / "witnessed",
        out=folder / "out",
        attacks={"label_inference": {}},
        name="../../x</script>",
        workers=1,
    )


def with_head(change: Callable[[Tensor], Tensor]) -> Callable[[State], State]:
    return lambda state: {**state, "3.weight": change(state["3.weight"])}


def test_what_is_not_hostile_is_assessed(tmp_path: Path) -> None:
    run = assessed(recorded(tmp_path, told={"num-examples": 4, "train_loss": 1e308}))
    (row,) = run.rows()
    assert row["metrics"]["label_accuracy"] == 1.0
    assert row["scenario"] == "x-script"
    assert "</script>" not in (run.out / "results.jsonl").read_text()
    # No other client was witnessed: the guess is of the victim's own images, and no public one.
    notes = json.loads((run.out / "record.json").read_text())["notes"].values()
    assert any("learned from the victims' own images" in note for note in notes)
    assert row["baseline"]["public"] is None
    assert "one can guess better than that" not in run.report.read_text(encoding="utf-8")


def test_the_claim_of_a_mod_stands_in_the_row_and_the_notes(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    (path,) = (folder / "witnessed").rglob("node-*.json")
    settings = {"clipping_norm": 1.0, "sensitivity": 1.0, "epsilon": 8.0, "delta": 1e-5}
    mod = {"name": "flwr.clientapp.mod.localdp_mod.LocalDpMod", "settings": settings}
    path.write_text(json.dumps({**json.loads(path.read_text()), "mods": [mod]}))
    run = assessed(folder)
    (row,) = run.rows()
    # Table of docs/deployed-settings.md: Flower's 8 is 7.91 of one round.
    assert row["privacy"]["epsilon"] == pytest.approx(7.91, abs=0.005)
    assert row["privacy"]["claimed_epsilon"] == 8
    # Attacks allow for what was found as for what is declared.
    assert (row["defense"]["name"], row["defense"]["stack"][0]["name"]) == ("found", "local_dp_mod")
    notes = json.loads((run.out / "record.json").read_text())["notes"].values()
    assert any("LocalDpMod(clipping_norm=1.0" in note and "7.9" in note for note in notes)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (with_head(lambda w: w > 0), "the app sends torch.bool"),
        (with_head(lambda w: (w * 100).to(torch.uint8)), "the app sends torch.uint8"),
        (with_head(lambda w: w.double() * 1e300), "holds NaN or infinity"),
        (with_head(lambda w: w * float("nan")), "holds NaN or infinity"),
        (with_head(lambda w: w[:1]), "has shape"),
        (lambda state: {**state, "other": torch.ones(1)}, "it has no 'other'"),
        (lambda state: {"3.bias": state["3.bias"]}, "parameters of the model missing"),
        (lambda state: {}, "parameters of the model missing"),
    ],
)
def test_an_answer_of_another_model_is_refused(
    reply: Callable[[State], State], said: str, tmp_path: Path
) -> None:
    with pytest.raises(FedsimError, match=said):
        assessed(recorded(tmp_path / "reply", reply))
    if said.startswith("the app sends"):
        with pytest.raises(FedsimError, match=said):
            assessed(recorded(tmp_path / "sent", sent=reply))


WITNESS, TAP = "not what a witness writes", "not what a tap records"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"images": 4', '"images": 0', WITNESS),
        ('"images": 4', '"images": 7', WITNESS),
        ('"sizes": [\n    4\n  ]', '"sizes": [-4]', WITNESS),
        ('"lr": 0.1', '"lr": NaN', WITNESS),
        # What is imported is named by who assesses, and by nothing that was recorded.
        ('"format": 1', '"format": 1, "model": "os:system"', WITNESS),
        ('"format": 2', '"format": 2, "model": "os:system"', TAP),
        ('"left_out": 0', '"left_out": 3', "the witness left out 3 images"),
    ],
)
def test_a_record_that_contradicts_itself_or_is_not_whole_is_refused(
    before: str, after: str, said: str, tmp_path: Path
) -> None:
    folder = recorded(tmp_path)
    (path,) = (folder / ("tapped" if said == TAP else "witnessed")).rglob("node-*.json")
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(FedsimError, match=said):
        assessed(folder)


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_a_label_that_the_model_has_no_output_for_is_refused(label: int, tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    (path,) = (folder / "witnessed").rglob("*.safetensors")
    seen = read_tensors(path)
    seen["labels"][2] = label
    write_tensors(path, seen)
    with pytest.raises(FedsimError, match=rf"labels from 0 to 2.*got {label};"):
        assessed(folder)


def test_the_guess_is_learned_from_others_than_the_victims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the guess knows the truth, and every gain over it is too small."""
    for node in (NODE, 7):
        said = witnessed(node, str(node), count=1)
        images = torch.full((1, 1, 2, 2), node / 10)
        seen = {"images": images, "labels": torch.tensor([0]), "order": torch.arange(1)}
        save_witnessed(tmp_path, said, seen)
    testimonies = read_witnessed(tmp_path, RUN)
    victim: Any = SimpleNamespace(
        exchange=SimpleNamespace(node_id=NODE), testimony=testimonies[str(NODE)]
    )
    learned: list[Tensor] = []
    monkeypatch.setattr(
        "fedsim.assessment.clients.scoring.Guesser", lambda levels, _: learned.append(levels)
    )
    _, is_public = guesser_of(testimonies, [victim], Examples(None, None, classes=3))
    assert learned[0].unique().tolist() == [round(0.7 * 255)] and is_public


def test_two_assessments_of_one_app_are_two(tmp_path: Path) -> None:
    """Their run, node, order, images and names are the same; what the client answered is not."""
    doubled = with_head(lambda w: 2 * w)
    for name, reply in (("sgd", dict), ("weights", doubled), ("again", dict)):
        assessed(recorded(tmp_path / name, reply))
    folders = [tmp_path / name / "out" for name in ("sgd", "weights", "again")]
    for order in (folders, folders[::-1]):
        rows = leaderboard_rows(order)
        assert len(rows) == len({row.comparison for row in rows}) == 2
        assert [row.n for row in rows] == [1, 1], "what was recorded twice alike counts once"
