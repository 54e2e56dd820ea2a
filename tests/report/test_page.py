"""The report: whole, self-contained, escaped, and saying what the figures say."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from synthetic_run import STACKS, Stack, write_run
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.report import (
    ReportError,
    describe,
    leaderboard_rows,
    load_runs,
    positive_controls,
    unfinished,
    utility,
    write_report,
)
from fedsim.report.verdict import Verdict, verdicts


class Page(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "br", "link", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    @property
    def flat(self) -> str:
        return re.sub(r"\s+", " ", self.text)


Edit = Callable[[dict[str, Any]], None]


def edited(source: Path, target: Path, edit: Edit) -> Path:
    """A copy of a run folder with every row edited."""
    shutil.copytree(source, target)
    path = target / "results.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        edit(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return target


@pytest.fixture(scope="session")
def page(run_folder: Path) -> Page:
    return Page(write_report(run_folder).read_text())


def test_it_is_written_where_asked(run_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "page.html"
    assert write_report(run_folder, out) == out
    assert out.read_text() == write_report(run_folder).read_text()
    assert write_report(run_folder) == run_folder / "report.html"


def test_nothing_is_fetched(page: Page) -> None:
    policy = next(a for t, a in page.elements if a.get("http-equiv"))
    assert policy["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        for name, value in attributes.items():
            assert not name.startswith("on")
            if name in {"src", "href", "xlink:href", "srcset", "action", "data"}:
                assert (value or "").startswith(("data:image/png;base64,", "#")), (tag, name)
    assert page.open == []


def test_elements_close_and_every_image_is_pixelated_at_a_whole_factor(
    page: Page, run_folder: Path
) -> None:
    images = [a for t, a in page.elements if t == "img"]
    assert images
    assert {(a["width"], a["height"]) for a in images} == {("64", "64"), ("96", "96")}
    assert all(a["alt"] for a in images)
    assert "image-rendering: pixelated" in (run_folder / "report.html").read_text()


def test_it_says_what_was_run_against_whom_and_what_came_of_it(page: Page) -> None:
    text = page.flat
    assert (
        "convnet was trained on photos by 10 clients over 3 rounds, without a defense and" in text
    )
    assert "54 attack runs, 2 of which failed" in text
    assert "Each client’s update on its own, after that client’s defenses" in text
    assert "No labels, but may infer them from the update" in text
    assert "inverting_gradients reconstructs images better than guessing by" in text
    assert "clip(norm=1.0) → gaussian_noise(multiplier=1.1)" in text
    assert "ε = 7.82 at δ = 1e-05 per client (zero out, gaussian); an audit found at least" in text
    assert "no guarantee (ε = ∞: no noise is added)" in text
    assert "13.1 points below no defense" in text
    assert "no restart ended at a finite loss (losses: (nan,))" in text
    assert "client 3 did not answer within 600 s" in text
    assert "torchvision's cache has no alexnet-owt-7be5be79.pth" in text
    assert "0123456789abcdef0123456789abcdef01234567" in text
    assert "fedsim run scenario.yaml" in text
    assert "Positive control passed" in text
    assert "INVALID" not in text


def test_the_page_explains_no_column_that_it_does_not_show(
    page: Page, run_folder: Path, tmp_path: Path
) -> None:
    def without(row: dict[str, Any]) -> None:
        row["control"] = None

    bare = Page(write_report(edited(run_folder, tmp_path / "bare", without)).read_text())
    for made, there in ((page, True), (bare, False)):
        assert ("The same attack’s picture of another update" in made.flat) is there
        assert ("tip-other" in [a.get("popovertarget") for _, a in made.elements]) is there
        assert "LPIPS (" not in made.flat
    single = write_run(tmp_path / "single", trials=1, rounds=1, batch_sizes=(1,))
    assert "Small figures" not in Page(write_report(single).read_text()).flat
    assert "Small figures: 95% Student’s intervals" in page.flat


def test_counts_of_one_are_singular(tmp_path: Path) -> None:
    stacks = {name: STACKS[name] for name in ("none", "pruning")}
    one = write_run(tmp_path, stacks=stacks, trials=1, rounds=1, batch_sizes=(1,))
    text = Page(write_report(one).read_text()).flat
    assert "1/1 trial mean" in re.sub(r"1/1 trial(?=mean)", "1/1 trial ", text)
    assert "1/1 trials" not in text
    assert "behind 1 defense;" in text


def test_pictures_of_every_attack_on_every_defense(page: Page) -> None:
    alts = [a["alt"] or "" for t, a in page.elements if t == "img"]
    pictures = [alt for alt in alts if alt.startswith("What inverting_gradients")]
    same = [alt for alt in alts if alt.startswith("The same image as")]
    assert [alt.rpartition(" ")[2] for alt in same] == ["none", "pruning", "dp"]
    assert len(pictures) == 3 * (1 + 3)
    assert not any("label_inference" in alt for alt in alts)


NASTY = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>${{7*7}}"


def test_no_name_or_reason_becomes_markup(run_folder: Path, tmp_path: Path) -> None:
    def poison(row: dict[str, Any]) -> None:
        row |= {"scenario": NASTY, "dataset": NASTY, "variant": {NASTY: NASTY}}
        row["model"]["name"] = row["attack"]["label"] = row["vantage"] = NASTY
        row["defense"] = {"name": NASTY + row["defense"]["name"], "stack": [{"name": NASTY}]}
        row["privacy"] |= {"epsilon": 1.0, "accountant": NASTY, "unit": NASTY, "relation": NASTY}
        if row["status"] == "failed":
            row["reason"] = NASTY

    folder = edited(run_folder, tmp_path / "run", poison)
    (folder / "scenario.yaml").write_text(f"name: x\ndescription: {json.dumps(NASTY)}\n")
    (folder / "record.json").write_text(
        json.dumps({"notes": {NASTY: NASTY}, "device": NASTY, "environment": {"commit": NASTY}})
    )
    rounds = (folder / "rounds.jsonl").read_text().splitlines()
    poisoned = [{**json.loads(line), "details": [NASTY]} for line in rounds]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in poisoned))
    html = write_report(folder).read_text()
    page = Page(html)
    assert "<script" not in html
    assert "<img src=x" not in html
    assert all(tag not in {"script"} for tag, _ in page.elements)
    assert all(not name.startswith("on") for _, a in page.elements for name in a)
    assert page.text.count("alert(1)") > 20
    assert "{{7*7}}" in page.text


def test_a_failed_positive_control_marks_the_page(tmp_path: Path) -> None:
    stacks = {name: STACKS[name] for name in ("none", "dp")}
    write_run(tmp_path, stacks=stacks, trials=1, rounds=1, batch_sizes=(1,), undefended=0.3)
    html = write_report(tmp_path).read_text()
    page = Page(html)
    assert html.count("<strong>INVALID</strong>") == 2
    assert "<title>INVALID: " in html
    assert "where 3 dB are required" in page.flat
    assert "No conclusion" in page.flat


def test_sweeps_make_one_page_with_a_part_per_variant(tmp_path: Path) -> None:
    for mode in ("train", "eval"):
        write_run(
            tmp_path / mode,
            stacks={"none": STACKS["none"]},
            trials=1,
            rounds=1,
            batch_sizes=(1,),
            variant={"training.local.mode": mode},
        )
    text = Page(write_report(tmp_path).read_text()).flat
    assert "photos-demo (training.local.mode=train), photos, convnet" in text
    assert "photos-demo (training.local.mode=eval), photos, convnet" in text
    assert text.count("What was recovered") == 2


def test_several_models_were_trained_and_invalid_in_part_is_not_all(tmp_path: Path) -> None:
    def named(model: str, gain: bool) -> Edit:
        def edit(row: dict[str, Any]) -> None:
            row["model"] = {**row["model"], "name": model}
            row["variant"] = {"model": model}
            if not gain:
                row["baseline"] = {**row["baseline"], "psnr": 60.0}

        return edit

    source = write_run(
        tmp_path / "source",
        stacks={"none": STACKS["none"]},
        trials=1,
        rounds=1,
        batch_sizes=(1,),
    )
    edited(source, tmp_path / "some" / "a", named("lenet", gain=True))
    edited(source, tmp_path / "some" / "b", named("convnet", gain=False))
    edited(source, tmp_path / "all" / "a", named("lenet", gain=False))
    edited(source, tmp_path / "all" / "b", named("convnet", gain=False))
    some = Page(write_report(tmp_path / "some").read_text()).flat
    every = Page(write_report(tmp_path / "all").read_text()).flat
    assert "lenet and convnet were trained on" in some
    assert "INVALID in part" in some
    assert "INVALID" in every
    assert "in part" not in every


def test_a_run_without_results_or_extras_still_has_a_page(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "results.jsonl").write_text("")
    text = Page(write_report(tmp_path).read_text()).flat
    assert "This run has no results" in text
    assert "INVALID" in text
    lonely = tmp_path / "lonely"
    lonely.mkdir()
    shutil.copy(run_folder / "results.jsonl", lonely)
    page = Page(write_report(lonely).read_text())
    assert not [a for t, a in page.elements if t == "img"]
    assert "How sure the answers are" in page.flat


def test_a_run_that_attacks_nothing_shows_what_defenses_cost(tmp_path: Path) -> None:
    losses = {("1", 1): 0.5, ("1", 2): 0.7, ("10", 1): 0.2, ("10", 2): 0.2}
    for (columns, seed), loss in losses.items():
        folder = tmp_path / f"{columns}-{seed}"
        folder.mkdir()
        (folder / "results.jsonl").write_text("")
        (folder / "scenario.yaml").write_text("name: private\nattacks: []\n")
        variant = {"learner.columns": int(columns), "seed": seed}
        (folder / "record.json").write_text(json.dumps({"variant": variant}))
        lines = [
            {"defense": "none", "round": 1, "test_loss": 9.0, "epsilon": "inf"},
            {"defense": "none", "round": 2, "test_loss": loss, "epsilon": "inf"},
            {
                "defense": "own",
                "round": 2,
                "test_accuracy": loss,
                "epsilon": float(seed),
                "sigma": 4,
            },
        ]
        (folder / "rounds.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = Page(write_report(tmp_path).read_text())
    assert "Nothing is attacked in this run" in page.flat
    assert "INVALID" not in page.flat and "PSNR" not in page.flat
    assert "learner.columns=1none2∞–0.600–" in page.flat
    unknown = "(δ unknown, unit unknown, neighbours unknown)"
    assert f"learner.columns=1own22 {unknown}4.000–60.0" in page.flat
    assert "learner.columns=10none2∞–0.200–" in page.flat
    lines = describe(utility(load_runs([tmp_path]))).splitlines()
    assert lines[0] == "learner.columns=1, none: ε ∞, test loss 0.600"
    own = f"learner.columns=1, own: ε 2 {unknown}, σ 4.000, accuracy 60.0%"
    assert lines[1] == own
    assert len(lines) == 4


def test_what_was_not_measured_is_not_plotted(run_folder: Path, tmp_path: Path) -> None:
    def strip(row: dict[str, Any]) -> None:
        row |= {"utility": None, "privacy": None, "cost": None, "control": None}

    folder = edited(run_folder, tmp_path / "run", strip)
    (folder / "rounds.jsonl").unlink()
    text = Page(write_report(folder).read_text()).flat
    assert "Leakage against utility" not in text
    assert "test accuracy not measured" in text
    assert "privacy not accounted" in text
    assert "No control: no other images" in text


def test_errors_of_features_are_drawn_where_there_are_any(run_folder: Path, tmp_path: Path) -> None:
    def recovered(row: dict[str, Any]) -> None:
        if row["metrics"] and row["attack"]["label"] == "inverting_gradients":
            row["metrics"]["subspace_error"] = 0.25

    drawn = write_report(edited(run_folder, tmp_path / "run", recovered)).read_text()
    assert "Recovered features" in Page(drawn).flat
    assert drawn.count("Error of recovered features, a line per defense") == 2  # wide and narrow
    assert "Recovered features" not in Page(write_report(run_folder).read_text()).flat


def test_a_single_round_is_no_curve(run_folder: Path, tmp_path: Path) -> None:
    folder = edited(run_folder, tmp_path / "run", lambda row: None)
    lines = (folder / "rounds.jsonl").read_text().splitlines()
    assert "training loss" in Page(write_report(folder).read_text()).flat
    first = [line for line in lines if json.loads(line)["round"] == 1]
    (folder / "rounds.jsonl").write_text("\n".join(first) + "\n")
    assert "training loss" not in Page(write_report(folder).read_text()).flat


def test_damaged_reconstructions_are_refused(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    from safetensors.torch import save_file

    for path in folder.rglob("inverting_gradients/*/*.safetensors"):
        save_file({}, path)
    with pytest.raises(ReportError, match="no pair of truth"):
        write_report(folder)


def judged(folder: Path) -> dict[str, Verdict]:
    rows = leaderboard_rows([folder])
    (control,) = positive_controls(rows)
    return {verdict.strongest.defense: verdict for verdict in verdicts(rows, control)}


def test_verdicts_follow_the_lower_end_of_the_interval(tmp_path: Path) -> None:
    stacks = {
        "none": STACKS["none"],
        "blur": Stack(({"name": "x"},), 0.68, 0.7),
        "wall": Stack(({"name": "x"},), 0.1, 0.7),
    }
    write_run(tmp_path, stacks=stacks, trials=5, rounds=1, batch_sizes=(1,))
    judgements = judged(tmp_path)
    assert [verdict.level for verdict in judgements.values()] == ["leak", "partial", "unseen"]
    assert "not a proof" in judgements["wall"].sentence
    assert judgements["none"].cautions == []


def test_a_picture_that_any_update_yields_is_no_leak(run_folder: Path, tmp_path: Path) -> None:
    def plausible(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "none" and row["status"] == "ok":
            row["metrics"]["psnr"] = 30.0 + row["trial"]  # reliably better than guessing
        row["control"] = {"of": "client", "other_update": row["metrics"]}

    judgement = judged(edited(run_folder, tmp_path / "run", plausible))["none"]
    assert judgement.level == "unseen" and judgement.strongest.blind
    assert judgement.gain is not None and judgement.gain.max == 0.0
    assert judgement.cautions


def test_labels_can_leak_where_images_do_not(run_folder: Path, tmp_path: Path) -> None:
    def only_labels(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp" and row["attack"]["label"] == "label_inference":
            row["metrics"]["label_accuracy"] = 1.0
            # The guess hits by chance, and three trials then show nothing for certain.
            row["baseline"]["label_accuracy"] = 0.3

    judgements = judged(edited(run_folder, tmp_path / "run", only_labels))
    assert judgements["dp"].level == "labels"
    assert "100%" in (judgements["dp"].labels or "")

    def given(row: dict[str, Any]) -> None:
        only_labels(row)
        row["knowledge"]["labels"] = "known"

    granted = judged(edited(run_folder, tmp_path / "granted", given))
    assert granted["dp"].level == "unseen"
    assert granted["dp"].labels is None


def test_local_training_that_diverges_is_said_aloud(run_folder: Path, tmp_path: Path) -> None:
    def diverge(row: dict[str, Any]) -> None:
        if row["defense"]["name"] == "dp":
            row["utility"]["local_losses"] = [0.5, "inf" if row["trial"] else 0.9]

    judgements = judged(edited(run_folder, tmp_path / "run", diverge))
    trials = judgements["dp"].strongest.n
    (caution,) = [text for text in judgements["dp"].cautions if "diverges" in text]
    assert caution.startswith(f"In {trials - 1} of {trials} recordings")
    assert not any("diverges" in text for text in judgements["none"].cautions)


def test_an_audit_above_the_claim_is_said_aloud(run_folder: Path, tmp_path: Path) -> None:
    def refute(row: dict[str, Any]) -> None:
        row["privacy"]["audited_epsilon"] = 9.0

    text = Page(write_report(edited(run_folder, tmp_path / "run", refute)).read_text()).flat
    assert text.count("The audit refutes the privacy claim") == 1


def test_a_claim_that_means_nothing_is_called_so(run_folder: Path, tmp_path: Path) -> None:
    def weaken(row: dict[str, Any]) -> None:
        if row["privacy"]["epsilon"] != "inf":
            row["privacy"]["epsilon"] = 70333.0

    judgements = judged(edited(run_folder, tmp_path / "run", weaken))
    assert any("next to nothing" in text for text in judgements["dp"].cautions)
    assert not any("next to nothing" in text for text in judgements["none"].cautions)
    assert not any("next to nothing" in text for text in judged(run_folder)["dp"].cautions)


def test_a_run_that_has_not_ended_says_so(run_folder: Path, tmp_path: Path) -> None:
    """Its table lacks rows, and looks like a whole one."""
    folder = shutil.copytree(run_folder, tmp_path / "run")
    assert not unfinished(load_runs([folder]))
    assert "UNFINISHED" not in write_report(folder).read_text()
    (folder / "record.json").unlink()
    (line,) = unfinished(load_runs([folder]))
    assert line.startswith("UNFINISHED") and "--resume" in line
    assert "UNFINISHED" in write_report(folder).read_text()
    result = CliRunner().invoke(app, ["leaderboard", str(folder), "--format", "json"])
    assert "UNFINISHED" in result.stderr


def test_the_answers_stand_before_everything_else(page: Page) -> None:
    text = page.flat
    first = text.index("Without a defense, the server gets recognizable pictures")
    picture = text.index("The same image behind every defense")
    assert text.index("What do the clients’ updates show") < first < picture
    for later in ("What was run", "Who is attacking", "How sure the answers are", "Glossary"):
        assert picture < text.index(later), later
    assert "Not tried here: who took part (membership)" in text


def test_a_sweep_has_a_line_for_each_variant_above_its_answers(tmp_path: Path) -> None:
    for mode in ("train", "eval"):
        write_run(
            tmp_path / mode,
            stacks={name: STACKS[name] for name in ("none", "dp")},
            trials=1,
            rounds=1,
            batch_sizes=(1,),
            variant={"training.local.mode": mode},
        )
    html = write_report(tmp_path).read_text()
    glance = html[html.index("At a glance") : html.index('id="answers-1"')]
    assert re.findall(r'href="#(answers-\d)"', glance) == ["answers-1", "answers-2"]
    assert glance.count('data-label="dp"') == glance.count('data-label="none"') == 2
    assert glance.count(">Do not rely<") == 2
    assert 'id="answers-2"' in html


def test_the_table_holds_chance_and_cost(run_folder: Path, tmp_path: Path) -> None:
    def tested(row: dict[str, Any]) -> None:
        row["utility"] |= {"test_examples": 100, "test_chance": 0.25}

    html = write_report(edited(run_folder, tmp_path / "run", tested)).read_text()
    for heading, figure in (
        ("Chance", "25%"),
        ("s a round", "1.20"),
        ("ε (δ, unit, neighbours)", "7.82 (1e-05, client, zero out)"),
    ):
        assert f'<td data-label="{heading}">{figure}</td>' in html, heading
    assert re.search(r'<td data-label="Label">\d+% <small>guess \d+%</small></td>', html)
