"""Plugins of third parties: found, listed, run, and broken ones kept apart."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedsim.audit.mechanisms import audit
from fedsim.cli.commands import app
from fedsim.contracts import listing, plugins
from fedsim.federation import build_engine
from fedsim.federation.network.link import Link
from fedsim.privacy import calculator
from fedsim.report.leaderboard import leaderboard_rows
from fedsim.scenario import ScenarioError, json_schema, resolve
from fedsim.types import FedsimError

THIRDPARTY = Path(__file__).parents[1] / "thirdparty"
Install = Callable[..., None]

BUILD = """
import shutil, sys
from setuptools import build_meta
shutil.copytree(sys.argv[1], "source")
import os
os.chdir("source")
build_meta.build_wheel(sys.argv[2])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which `tests/thirdparty` is installed from its wheel."""
    work, target = tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(THIRDPARTY), str(work)],
        cwd=work,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


@pytest.fixture
def seen(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The third party's package, visible to this process."""
    monkeypatch.syspath_prepend(str(site))
    plugins._entry_points.cache_clear()
    yield
    plugins._entry_points.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Makes a distribution of one module visible to this process."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(package: str, code: str, group: str, **points: str) -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(code, encoding="utf-8")
        info = tmp_path / f"{module}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {module}:{attribute}" for name, attribute in points.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        monkeypatch.delitem(sys.modules, module, raising=False)
        plugins._entry_points.cache_clear()

    yield install
    plugins._entry_points.cache_clear()


def scenario(**changes: object) -> dict[str, object]:
    least = {"name": "x", "data": {"source": "faces"}, "model": "mlp", "attacks": []}
    return {**least, **changes}


@pytest.mark.usefixtures("seen")
def test_a_third_partys_mechanism_is_calculated_with_audited_and_listed() -> None:
    keys = {"sensitivity": 1.0, "scale": 0.5}
    assert calculator.epsilon("laplace", keys, delta=0.1).epsilon == 2 + 2 * math.log(0.9)
    least = calculator.calibrate("laplace", {"sensitivity": 1.0}, epsilon=1.0, delta=0.1)
    assert least.delta == pytest.approx(0.1, rel=1e-12)
    honest = audit("laplace", keys, delta=0.1, draws=20_000)
    assert honest.holds and honest.lower_bound > 1.5
    for found in (least, honest):
        assert (found.unit, found.neighbours) == ("row", "at most 1 apart")
    assert not audit("laplace", {**keys, "sabotage": 0.5}, delta=0.1, draws=20_000).holds
    (row,) = [row for row in calculator.listing() if row["mechanism"] == "laplace"]
    assert row["summary"] == "Laplace noise on one number."
    assert list(row["keys"]) == ["curve", "calibration", "experiment"]
    (row,) = [row for row in listing.rows(["mechanisms"]) if row["name"] == "laplace"]
    assert row["package"] == "fedsim-example-plugins" and row["error"] is None


@pytest.mark.usefixtures("seen")
def test_a_third_partys_plugins_are_listed_with_their_package() -> None:
    rows = {row["name"]: row for row in listing.rows(["attacks", "defenses"])}
    attack = rows["first_layer"]
    assert (attack["package"], attack["version"]) == ("fedsim-example-plugins", "2.5.1")
    assert attack["paper"].startswith("Phong et al.")
    assert attack["parameters"] == [
        {
            "name": "neurons",
            "type": "integer",
            "default": 1,
            "required": False,
            "range": ">= 1, <= 4096",
            "description": "How many neurons, those with the largest bias gradients, are averaged.",
        }
    ]
    assert rows["clip"]["package"] == "fedsim"
    shown = CliRunner().invoke(app, ["list", "defenses"]).stdout
    assert "sign  (fedsim-example-plugins 2.5.1)" in shown
    told = "scale = 0.001 number: > 0, <= 1e+06 Magnitude of every entry sent"
    assert told in " ".join(shown.split())


@pytest.mark.usefixtures("seen")
def test_a_broken_plugin_is_listed_with_the_cause_and_stops_no_other() -> None:
    result = CliRunner().invoke(app, ["list", "attacks"])
    assert result.exit_code == 0
    assert "unimportable  (fedsim-example-plugins 2.5.1)\n    BROKEN: " in result.stdout
    cause = "No module named 'a_module_that_is_not_installed'"
    assert cause in " ".join(result.stdout.split())
    assert "first_layer" in result.stdout
    resolve(scenario(attacks=["first_layer"]))
    with pytest.raises(ScenarioError, match=r"a_module_that_is_not_installed.*repair or"):
        resolve(scenario(attacks=["unimportable"]))
    titles = [
        form.get("title") for form in json_schema()["properties"]["attacks"]["items"]["anyOf"]
    ]
    assert "first_layer" in titles
    assert "unimportable" not in titles
    engines = json_schema()["$defs"]["Federation"]["properties"]["engine"]["enum"]
    assert "backwards" in engines
    rows = {row["name"]: row for row in listing.rows(["engines"])}
    assert rows["backwards"]["package"] == "fedsim-example-plugins"
    assert rows["backwards"]["error"] is None


SCENARIO = """\
name: thirdparty
seed: 3
data: {source: {name: faces, size: 16}, clients: 2}
model: {name: mlp, hidden: [16]}
training: {rounds: 2, local: {batch_size: 4}}
defenses:
  none: []
  sign: [{name: sign, scale: 0.01}]
  bottleneck: [{name: bottleneck, size: 4}]
attacks:
  - {name: first_layer, neurons: 3}
  - {name: inverting_gradients, iterations: 20}
  - share_inference
observe: {rounds: [1], clients: [0, 1], batch_sizes: [1, 2]}
federation: {engine: backwards}
"""


@pytest.fixture(scope="module")
def third(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Callable[..., str]]:
    """A run with the third party's plugins, and fedsim's commands in a process of its own."""
    folder = tmp_path_factory.mktemp("third")
    path = folder / "x.yaml"
    path.write_text(SCENARIO, encoding="utf-8")

    def fedsim(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "fedsim", *words],
            env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    fedsim("run", str(path), "--out", str(folder / "out"), "--workers", "1")
    return folder / "out", fedsim


Third = tuple[Path, Callable[..., str]]


def rows_of(run: Path, attack: str) -> list[dict[str, Any]]:
    lines = (run / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["attack"]["name"] == attack]


@pytest.mark.slow
def test_a_third_partys_attack_defense_and_engine_run_in_a_scenario(third: Third) -> None:
    """Exact without defense, defeated by one of the third party's, and not by its other one.

    Two images are a failure with a reason. It runs in a process of its own, as for a user. The
    defense that alters the model stands in one comparison with the others, and an attack that
    simulates the client builds its model again.
    """
    written = rows_of(third[0], "first_layer")
    rows = {(row["defense"]["name"], row["batch_size"]): row for row in written}
    assert len(written) == 12
    assert rows["none", 1]["attack"]["parameters"] == {"neurons": 3}
    assert rows["none", 1]["metrics"]["psnr"] > 50
    assert rows["sign", 1]["metrics"]["psnr"] < 20
    assert rows["sign", 1]["defense"]["stack"] == [{"name": "sign", "scale": 0.01}]
    assert rows["none", 2]["status"] == "failed"
    assert "only one image can be divided out, not 2" in rows["none", 2]["reason"]
    assert rows["bottleneck", 1]["metrics"]["psnr"] > 50
    simulated = rows_of(third[0], "inverting_gradients")
    assert [row["status"] for row in simulated] == ["ok"] * 12
    ranked = leaderboard_rows([third[0]])
    assert {row.defense for row in ranked} == {"none", "sign", "bottleneck"}
    assert len({row.comparison for row in ranked}) == 1


@pytest.mark.slow
def test_a_third_partys_target_is_scored_controlled_and_shown(third: Third) -> None:
    """A property of all that a client holds, which neither its batch nor the guess tells."""
    run, _ = third
    held: dict[int, set[float]] = {0: set(), 1: set()}
    for row in rows_of(run, "share_inference"):
        assert row["status"] == "ok" and row["metrics"]["psnr"] is None
        path = run / "reconstructions" / row["defense"]["name"] / "share_inference"
        saved = load_file(path / f"{row['observation'].partition('/')[2]}.safetensors")
        (answer,), (true,) = saved["class_share"].tolist(), saved["truth_class_share"].tolist()
        held[row["client"]].add(true)
        assert row["metrics"]["share_error"] == pytest.approx(abs(answer - true), abs=1e-6)
        assert row["baseline"]["share_error"] == pytest.approx(abs(0.5 - true), abs=1e-6)
        assert row["control"]["of"] == "client"
        assert row["control"]["other_update"]["share_error"] is not None
    assert [len(shares) for shares in held.values()] == [1, 1]


@pytest.mark.slow
def test_a_third_partys_metrics_rank_and_have_columns_and_terms(third: Third) -> None:
    run, fedsim = third
    document = json.loads(fedsim("leaderboard", str(run), "--format", "json"))
    for row in document["rows"]:
        name = "share_error" if row["attack"] == "share_inference" else "edge_cosine"
        assert row["metrics"][name]["n"] == row["n"] and row["baseline"][name] is not None
        assert row[f"{name}_gain"] is not None
        assert (row[f"{name}_over_other"] is not None) == (row["n_ok"] > 0)
    undefended = [r for r in document["rows"] if r["undefended"] and r["batch_size"] == 1]
    assert next(r for r in undefended if r["strongest"])["attack"] == "first_layer"
    page = (run / "report.html").read_text(encoding="utf-8")
    for words in ("share err", "distance of the share of class 0", "mean cosine of horizontal"):
        assert words in page.lower()
    assert "class_share  (fedsim-example-plugins 2.5.1)" in fedsim("list", "targets")


ATTACK = """
from fedsim.contracts.attack import Attack, AttackState
from fedsim.contracts.grant import Grant
from pydantic import Field, field_validator

class Needy(Attack[AttackState]):
    "Needs what a scenario has to grant."
    needs = Grant(labels="known", bn="running")
    def init(self, observation, knowledge, rng): raise NotImplementedError
    def step(self, state): raise NotImplementedError
    def terminate(self, state): raise NotImplementedError
    def postprocess(self, state): raise NotImplementedError

class Reserved(Needy):
    restarts: int = 3

class Failing(Needy):
    depth: int = Field(0, validate_default=True)
    @field_validator("depth")
    @classmethod
    def _fails(cls, value): raise ZeroDivisionError("by design")

class Unwritable(Needy):
    then: type = int

class Abstract(Attack[AttackState]):
    pass

class NoPlugin:
    pass
"""


ENGINE = """
from fedsim.contracts.learner import Engine
from fedsim.federation.engine import FlowerEngine

class Mute(Engine):
    "Carries no messages."
    def check(self): pass

class Far(FlowerEngine):
    "Has its clients elsewhere."
    remote = True
    def check(self): pass
    def train(self, job, server, on_round, link): raise NotImplementedError

class Tuned(Far):
    speed: int = 1
"""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"federation": {"engine": "tuned"}}, r"federation\.engine: .*parameters \(speed\)"),
        ({"federation": {"engine": "fra"}}, r"federation\.engine: .*did you mean 'far'"),
        ({"federation": {"engine": "far"}, "audit": {}}, r"audit: .*engine far leaves"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(
    changes: dict[str, object], said: str, install: Install
) -> None:
    install("odd", ENGINE, "fedsim.engines", far="Far", tuned="Tuned")
    with pytest.raises(ScenarioError, match=said):
        resolve(scenario(**changes))


def test_an_engine_carries_messages_of_flower(install: Install, tmp_path: Path) -> None:
    install("odd", ENGINE, "fedsim.engines", mute="Mute", far="Far")
    with pytest.raises(FedsimError, match=r"mute does not derive from .*FlowerEngine"):
        build_engine(resolve(scenario(federation={"engine": "mute"})))
    wanted = resolve(scenario(federation={"engine": "far"}))
    with pytest.raises(FedsimError, match="no nodes elsewhere"):
        build_engine(wanted).clients_of(wanted, tmp_path, Link(superlink="127.0.0.1:1"), None)


@pytest.mark.parametrize(
    ("attribute", "said"),
    [
        ("Reserved", "has a parameter called 'restarts', which a scenario uses itself"),
        ("Abstract", "is abstract; its author has to implement init, postprocess, step, terminate"),
        ("NoPlugin", "expected a class derived from fedsim.contracts.plugins.Plugin"),
        ("Absent", "cannot be imported: AttributeError"),
        ("Unwritable", "its plugin failed on it: PydanticSerializationError"),
        ("Failing", "ZeroDivisionError: by design"),
    ],
)
def test_a_plugin_that_cannot_be_used_says_whose_fault_it_is(
    install: Install, attribute: str, said: str
) -> None:
    install("odd", ATTACK, "fedsim.attacks", odd=attribute, needy="Needy")
    with pytest.raises(ScenarioError, match=r"^attacks\[0\]: ") as caught:
        resolve(scenario(attacks=["odd"]))
    assert said in str(caught.value)
    rows = {row["name"]: row["error"] for row in listing.rows(["attacks"])}
    assert rows["needy"] is None
    assert rows["odd"] or attribute in ("Reserved", "Failing")
    assert "needy" in str(json_schema())


@pytest.mark.parametrize("code", ["raise SystemExit(3)", "1 / 0", "import nothing_like_it", "def"])
def test_a_package_that_cannot_be_imported_stops_only_who_names_it(
    install: Install, code: str
) -> None:
    install("odd", code, "fedsim.models", odd="Model")
    (row,) = [row for row in listing.rows(["models"]) if row["name"] == "odd"]
    assert "plugin 'odd' of odd cannot be imported: " in row["error"]
    resolve(scenario(model="mlp"))
    with pytest.raises(ScenarioError, match=r"^model: plugin 'odd' of odd cannot be imported"):
        resolve(scenario(model="odd"))


def test_a_plugin_of_the_wrong_kind_is_refused(install: Install) -> None:
    install("odd", ATTACK, "fedsim.defenses", odd="Needy")
    with pytest.raises(ScenarioError, match="does not derive from UpdateDefense or Training"):
        resolve(scenario(defenses={"a": ["odd"]}))


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0\n", "cannot be imported: ZeroDivisionError"),
        (ATTACK, "does not derive from KnownMechanism"),
    ],
)
def test_a_broken_mechanism_stops_no_other(install: Install, code: str, said: str) -> None:
    install("odd", code, "fedsim.mechanisms", odd="Needy")
    keys = {"sensitivity": 1, "sigma": 2}
    assert calculator.delta("gaussian", keys, epsilon=1.0).delta > 0
    (row,) = [row for row in calculator.listing() if row["mechanism"] == "odd"]
    assert said in row["summary"] and row["keys"] == {}
    with pytest.raises(plugins.PluginError, match=said):
        calculator.delta("odd", {}, epsilon=1.0)
    with pytest.raises(FedsimError, match=r"normal has no calibration.*: correlated_gaussian"):
        calculator.calibrate("normal", {}, epsilon=1.0, delta=0.1)


def test_two_packages_with_one_name_are_a_conflict_until_it_is_resolved(install: Install) -> None:
    install("odd-one", ATTACK, "fedsim.attacks", idlg="Needy")
    with pytest.raises(plugins.PluginError, match=r"registered twice, by .*odd-one.*uninstall"):
        plugins.load("fedsim.attacks", "idlg")
    (row,) = [row for row in listing.rows(["attacks"]) if row["name"] == "idlg"]
    assert "registered twice" in row["error"]


def test_a_defense_whose_guarantee_fails_is_named(install: Install) -> None:
    code = (
        "from fedsim.contracts.defense import UpdateDefense\n"
        "class Odd(UpdateDefense):\n"
        "    def init(self, update, sensitivity): return {}\n"
        "    def apply(self, update, state, rng): return update, state\n"
        "    def guarantee(self, before): return 1 / 0\n"
    )
    install("odd", code, "fedsim.defenses", odd="Odd")
    with pytest.raises(ScenarioError, match=r"^defenses\.a\[1\]: its plugin failed: ZeroDivision"):
        resolve(scenario(defenses={"a": [{"name": "clip", "norm": 1}, "odd"]}))


def test_an_unknown_group_is_named() -> None:
    for ask in (plugins.names, plugins.list_installed, lambda group: plugins.load(group, "clip")):
        with pytest.raises(
            plugins.PluginError, match=r"fedsim\.defense'.* mean 'fedsim\.defenses'"
        ):
            ask("fedsim.defense")


def test_every_builtin_plugin_loads_and_says_where_it_comes_from() -> None:
    for group in plugins.GROUPS:
        for plugin in plugins.list_installed(group):
            if plugin.package == "fedsim":
                assert plugin.error is None, plugin.error
                assert plugin.summary
    for row in listing.rows(["attacks", "defenses"]):
        assert row["paper"], row["name"]
