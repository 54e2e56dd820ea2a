"""The command line: thin, quick to answer, and honest in its exit status."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer.main
from safetensors.torch import load_file
from typer.testing import CliRunner

if TYPE_CHECKING:
    from click.testing import Result

from fedsim import pipeline, report
from fedsim.cli.commands import app
from fedsim.contracts.attack import AttackFailed
from fedsim.federation.network.link import Link
from fedsim.results.record import Run
from fedsim.types import FedsimError, RunFailed

pytestmark = pytest.mark.usefixtures("attacks_here")

SCENARIO = """\
name: tiny
seed: 5
data: {source: {name: faces, size: 16}, clients: 2}
model: {name: mlp, hidden: [12]}
training: {rounds: 2, local: {batch_size: 2}}
defenses:
  none: []
  noise: [{name: gaussian_noise, std: 0.01}]
attacks: [{name: inverting_gradients, iterations: 3}]
observe: {rounds: [1], clients: [0], batch_sizes: [1]}
"""


def invoke(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.yaml").write_text(SCENARIO, encoding="utf-8")
    result = invoke("run", folder / "tiny.yaml", "--out", folder / "out", "--workers", 1)
    assert result.exit_code == 0, result.output
    assert "inverting_gradients" in result.stdout
    assert f"report: {folder / 'out' / 'report.html'}" in result.stdout
    return folder / "out"


def recording(run: Path, stack: str = "none") -> Path:
    (path,) = (run / "observations" / stack).rglob("client-*.json")
    return path


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from fedsim.cli.commands import app\n"
        "assert 'leaderboard' in CliRunner().invoke(app, ['--help']).output\n"
        "assert '--resume' in CliRunner().invoke(app, ['run', '--help']).output\n"
        "assert CliRunner().invoke(app, ['--version']).exit_code == 0\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    assert "fedsim" in loaded
    assert not loaded & {"torch", "numpy", "pydantic", "flwr", "ray", "yaml", "matplotlib"}


NETWORK = ["--superlink", "localhost:8000", "--root-certificates", "ca.crt", "--shared-seed"]
LINK = Link(
    superlink="localhost:8000", roots=Path("ca.crt"), secret=Path("secret"), shared_seed=True
)


@pytest.mark.parametrize(
    ("more", "link", "engine"),
    [
        ([], None, []),
        ([*NETWORK, "--superexec-secret", "secret"], LINK, ["federation.engine=deployment"]),
    ],
    ids=["alone", "superlink"],
)
def test_options_reach_the_python_function(
    more: list[str],
    link: Link | None,
    engine: list[str],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    got: dict[str, Any] = {}

    def run(scenario: Path, **options: Any) -> Run:
        got.update(options, scenario=scenario)
        return Run(path.parent)

    monkeypatch.setattr(pipeline, "run", run)
    words = ["--set", "training.rounds=3", "--set", "name=b", "--seed", 9, "--device", "auto"]
    result = invoke("run", path, "--out", "o", *words, "--resume", "--workers", 2, "-q", *more)
    assert result.exit_code == 0, result.output
    assert got == {
        "scenario": path,
        "out": Path("o"),
        "overrides": ["training.rounds=3", "name=b", "seed=9", "device=auto", *engine],
        "resume": True,
        "workers": 2,
        "quiet": True,
        "link": link,
        "log": [],
    }
    assert result.output == ""


def test_every_option_has_its_python_counterpart() -> None:
    command = typer.main.get_command(app)
    shorthand = {"settings", "seed", "device"}  # of `overrides`
    shorthand |= {"superlink", "roots", "secret", "shared_seed"}  # of `link`
    options = {parameter.name for parameter in command.commands["run"].params}  # type: ignore[attr-defined]
    python = set(inspect.signature(pipeline.run).parameters)
    assert options - shorthand == python - {"overrides", "link"}


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (FedsimError("data.clients: too many"), 2, "data.clients: too many"),
        (RunFailed("the disk is full; free some space"), 1, "the disk is full"),
        (AttackFailed("nothing to see"), 1, "nothing to see"),
        (PermissionError(13, "Permission denied", "/out"), 1, "Permission denied: '/out'"),
        (KeyboardInterrupt(), 130, "interrupted; continue with: fedsim run x.yaml --resume"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_exit_status(
    error: BaseException, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(sys, "argv", ["fedsim", "run", "x.yaml", "--resume"])
    result = invoke("run", "x.yaml", "--resume")
    assert result.exit_code == status
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "run", lambda *args, **options: 1 / 0)
    assert isinstance(invoke("run", "x.yaml").exception, ZeroDivisionError)


def test_attack_attacks_a_recording_again(finished: Path, tmp_path: Path) -> None:
    result = invoke(
        *("attack", recording(finished), "--attack", "inverting_gradients", "--quiet"),
        *("--set", "iterations=2", "--restarts", 2, "--grant", "labels=known"),
        *("--out", tmp_path / "o"),
    )
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["attack"]["name"] == "inverting_gradients"
    assert row["attack"]["parameters"]["iterations"] == 2
    assert row["attack"]["restarts"] == 2
    assert row["knowledge"]["labels"] == "known"
    assert row["metrics"]["psnr"] > 0
    assert row == json.loads((tmp_path / "o" / "result.json").read_text("utf-8"))
    images = load_file(tmp_path / "o" / "reconstruction.safetensors")["images"]
    assert images.shape == (1, 1, 16, 16)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--attack", "inverting_gradient"], "did you mean 'inverting_gradients'?"),
        (["--attack", "inverting_gradients", "--set", "iteratons=2"], "did you mean 'iterations'?"),
        (
            ["--attack", "inverting_gradients", "--grant", "labls=known"],
            "--grant labls=known: knowledge.labls: unknown key; did you mean 'labels'?",
        ),
        (
            ["--attack", "inverting_gradients", "--grant", "known"],
            "--grant known: expected key=value, such as labels=known",
        ),
        (["--attack", "inverting_gradients", "--device", "cuda:99"], "not available"),
        (
            ["--attack", "generative_prior", "--grant", "public=test"],
            "no public images were recorded",
        ),
        (["--attack", "row_reconstruction"], "and clients send updates of a model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_attack_refuses(words: list[str], message: str, finished: Path, tmp_path: Path) -> None:
    result = invoke("attack", recording(finished), *words, "--out", tmp_path / "o")
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "to do" not in result.stderr, "refused before anything is said to be under way"
    assert not (tmp_path / "o").exists()


def test_attack_refuses_a_folder_that_cannot_be(finished: Path, tmp_path: Path) -> None:
    """Before the attack, not after hours of it."""
    (tmp_path / "file").write_text("")
    words = ("attack", recording(finished), "--attack", "label_inference", "--out")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        result = invoke(*words, wrong)
        assert result.exit_code == 2, result.output
        assert f"--out {wrong}: {tmp_path / 'file'} is a file and no folder" in result.stderr
        assert not result.stdout


def test_leaderboard_in_three_formats(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown = invoke("leaderboard", finished)
    assert shown.exit_code == 0, shown.output
    assert "inverting_gradients" in shown.stdout
    table = report.render(report.leaderboard_rows([finished]), "table", width=120)
    said = "- nothing can be said of any defense: INVALID, for the attacks do not work"
    assert said in shown.stdout.removesuffix(table)
    assert shown.stdout.endswith(f"\n{table}")
    document = json.loads(invoke("leaderboard", finished, "--format", "json").stdout)
    assert {row["defense"] for row in document["rows"]} == {"none", "noise"}
    header, *lines = invoke(
        "leaderboard", finished, finished, "--format", "csv"
    ).stdout.splitlines()
    assert "psnr_mean" in header.split(",")
    assert len(lines) == 2, "the same run twice counts once"


@pytest.mark.parametrize("words", [["list"], ["privacy"]], ids=" ".join)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lists_fit_the_terminal_and_lose_no_word(
    words: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = invoke(*words).stdout
    assert max(map(len, shown.splitlines())) <= width
    as_json = ("--json",) if words == ["privacy"] else ("--format", "json")
    phrase = "".join(shown.split())
    for text in texts(json.loads(invoke(*words, *as_json).stdout)):
        assert "".join(text.split()) in phrase


def texts(rows: Any) -> Iterator[str]:
    """The texts that a list has to show, of plugins or of mechanisms."""
    for row in rows:
        yield from (row[key] for key in ("name", "mechanism", "summary", "paper") if key in row)
        for keys in row["keys"].values() if "keys" in row else [row["parameters"]]:
            for item in keys:
                yield from (item["name"], item["range"], item["description"])


HEAVY = ("torch", "rich.console", "pandas", "matplotlib", "fedsim.report", "fedsim.training")
"""What no command imports that only describes plugins."""


@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        (["list", "--format", "json"], ["fedsim.scenario", "fedsim.federation.deployed"]),
        (["schema"], ["fedsim.targets", "fedsim.federation.deployed"]),
        (
            ["privacy", "--json"],
            ["fedsim.scenario", "fedsim_attacks", "fedsim.federation.deployed"],
        ),
    ],
    ids=lambda value: value[0],
)
def test_plugins_are_described_without_what_is_heavy(words: list[str], unneeded: list[str]) -> None:
    """Torch takes seconds to import; what is said of plugins is the same without it."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name in {(*HEAVY, *unneeded)}: raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from fedsim.cli.commands import app\n"
        "app()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, check=True)
    assert json.loads(done.stdout) == json.loads(invoke(*words).stdout)


def test_validate(path: Path) -> None:
    first, *facts = invoke("validate", path).stdout.splitlines()
    assert first == f"{path}: valid" and facts[0].startswith("  data: ")
    alone = invoke("validate", path, "--without-data").stdout
    assert alone == f"{path}: valid, its data aside\n"
    lost = ("--set", "data.source={name: image_folder, path: lost}")
    assert invoke("validate", path, *lost).exit_code == 2
    assert invoke("validate", path, *lost, "--without-data").exit_code == 0
    ask = ("validate", path, "--without-data")
    swept = invoke(*ask, "--set", 'sweep["seed"]=[1, 2]').stdout
    assert swept == f"{path}: valid, its data aside\n  seed=1\n  seed=2\n"
    wide = invoke(*ask, "--set", 'sweep["model"]=[{"name": "mlp", "hidden": [8]}]')
    assert "-" in wide.stdout
    assert wide.stdout.endswith('  (model={"name": "mlp", "hidden": [8]})\n')
    resolved = invoke("validate", path, "--resolved").stdout
    path.write_text(resolved, encoding="utf-8")
    assert invoke("validate", path, "--resolved").stdout == resolved
    assert "algorithm: fedsgd" in resolved
    assert invoke("validate", path, "--set", "seed=x").exit_code == 2


@pytest.mark.parametrize("resolved", [(), ("--resolved",)], ids=["valid", "resolved"])
def test_validate_warns_where_no_defense_can_be_compared(
    path: Path, resolved: tuple[str, ...]
) -> None:
    alone = ("--set", 'defenses={"noise": [{"name": "gaussian_noise", "std": 0.01}]}')
    result = invoke("validate", path, *resolved, *alone)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"{path}: WARNING: defenses: no stack is undefended")
    assert result.stderr.count("\n") == 1
    for fine in ((), (*alone, "--set", "attacks=[]")):
        assert invoke("validate", path, *resolved, *fine).stderr == ""


@pytest.mark.parametrize("command", [["run", "x.yaml"], ["node", "--data", "d", "--client", "0"]])
def test_plaintext_to_another_machine_is_refused_before_anything_heavy(command: list[str]) -> None:
    code = (
        "import sys; from fedsim.cli.commands import app; status = app(standalone_mode=False); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    words = [*command, "--superlink", "10.0.0.1:8000"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "--superlink: 10.0.0.1 is another machine" in done.stderr
