"""The figures of docs/results.md that rest on a CSV file are those of the file."""

from __future__ import annotations

import csv
import re

import pytest
from doc_pages import ROOT, read

FOLDER = ROOT / "docs" / "results"
DEFENSES = {
    "none": "none",
    "clip 4": "clip",
    "pruning 0.7": "prune-0.7",
    "pruning 0.9": "prune-0.9",
    "pruning 0.99": "prune-0.99",
    "noise 0.1": "noise",
    "3 local steps, same batch, lr 0.01, own head": "local-3",
    "5 local steps, own head": "local-5",
}


def table(first: str) -> list[list[str]]:
    """The rows of the page's table whose heading begins with these words."""
    lines = read("docs/results.md").split("\n")
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first}"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().replace("**", "") for cell in line.strip("|").split("|")])
    return rows


def rows(*names: str) -> list[dict[str, str]]:
    """The rows of files of docs/results."""
    found = []
    for name in names:
        with (FOLDER / f"{name}.csv").open(encoding="utf-8") as file:
            found += list(csv.DictReader(file))
    return found


def one(found: list[dict[str, str]], **wanted: str) -> dict[str, str]:
    """The first row that has these values."""
    return next(row for row in found if all(row[key] == value for key, value in wanted.items()))


def same(cell: str, row: dict[str, str], metric: str) -> None:
    """`cell` is the mean and, if it has one, the interval of a metric, rounded; none is below 0."""
    told = re.sub(r"\([^)]*\)", "", cell)
    names = [f"{metric}_mean", f"{metric}_low", f"{metric}_high"]
    shown = re.findall(r"-?\d+(?:\.\d+)?", told)
    assert shown, cell
    for text, name in zip(shown, names, strict=False):
        digits = len(text.partition(".")[2])
        true = float(row[name])
        if metric == "subspace_error":
            true = max(true, 0.0)
        rounding = 0.5001 * 10**-digits if digits else 1e-4
        assert abs(float(text) - true) <= rounding, (cell, name, true)


def test_features_are_those_of_the_files() -> None:
    files = rows("table2-small", "table2-local-small")
    shown = table("defense | tensor_features")
    assert len(shown) == 7
    attacks = ["tensor_features", "spectral_features", "best_features"]
    for name, *cells in shown:
        for number, cell in enumerate(cells[:6]):
            attack, batch = attacks[number // 2], "18"[number % 2]
            row = one(files, defense=DEFENSES[name], attack=attack, batch_size=batch)
            same(cell, row, "subspace_error")


def test_public_images_are_those_of_the_file() -> None:
    labels = ["without_public", "feature_regression", "factored_inversion"]
    shown = table("planted head, defense | factored_inversion without")
    assert len(shown) == 4
    for name, *cells in shown:
        stack = DEFENSES.get(name, "none") if name in ("none", "pruning 0.99") else None
        for label, cell in zip(labels, cells, strict=True):
            wanted = stack or name.replace("noise ", "noise-")
            same(cell, one(rows("public-small"), defense=wanted, attack=label), "psnr")


def test_local_steps_are_those_of_the_file() -> None:
    labels = ["inverting_gradients", "inverting_gradients_body", "feature_inversion_pixels"]
    shown = table("local steps | inverting_gradients")
    assert len(shown) == 3
    for stack, (_, *cells) in zip(("none", "local-3", "local-5"), shown, strict=True):
        for label, cell in zip([*labels, "factored_inversion"], cells, strict=False):
            same(cell, one(rows("table3-local-small"), defense=stack, attack=label), "psnr")


def test_the_imprint_module_is_that_of_its_file() -> None:
    stacks = ["none", "clip", "prune-0.5", "noise", "prune-0.9"]
    shown = table("defense | B = 8 | B = 32")
    assert len(shown) == 6 and shown[-1][1:] == ["fails", "fails"]
    for stack, (_, *cells) in zip(stacks, shown, strict=False):
        for batch, cell in zip(("8", "32"), cells, strict=True):
            same(cell, one(rows("imprint"), defense=stack, batch_size=batch), "psnr")


@pytest.mark.parametrize(
    ("first", "name"),
    [("defense | strongest attack", "quickstart"), ("defense | best attack", "lenet")],
)
def test_a_small_networks_faces_are_those_of_its_file(first: str, name: str) -> None:
    file = name
    shown = [row for row in table(first) if row[2]]
    assert len(shown) == 3
    for name, attack, round_, psnr, gain, accuracy, _ in shown:
        row = one(
            rows(file),
            defense=name.partition(" ")[0],
            attack=attack,
            batch_size="1",
            round=round_,
        )
        same(psnr, row, "psnr")
        same(gain.replace("+", ""), row, "gain")
        if accuracy:
            assert accuracy.startswith(f"{float(row['test_accuracy']):.0%} ")


WAYS = {
    "none": "none",
    "clipping to a tenth of the norm": "clip",
    "pruning 0.9": "pruning 0.9",
    "8 bits": "8 bits",
    "noise of 0.001 of the update's rms": "noise 0.001",
    "noise of 0.01": "noise 0.01",
    "noise of 0.1": "noise 0.1",
    "five local steps of 0.01": "5 steps",
}
VICTIMS = {"fresh": "0", "one epoch": "1", "five epochs": "5"}


def same_psnr(cell: str, row: dict[str, str]) -> None:
    """`cell` is a mean and its interval, or the values of fewer than three batches."""
    numbers = [float(text) for text in re.findall(r"-?\d+(?:\.\d+)?", cell.partition("(")[0])]
    wanted = [float(row["psnr"]), float(row["low"] or 0), float(row["high"] or 0)]
    if "[" not in cell:
        assert len(numbers) == int(row["n"]) < 3
        numbers, wanted = [sum(numbers) / len(numbers)], wanted[:1]
    assert numbers == pytest.approx(wanted, abs=0.11)


def test_honest_images_are_those_of_their_file() -> None:
    found = [row for row in rows("honest-images") if row["model"] == "resnet18-group"]
    for victim, _, rival, ours, _, count in table("victim, B | guess"):
        kind, number = victim.split(", B = ")
        way = "equal labels" if "one class" in kind else "none"
        way = "5 steps" if "five local steps" in kind else way
        cell = {"epochs": VICTIMS[kind.partition(",")[0]], "B": number, "defense": way}
        for attack, told in (("inverting_gradients", rival), ("factored_inversion", ours)):
            row = one(found, attack=attack, **cell)
            same_psnr(told, row)
            assert row["n"] in count
    for defense, _, rival, ours, _ in table("defense | features: exact share"):
        if defense in WAYS and WAYS[defense] != "5 steps":
            cell = {"epochs": "5", "B": "2", "defense": WAYS[defense]}
            same_psnr(rival, one(found, attack="inverting_gradients", **cell))
            same_psnr(ours, one(found, attack="factored_inversion", **cell))


def test_rivals_and_planted_heads_are_those_of_their_file() -> None:
    found = rows("honest-images")
    none = {"defense": "none", "model": "resnet18-group", "B": "4"}
    names = {
        ("inverting_gradients", "4,800 (published)"): "inverting_gradients, published",
        ("feature_inversion, pixels", "1,000 of 10,000"): "feature_inversion_pixels",
        ("grad_inversion, 8 seeds", "250 of 20,000"): "grad_inversion",
    }
    rivals = table("attack | iterations | fresh")
    assert len(rivals) == 5
    for name, iterations, fresh, _, trained, _, _, count in rivals:
        attack = names.get((name, iterations), name)
        for cell, epochs in ((fresh, "0"), (trained, "5")):
            row = one(found, attack=attack, epochs=epochs, **none)
            same_psnr(cell, row)
            assert row["n"] in count
    heads = table("victim, B | ordinary classifier")
    assert len(heads) == 4
    for victim, *cells, _ in heads:
        kind, number = victim.split(", B = ")
        for cell, model in zip(cells, ("resnet18-group", "resnet18-planted"), strict=True):
            wanted = {**none, "model": model, "epochs": VICTIMS[kind], "B": number}
            same_psnr(cell, one(found, attack="factored_inversion", **wanted))
    shown = table("victim, B = 4 | guess")
    assert [row[0] for row in shown] == ["fresh", "five epochs"]
    attacks = ("inverting_gradients, 2000", "feature_inversion_pixels", "factored_inversion")
    for victim, _, *cells, _ in shown:
        for cell, attack in zip(cells, attacks, strict=True):
            wanted = {**none, "model": "convnet", "epochs": VICTIMS[victim]}
            same_psnr(cell, one(found, attack=attack, **wanted))


def test_the_honest_convnet_is_that_of_its_file() -> None:
    stacks = {"none": "none", "clip 1": "clip", "pruning 0.9": "prune-0.9", "noise 0.001": "noise"}
    shown = table("defense | B | guess | inverting_gradients | factored_inversion")
    assert len(shown) == 8
    for defense, batch, _, rival, ours, *_ in shown:
        cell = {"defense": stacks[defense], "batch_size": batch}
        same(rival, one(rows("honest-small"), attack="inverting_gradients", **cell), "psnr")
        same(ours, one(rows("honest-small"), attack="factored_inversion", **cell), "psnr")


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.csv")))
def test_a_page_leads_to_each_file(name: str) -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    assert any(f"(results/{name}.csv)" in page for page in pages)


def test_a_figure_that_is_not_that_of_the_file_is_found() -> None:
    row = {"psnr_mean": "19.04", "psnr_low": "3.51", "psnr_high": "34.4"}
    same("19.0 (23.0, 11.8) [3.5, 34.4]", row, "psnr")
    for wrong in ("19.1 [3.5, 34.4]", "19.0 [3.6, 34.4]", "19.0 [3.5, 34.5]"):
        with pytest.raises(AssertionError):
            same(wrong, row, "psnr")
