"""Trying what a page shows: commands are parsed or run, scenarios resolved, Python executed."""

from __future__ import annotations

import argparse
import ast
import doctest
import importlib
import inspect
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml
from doc_pages import PROGRAMS, ROOT, Block, Command, commands
from PIL import Image
from typer.testing import CliRunner

from fedsim.cli.commands import app
from fedsim.contracts import plugins
from fedsim.federation.network.policy import Policy
from fedsim.report.loggers.stores import STORES
from fedsim.scenario import Scenario, expand, open_document

SCHEMATIC = {
    # Its recordings are another program's: tests/federation/test_stock_apps.py makes some.
    "fedsim assess TAPPED --model MODULE:NAME --truth DIR --out DIR": ["fedsim assess --help"],
    "fedsim attack ... --grant labels=known --grant bn=exact": [
        "fedsim attack runs/quickstart/observations/none/round-0001/client-0000-b1-t0.json "
        "--attack deep_leakage --grant labels=known --grant bn=exact"
    ],
    "fedsim attack OBSERVATION --attack NAME": [
        "fedsim attack runs/quickstart/observations/none/round-0001/client-0000-b1-t0.json "
        "--attack deep_leakage"
    ],
    "fedsim leaderboard DIR... --format table|json|csv": [
        f"fedsim leaderboard runs/quickstart --format {format}"
        for format in ("table", "json", "csv")
    ],
    "fedsim leaderboard DIR... --html FILE": [
        "fedsim leaderboard runs/quickstart --html board.html"
    ],
    "fedsim serve DIR...": ["fedsim serve runs/quickstart"],
    "fedsim privacy audit MECHANISM KEY=VALUE... --delta δ --confidence 0.999286": [
        "fedsim privacy audit gaussian sensitivity=1.0 sigma=4.0 --delta 0.01 --confidence 0.999286"
    ],
    "fedsim privacy delta|epsilon|calibrate|audit MECHANISM key=value ...": [
        "fedsim privacy delta gaussian sensitivity=1 sigma=2 --epsilon 1",
        "fedsim privacy epsilon gaussian sensitivity=1 sigma=2 --delta 1e-5",
        "fedsim privacy calibrate gaussian sensitivity=1 --epsilon 1 --delta 1e-5",
        "fedsim privacy audit gaussian sensitivity=1 sigma=2 --delta 1e-5",
    ],
    "fedsim report DIR": ["fedsim report runs/quickstart"],
    "fedsim check DIR --max-gain 3 --max-epsilon 8": [
        "fedsim check runs/quickstart --max-gain 3 --max-epsilon 8"
    ],
    "fedsim dossier DIR": ["fedsim dossier runs/quickstart"],
    "fedsim compare BEFORE AFTER": ["fedsim compare runs/quickstart runs/quickstart"],
    "fedsim preflight SCENARIO": ["fedsim preflight scenarios/quickstart.yaml"],
    "fedsim preflight DIR": ["fedsim preflight runs/quickstart"],
    "fedsim run SCENARIO": ["fedsim run scenarios/quickstart.yaml"],
    "fedsim up SCENARIO --out DIR": ["fedsim up scenarios/network/tiny.yaml --out DIR"],
    "fedsim run scenario.yaml": ["fedsim run scenarios/quickstart.yaml"],
    "fedsim validate SCENARIO": ["fedsim validate scenarios/quickstart.yaml"],
    "fedsim validate SCENARIO --resolved": [
        "fedsim validate scenarios/quickstart.yaml --resolved",
    ],
}
"""What is written with a placeholder, and what stands for it."""
BASES = {
    "docs/private-releases.md": "scenarios/private/regression.yaml",
    "docs/correlated-noise.md": "scenarios/private/kan.yaml",
    "docs/privacy-audit.md": "scenarios/private/audit.yaml",
    "docs/feature-recovery.md": "scenarios/reconstruction/table2-small.yaml",
    "docs/image-reconstruction.md": "scenarios/reconstruction/table3-small.yaml",
}
"""The scenario that a page's fragments are part of; the quickstart where none is named."""
FILES_RUN_BY = {
    "docs/adding-an-attack.md": "tests/attacks/test_adding_an_attack.py",
    "docs/adding-a-defense.md": "tests/defenses/test_adding_a_defense.py",
}
"""Pages whose blocks of Python are files, and the test that runs them together."""
QUOTED = {"docs/privacy-calculator.md": "tests/thirdparty/fedsim_example_plugins/laplace.py"}
"""Pages with a part of a class, and the file that has the whole of it."""
DEVELOPING = {
    *("python -m venv .venv", ". .venv/bin/activate", "ruff check .", "ruff format .", "mypy"),
    "sphinx-build -W -c docs/site . build/site",
}
"""What `.ci/run` does in words of its own."""
REFUTED = {"privacy audit random_projection leverage=0.1 r=20 sabotage=0.8 --delta 1e-3 --json"}
"""Audits of a lie, whose exit status is 1."""
WRITES = {"benchmarks/train_generator.py"}
"""Scripts that are told what to write."""
MAKERS = {
    "runs/photos-generator.safetensors": (
        "python benchmarks/train_generator.py photos runs/photos-generator.safetensors"
    )
}
"""What is read below `runs/` and is no run's, and the command that makes it."""
EXECUTED = {"privacy", "list", "schema", "validate"}
"""Parts of `fedsim` that take seconds at most, and are executed wherever they are shown."""
PRINTED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


class Parsed(Exception):  # noqa: N818
    """The arguments of a benchmark are right."""


class Workplace:
    """A folder in which a page's commands find what they name."""

    def __init__(self, folder: Path, page: list[Block], patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("scenarios", "benchmarks", "tests", "docs"):
            (folder / name).symlink_to(ROOT / name)
        for block in page:
            named = re.match(r"# ([\w/]+\.py)\n", block.text)
            document = _mapping(block)
            if "path: photos," in block.text:
                photographs(folder / "photos")
            if named:
                path = folder / named[1]
                if not (folder / path.parts[-2]).is_symlink():
                    path.parent.mkdir(exist_ok=True)
                    (path.parent / "__init__.py").touch()
                    path.write_text(block.text, encoding="utf-8")
            elif "name" in document:
                (folder / f"{document['name']}.yaml").write_text(block.text, encoding="utf-8")
            elif block.language == "toml" and "name" in tomllib.loads(block.text)["project"]:
                install(tomllib.loads(block.text)["project"], folder)
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        patch.setenv("COLUMNS", "120")
        plugins._entry_points.cache_clear()

    def file(self, name: str) -> Path:
        """The file of the scenario of a name, shipped or of the page."""
        for path in [*self.folder.glob("*.yaml"), *(ROOT / "scenarios").rglob("*.yaml")]:
            if yaml.safe_load(path.read_text(encoding="utf-8"))["name"] == name:
                return path
        raise AssertionError(f"runs/{name}: no scenario has that name")

    def scenario(self, name: str) -> Scenario:
        """The scenario of that file."""
        return expand(open_document(self.file(name)))[0].scenario


def _mapping(block: Block) -> dict[str, Any]:
    document = yaml.safe_load(block.text) if block.language == "yaml" else {}
    assert isinstance(document, dict), f"{block}: no mapping"
    return document


def install(project: dict[str, Any], folder: Path) -> None:
    """Register the plugins of a package that lies in `folder`."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {target}" for name, target in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def pictures(path: Path, *, classes: int = 10, train: int = 60, test: int = 20) -> None:
    """A zip of random images of 32x32 pixels, as `image_folder` reads it."""
    rng = np.random.default_rng(0)
    with zipfile.ZipFile(path, "w") as archive:
        for split, count in (("train", train), ("test", test)):
            for label in range(classes):
                for number in range(count):
                    drawn = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
                    file = BytesIO()
                    Image.fromarray(drawn).save(file, "PNG")
                    archive.writestr(f"{split}/{label}/{number:03}.png", file.getvalue())


def photographs(folder: Path, *, count: int = 100) -> None:
    """Folders of two classes as a phone leaves them: of several sizes, and not all readable."""
    rng = np.random.default_rng(1)
    for name, colour in (("beach", (230, 200, 120)), ("forest", (30, 110, 40))):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            noise = rng.normal(0, 30, (48 + number % 3, 64, 3))
            drawn = np.clip(noise + colour, 0, 255).astype(np.uint8)
            Image.fromarray(drawn).save(folder / name / f"{name}_{number:04}.jpg")
        (folder / name / "IMG_0001.HEIC").write_bytes(b"ftypheic")
    (folder / "beach" / "beach_cut.jpg").write_bytes(b"")


def check_block(block: Block, place: Workplace) -> None:
    """Try what can be tried of a block in seconds."""
    by_language = {
        "python": check_python,
        "yaml": check_scenario,
        "toml": check_toml,
        "text": lambda block, place: None,
        "sh": check_commands,
        "console": check_commands,
        "inline": check_commands,
    }
    assert block.language in by_language, f"unknown language {block.language!r}: nobody tries it"
    by_language[block.language](block, place)


def check_toml(block: Block, place: Workplace) -> None:
    """It registers plugins in groups that there are."""
    groups = tomllib.loads(block.text)["project"]["entry-points"]
    assert groups and set(groups) <= set(plugins.GROUPS), groups


def check_scenario(block: Block, place: Workplace) -> None:
    """A scenario resolves; a fragment does in the place of its sections in the page's scenario."""
    document = _mapping(block)
    if document.keys() <= Policy.model_fields.keys():
        Policy.model_validate(document)
        return
    if "name" not in document:
        base = (ROOT / BASES.get(block.page, "scenarios/quickstart.yaml")).read_text("utf-8")
        document = {**yaml.safe_load(base), **document}
        if "learner" in document and "model" not in _mapping(block):
            document.pop("model", None)
    path = place.folder / "checked.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert expand(open_document(path))


def check_python(block: Block, place: Workplace) -> None:
    """Run it; what trains for minutes is compiled, and its names and arguments resolved."""
    if block.page in QUOTED:
        if quoted(block.text, (ROOT / QUOTED[block.page]).read_text(encoding="utf-8")):
            return
    elif block.page in FILES_RUN_BY:
        path = re.match(r"# ([\w/]+\.py)\n", block.text)
        assert path, "a file without a name"
        assert f'"{Path(block.page).name}"' in (ROOT / FILES_RUN_BY[block.page]).read_text("utf-8")
        return
    if ">>> " in block.text:
        parsed = doctest.DocTestParser().get_doctest(block.text, {}, str(block), None, None)
        told: list[str] = []
        failed, tried = doctest.DocTestRunner(optionflags=PRINTED).run(parsed, out=told.append)
        assert tried and not failed, "".join(told)
    elif is_slow(block):
        resolve_names(block.text)
    else:
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})  # noqa: S102


def is_slow(block: Block) -> bool:
    """Whether a block of Python trains a federation."""
    return "fedsim.run(" in block.text


def is_slow_command(text: str) -> bool:
    """Whether a command runs a scenario or a benchmark."""
    words = text.split()
    runs = words[0] == "fedsim" and len(words) > 2 and words[1] not in EXECUTED
    return runs or text.startswith("python benchmarks/")


def quoted(part: str, whole: str) -> bool:
    """Whether the classes of `part` stand in `whole`, with all that `part` says of them."""
    classes = {c.name: c for c in ast.parse(whole).body if isinstance(c, ast.ClassDef)}
    shown = [node for node in ast.parse(part).body if isinstance(node, ast.ClassDef)]
    for node in shown:
        assert node.name in classes, f"no class {node.name}"
        there = {ast.dump(each) for each in classes[node.name].body}
        for each in node.body:
            assert ast.dump(each) in there, f"not in class {node.name}: {ast.unparse(each)}"
    return bool(shown)


def resolve_names(source: str) -> None:
    """Import what a piece of Python imports, and bind the arguments of what it calls there."""
    tree = ast.parse(source)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
                top = alias.name.partition(".")[0]
                known[alias.asname or top] = sys.modules[alias.name if alias.asname else top]
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            known |= {
                alias.asname or alias.name: getattr(module, alias.name) for alias in node.names
            }

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return known.get(node.id)
        inner = value(node.value) if isinstance(node, ast.Attribute) else None
        return None if inner is None else getattr(inner, node.attr)

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            value(node)
        called = value(node.func) if isinstance(node, ast.Call) else None
        if called is not None:
            words = {str(each.arg): None for each in node.keywords}
            inspect.signature(called).bind(*node.args, **words)
        if isinstance(node, ast.Constant) and str(node.value).startswith("scenarios/"):
            assert (ROOT / str(node.value)).is_file(), node.value


def concrete(command: Command) -> list[Command]:
    """The command, or what stands for it where it is written with placeholders."""
    if command.text in SCHEMATIC:
        return [Command(text) for text in SCHEMATIC[command.text]]
    return [command]


def check_commands(block: Block, place: Workplace) -> None:
    """Parse all commands, and execute those that take seconds."""
    found = commands(block)
    assert found, "no command"
    for each in found:
        for command in concrete(each):
            check_command(command, place, only_named=block.language == "inline")


def check_command(command: Command, place: Workplace, *, only_named: bool = False) -> None:
    """Parse a command; `only_named`: a sentence may name one without its arguments."""
    if command.text in DEVELOPING:
        return
    words = shlex.split(command.text)
    program, arguments = words[0], words[1:]
    assert program in PROGRAMS, f"unknown program {program}"
    if program == "fedsim":
        if only_named and len(words) < 4 and is_group_or_command(arguments):
            return
        check_fedsim(arguments, command.output, place)
    elif program == "python":
        check_benchmark(arguments)
    elif program == "pip":
        check_pip(arguments)
    else:
        assert program in ("pytest", "bash"), command.text
        for word in arguments:
            assert word == "--run-slow" or (ROOT / word).exists(), word


def is_group_or_command(words: list[str]) -> bool:
    """Whether `words` are the name of a command, without arguments."""
    node: Any = typer.main.get_command(app)
    for word in words:
        if word not in getattr(node, "commands", {}):
            return False
        node = node.commands[word]
    return True


def check_pip(words: list[str]) -> None:
    """Every extra is declared, and every file there."""
    assert words[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for word in words[1:]:
        named = re.fullmatch(r"\.\[(\w+)\]", word)
        if named:
            assert named[1] in extras["optional-dependencies"], word
        else:
            assert word in ("-e", "-c", ".") or (ROOT / word).is_file(), word


def check_benchmark(words: list[str]) -> None:
    """Run a benchmark up to where its arguments are parsed; files that it names are there."""
    if words[0] == "-m":
        check_module(words[1:])
        return
    path = ROOT / words[0]
    assert words[0].startswith("benchmarks/") and path.is_file(), f"no such script: {words[0]}"
    for word in words[1:]:
        assert not word.startswith("scenarios/") or (ROOT / word).is_file(), word

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        parse_alone(words, lambda: runpy.run_path(str(path), run_name="__main__"))


def check_module(words: list[str]) -> None:
    """Run a module up to where its arguments are parsed."""
    main = importlib.import_module(words[0]).main
    parse_alone(words, main)


def parse_alone(words: list[str], main: Callable[[], object]) -> None:
    """Run `main` with these words after `python`, up to where its arguments are parsed."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(parser, *given, **named)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", words)
        try:
            main()
        except Parsed:
            return
        except SystemExit as error:
            raise AssertionError(f"refused: {' '.join(words)}") from error
    raise AssertionError(f"{words[0]} parses no arguments")


@contextmanager
def stages_replaced(place: Workplace) -> Any:
    """The command line as it is, with checks in the place of what takes minutes."""

    def run(scenario: Path, *, overrides: list[str], log: Sequence[str] = (), **_: Any) -> None:
        assert {name.partition("=")[0] for name in log} <= set(STORES), log
        expand(open_document(scenario, overrides))
        raise typer.Exit

    def collect(folder: Path, **_: Any) -> None:
        place.scenario(folder.name)
        raise typer.Exit

    def serve(*_: Any) -> None:
        raise typer.Exit

    def attack(observation: Path, *_: Any, **__: Any) -> None:
        check_recording(observation, place)
        raise typer.Exit

    def forecast(origin: Path, overrides: list[str], **_: Any) -> None:
        if origin.suffix == ".yaml":
            expand(open_document(origin, overrides))
        else:
            place.scenario(origin.name)
        raise typer.Exit

    def from_runs(folders: Path | list[Path], *_: Any) -> None:
        for folder in [folders] if isinstance(folders, Path) else folders:
            place.scenario(folder.name)
        raise typer.Exit

    def dossier(folder: Path, *_: Any, pdf: bool = False) -> tuple[Path, ...]:
        from_runs(folder)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsim.pipeline.run", run)
        patch.setattr("fedsim.deploying.up", run)
        patch.setattr("fedsim.pipeline.collect", collect)
        patch.setattr("fedsim.federation.network.node.serve", serve)
        patch.setattr("fedsim.federation.network.link.check", serve)
        patch.setattr("fedsim.federation.network.keys.read_identity", lambda *_: None)
        patch.setattr("fedsim.attacking.replay.attack", attack)
        patch.setattr("fedsim.forecasting.preflight.preflight_file", forecast)
        patch.setattr("fedsim.report.limits.broken_limits", lambda folders, **_: from_runs(folders))
        patch.setattr("fedsim.report.limits.grown", lambda *folders: from_runs(list(folders)))
        patch.setattr("fedsim.report.load_runs", from_runs)
        patch.setattr("fedsim.report.write_report", from_runs)
        patch.setattr("fedsim.board.write_board", from_runs)
        patch.setattr("fedsim.board.serve", lambda folders, **_: from_runs(folders))
        patch.setattr("fedsim.report.dossier.write_dossier", dossier)
        yield


def check_fedsim(words: list[str], output: str | None, place: Workplace) -> None:
    """Run a command of fedsim, its long stages replaced; what it prints is what the page shows."""
    with stages_replaced(place):
        done = CliRunner().invoke(app, words)
    text = " ".join(words)
    assert done.exit_code == (text in REFUTED), f"fedsim {text}: {done.output or done.exception!r}"
    if output is not None and words[0] in EXECUTED:
        check_output(output, done.stdout)


def check_output(shown: str, printed: str) -> None:
    """What a page shows is what was printed, where it does not say `...`."""
    same = doctest.OutputChecker().check_output(shown + "\n", printed, PRINTED)
    assert same, f"the page shows\n{shown}\nand it prints\n{printed}"


def check_recording(path: Path, place: Workplace) -> None:
    """A run of the scenario that the path names leaves such a recording."""
    named = re.fullmatch(
        r"runs/([\w-]+)/observations/([\w.-]+)/round-(\d{4})/client-(\d{4})-b(\d+)-t(\d+)\.json",
        path.as_posix(),
    )
    assert named, f"{path}: no recording has such a name"
    scenario = place.scenario(named[1])
    round_, client, batch, trial = (int(named[each]) for each in (3, 4, 5, 6))
    observe, last = scenario.observe, scenario.training.rounds
    assert named[2] in scenario.defenses, f"{path}: no such stack"
    assert round_ in {last if each == "last" else each for each in observe.rounds}, path
    assert observe.clients == "all" or client in observe.clients, path
    assert batch in (observe.batch_sizes or ()) and trial < observe.trials, path


def prepare(text: str, place: Workplace, limit: float) -> bool:
    """Make what a command, or the scenario that it runs, reads below `runs/`.

    A run is made of its undefended stack, its attacks left out. Returns whether all was done, each
    within `limit` seconds.
    """
    words = shlex.split(text)
    if words[:2] == ["fedsim", "run"]:
        text += "\n" + (place.folder / words[2]).read_text(encoding="utf-8")
    elif words[1] in WRITES:
        return True
    return all(
        (place.folder / path).exists() or make(path, place, limit)
        for path in sorted(set(re.findall(r"(?<![\w/])runs/[\w./-]*\w", text)))
    )


def make(path: str, place: Workplace, limit: float) -> bool:
    """Make a file of `MAKERS`, or the run in whose folder `path` lies."""
    command = MAKERS.get(path)
    if command is None:
        scenario = place.file(path.split("/")[1])
        command = f"fedsim run {scenario} --set 'defenses={{none: []}}'"
        loaded = place.scenario(path.split("/")[1])
        if loaded.attacks:
            command += " --set 'attacks=[label_inference]'"
        if loaded.data.source.name == "image_folder":
            command += " --set data.source.path=cifar10-images.zip"
    return prepare(command, place, limit) and execute(command, None, place.folder, limit)


def execute(text: str, output: str | None, folder: Path, limit: float) -> bool:
    """Run a command as it is written, for `limit` seconds at most, and see it end well.

    One that is at work after that time, without an error, is ended: it began as written. Returns
    whether it was done.
    """
    words = shlex.split(text)
    program = {"fedsim": [sys.executable, "-m", "fedsim"], "python": [sys.executable]}[words[0]]
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [*program, *words[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)
        process.communicate(timeout=60)
        return False
    assert process.returncode == 0, f"{text}: {said}"
    if output is not None:
        check_output(output, printed)
    return True
