"""Trying what a page shows: commands are parsed or run, scenarios resolved, Python executed."""

from __future__ import annotations

import argparse
import ast
import doctest
import inspect
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import typer
import yaml
from doc_pages import PROGRAMS, ROOT, Block, Command, commands
from PIL import Image
from typer.testing import CliRunner

import fedsim
from fedsim.cli.commands import app
from fedsim.contracts import plugins
from fedsim.federation.network.policy import Policy
from fedsim.scenario import expand, open_document

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
EXECUTED = {"privacy", "list", "schema", "validate"}
"""Parts of `fedsim` that take seconds at most, and are executed wherever they are shown."""
SCHEMATIC = re.compile(r"[A-Z]{3,}|\.\.\.|δ")
"""What stands in a command for what a reader puts there; such a command is only parsed."""
PRINTED = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def fill(folder: Path, page: list[Block]) -> None:
    """Put into `folder` what the blocks of a page name: its files, its scenarios, its plugins."""
    for name in ("scenarios", "benchmarks", "tests", "docs"):
        (folder / name).symlink_to(ROOT / name)
    # What a sentence calls a scenario of the reader's; a page that has its own puts it here.
    (folder / "scenario.yaml").write_bytes((ROOT / "scenarios/quickstart.yaml").read_bytes())
    for block in page:
        named = re.match(r"# (my_\w+/\w+\.py)\n", block.text)
        if "path: photos," in block.text:
            take_photographs(folder / "photos")
        if named:
            path = folder / named[1]
            path.parent.mkdir(exist_ok=True)
            (path.parent / "__init__.py").touch()
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "yaml" and "name" in (document := yaml.safe_load(block.text)):
            (folder / f"{document['name']}.yaml").write_text(block.text, encoding="utf-8")
        elif block.language == "toml" and "name" in tomllib.loads(block.text)["project"]:
            install(tomllib.loads(block.text)["project"], folder)


def install(project: dict[str, Any], folder: Path) -> None:
    """Register the plugins of a package that lies in `folder`."""
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")


def take_photographs(folder: Path) -> None:
    """Folders of two classes as a phone leaves them: of several sizes, and not all readable."""
    rng = np.random.default_rng(1)
    for name in ("beach", "forest"):
        (folder / name).mkdir(parents=True)
        for number in range(100):
            drawn = rng.integers(0, 256, (48 + number % 3, 64, 3), dtype=np.uint8)
            Image.fromarray(drawn).save(folder / name / f"{name}_{number:04}.jpg")
        (folder / name / "IMG_0001.HEIC").write_bytes(b"ftypheic")


def check_block(block: Block) -> None:
    """Try what can be tried of a block in seconds."""
    if block.language == "python":
        check_python(block)
    elif block.language == "yaml":
        check_scenario(block)
    elif block.language == "toml":
        groups = tomllib.loads(block.text)["project"]["entry-points"]
        assert groups and set(groups) <= set(plugins.GROUPS), groups
    elif block.language in ("sh", "console", "inline"):
        assert commands(block), "no command"
        for command in commands(block):
            check_command(command, only_named=block.language == "inline")
    else:
        assert block.language == "text", f"unknown language {block.language!r}: nobody tries it"


def check_scenario(block: Block) -> None:
    """A scenario resolves; a fragment does in the place of its sections in the page's scenario."""
    document = yaml.safe_load(block.text)
    if document.keys() <= Policy.model_fields.keys():
        Policy.model_validate(document)
        return
    if "name" not in document:
        base = yaml.safe_load(
            (ROOT / BASES.get(block.page, "scenarios/quickstart.yaml")).read_text()
        )
        if "learner" in document:
            base.pop("model", None)
        document = {**base, **document}
    path = Path("checked.yaml")
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    assert expand(open_document(path))


class Parsed(Exception):  # noqa: N818
    """The arguments of a call are right."""


def check_python(block: Block) -> None:
    """Run it; of a federation that it would train, the scenario and the arguments are checked."""
    if block.page in FILES_RUN_BY:
        assert Path(block.page).name in (ROOT / FILES_RUN_BY[block.page]).read_text("utf-8")
    elif block.page in QUOTED and "class " in block.text:
        check_quoted(block.text, (ROOT / QUOTED[block.page]).read_text("utf-8"))
    elif ">>> " in block.text:
        parsed = doctest.DocTestParser().get_doctest(block.text, {}, str(block), None, None)
        told: list[str] = []
        failed, tried = doctest.DocTestRunner(optionflags=PRINTED).run(parsed, out=told.append)
        assert tried and not failed, "".join(told)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fedsim, "run", parse_run)
            try:
                exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
            except Parsed:
                return


def parse_run(*given: Any, **named: Any) -> None:
    """What `fedsim.run` refuses before it trains."""
    arguments = inspect.signature(fedsim.pipeline.run).bind(*given, **named).arguments
    assert expand(open_document(Path(arguments["scenario"]), arguments.get("overrides", ())))
    raise Parsed


def check_quoted(part: str, whole: str) -> None:
    """The classes of `part` stand in `whole`, with all that `part` says of them."""
    classes = {c.name: c for c in ast.parse(whole).body if isinstance(c, ast.ClassDef)}
    for node in ast.parse(part).body:
        if isinstance(node, ast.ClassDef):
            assert node.name in classes, f"no class {node.name}"
            there = {ast.dump(each) for each in classes[node.name].body}
            for each in node.body:
                assert ast.dump(each) in there, f"not in class {node.name}: {ast.unparse(each)}"


def check_command(command: Command, *, only_named: bool = False) -> None:
    """Parse a command; `only_named`: a sentence may name one without its arguments."""
    program, *words = shlex.split(command.text)
    assert program in {*PROGRAMS, "."}, f"unknown program {program}"
    if program == "fedsim":
        check_fedsim(words, command.output, only_named)
    elif program == "python" and words[0].startswith("benchmarks/"):
        check_benchmark(words)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        named = set(re.findall(r"\.\[(\w+)\]", command.text))
        assert named <= set(extras["optional-dependencies"]), named
    elif program in ("pytest", "bash"):
        assert all(word == "--run-slow" or (ROOT / word).exists() for word in words), words


def check_benchmark(words: list[str]) -> None:
    """Run a benchmark up to where its arguments are parsed; files that it names are there."""
    assert (ROOT / words[0]).is_file(), f"no such script: {words[0]}"
    for word in words[1:]:
        assert not word.startswith("scenarios/") or (ROOT / word).is_file(), word
    parse = argparse.ArgumentParser.parse_args

    def parsed(parser: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
        parse(parser, *given, **named)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        patch.setattr(argparse.ArgumentParser, "parse_args", parsed)
        patch.setattr(sys, "argv", words)
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def check_fedsim(words: list[str], output: str | None, only_named: bool) -> None:
    """Parse a command and resolve its scenario; run it if it is short."""
    text = " ".join(words)
    words = [word.partition("|")[0].replace("δ", "1e-5") for word in words]
    try:
        arguments = parse_fedsim(words)
    except click.exceptions.Exit:  # --help
        return
    except click.MissingParameter:
        if only_named or SCHEMATIC.search(text):
            return
        raise
    scenarios = [word for word in words if word.endswith(".yaml") and "policy" not in word]
    for path in scenarios if words[0] in ("run", "up", "validate", "preflight") else ():
        assert expand(open_document(Path(path), arguments.get("settings") or ()))
    if words[0] in EXECUTED and not SCHEMATIC.search(text):
        done = CliRunner().invoke(app, words)
        # An audit that refutes a claim ends with status 1.
        assert done.exit_code in ((0, 1) if "audit" in words else (0,)), done.output
        assert output is None or is_printed(output, done.stdout), done.stdout


def parse_fedsim(words: list[str]) -> dict[str, Any]:
    """Returns the arguments of a command of fedsim, by their names."""
    command: click.Command = typer.main.get_command(app)
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        _, found, words = command.resolve_command(click.Context(command), words)
        assert found is not None
        command = found
    return command.make_context("fedsim", list(words)).params


def is_printed(shown: str, printed: str) -> bool:
    """Whether a page shows what was printed, where it does not say `...`."""
    return doctest.OutputChecker().check_output(shown + "\n", printed, PRINTED)
