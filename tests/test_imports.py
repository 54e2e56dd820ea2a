"""The import rules of docs/architecture.md, read from the source, and the attack stage stripped."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, ATTACKS, DEFENSES = ROOT / "fedsim", ROOT / "attacks", ROOT / "defenses"


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offenders(folder: Path, is_wrong: object, allowed: tuple[Path, ...] = ()) -> list[str]:
    assert callable(is_wrong)
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(folder.rglob("*.py"))
        if not any(path == a or a in path.parents for a in allowed)
        for name in imports(path)
        if is_wrong(name)
    ]


def starts(*prefixes: str) -> object:
    return lambda name: any(name == p or name.startswith(p + ".") for p in prefixes)


def own_except(*allowed: str) -> object:
    within = starts(*allowed)
    assert callable(within)
    return lambda name: name.startswith("fedsim") and not within(name)


def test_types_imports_nothing_of_fedsim() -> None:
    assert not [name for name in imports(CORE / "types.py") if name.startswith("fedsim")]


def test_the_core_never_names_an_attack_or_a_defense() -> None:
    assert not offenders(CORE, starts("fedsim_attacks", "fedsim_defenses", "attacks", "defenses"))


def test_only_the_federation_imports_flower() -> None:
    assert not offenders(CORE, starts("flwr", "ray"), allowed=(CORE / "federation",))
    assert not offenders(ATTACKS, starts("flwr", "ray"))
    assert not offenders(DEFENSES, starts("flwr", "ray"))


def test_only_the_pipeline_sees_the_federation() -> None:
    allowed = (CORE / "federation", CORE / "pipeline.py", CORE / "rows.py")
    assert not offenders(CORE, starts("fedsim.federation"), allowed)


def test_attacks_reach_neither_data_nor_truth() -> None:
    allowed = ("types", "adversary", "models", "paths", "plugins", "rng")
    wrong = own_except("fedsim_attacks", *(f"fedsim.{name}" for name in allowed))
    permitted = {"fedsim.rng", "fedsim.contracts.plugins"}
    assert not [
        found for found in offenders(ATTACKS, wrong) if found.partition(": ")[2] not in permitted
    ]
    assert not offenders(ATTACKS, starts("fedsim.types.GroundTruth"))


def test_defenses_see_only_their_contract() -> None:
    allowed = ("types", "defense", "guarantee", "privacy", "plugins")
    assert not offenders(
        DEFENSES, own_except("fedsim_defenses", *(f"fedsim.{name}" for name in allowed))
    )


def test_stages_do_not_import_each_other() -> None:
    """A stage may use `types`, contracts and small tools, not another stage's insides."""
    stages = {"data", "models", "learners", "scoring", "privacy", "report"}
    below = {"learners": {"models"}}
    for stage in stages:
        others = (
            stages
            - {stage}
            - below.get(stage, set())
            - ({"scoring"} if stage == "report" else set())
        )
        assert not offenders(CORE / stage, starts(*(f"fedsim.{other}" for other in others))), stage


def test_contracts_ledger_and_audit_import_in_one_direction() -> None:
    """What is claimed knows no accountant, and an accountant knows nobody who tries its claims."""
    assert not offenders(CORE / "contracts", starts("fedsim.privacy", "fedsim.audit"))
    assert not offenders(CORE / "privacy", starts("fedsim.audit"))


STRIPPED = """
import sys
import tomllib

class Absent:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {"flwr", "ray", "flwr_datasets", "datasets"} or name.startswith("fedsim.data"):
            raise ModuleNotFoundError(f"{name} is absent here", name=name)

sys.meta_path.insert(0, Absent())
"""


def run_stripped(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", STRIPPED + code, *arguments],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_attack_stage_imports_without_flower_and_data() -> None:
    run_stripped(
        "import pkgutil, importlib, fedsim_attacks\n"
        "for module in pkgutil.iter_modules(fedsim_attacks.__path__, 'fedsim_attacks.'):\n"
        "    importlib.import_module(module.name)\n"
        "import fedsim, fedsim.attacking.replay\n"
        "fedsim.attack, fedsim.load_observation\n"
    )


def test_stripping_works() -> None:
    with pytest.raises(AssertionError, match="is absent here"):
        run_stripped("import fedsim.contracts.data")
    with pytest.raises(AssertionError, match="is absent here"):
        run_stripped("import flwr")


def test_every_package_is_installed() -> None:
    """An editable installation finds a package that is not declared; others do not."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    found = {".".join(path.parent.relative_to(ROOT).parts) for path in CORE.rglob("__init__.py")}
    packages = set(declared["tool"]["setuptools"]["packages"])
    assert packages == found | {"fedsim_attacks", "fedsim_defenses"}
