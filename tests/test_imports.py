"""The import rules of docs/architecture.md, read from the source, and the attack stage stripped."""

from __future__ import annotations

import ast
import collections
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE, ATTACKS, DEFENSES = ROOT / "fedsim", ROOT / "attacks", ROOT / "defenses"
PACKAGES = {"fedsim": CORE, "fedsim_attacks": ATTACKS, "fedsim_defenses": DEFENSES}

BASE = {"types", "rng", "system", "words"}
ROOMS: dict[str, set[str]] = {
    "types": set(),
    "words": set(),
    "rng": {"types"},
    "system": {"types", "words"},
    "contracts": BASE,
    "recording": BASE,
    "models": {*BASE, "contracts", "recording"},
    "scenario": {*BASE, "contracts", "models"},
    "data": {*BASE, "contracts", "scenario"},
    "learners": {*BASE, "contracts", "models"},
    "scoring": {*BASE, "contracts"},
    "targets": {*BASE, "contracts", "models", "scoring"},
    "privacy": {*BASE, "contracts", "scenario"},
    "progress": {"privacy"},
    "training": {
        *BASE,
        *("contracts", "data", "learners", "models", "privacy", "recording", "scenario"),
    },
    "federation": {
        *BASE,
        *("audit", "contracts", "models", "privacy", "recording", "scenario", "scoring"),
        "training",
    },
    "attacking": {*BASE, "contracts", "models", "privacy", "recording", "scoring"},
    "forecasting": {
        *BASE,
        *("attacking", "contracts", "learners", "models", "recording", "scenario", "scoring"),
        "training",
    },
    "nvflare_tap": {*BASE, "recording", "training"},
    "audit": {*BASE, "contracts", "learners", "models", "privacy", "scenario", "training"},
    "results": {
        *BASE,
        *("attacking", "audit", "contracts", "federation", "privacy", "recording", "scenario"),
        *("scoring", "targets", "training"),
    },
    "report": {*BASE, "contracts", "recording", "results", "scoring", "targets"},
    "testing": {
        *BASE,
        *("attacking", "contracts", "learners", "models", "privacy", "recording", "scenario"),
    },
    "fedsim_attacks": {*BASE, "contracts", "models"},
    "fedsim_defenses": {*BASE, "contracts", "privacy"},
}
"""Each room, and the rooms that it may import. `pipeline` sees all stages, `cli` all of it."""
PRIVACY: dict[str, set[str]] = {
    "contract": set(),
    "membership": set(),
    "recovery": {"contract", "membership"},
    "numerics": set(),
    "baselines": {"numerics"},
    "composition": {"contract", "numerics"},
    "mechanisms": {"baselines", "composition", "contract", "numerics"},
    "calculator": {"contract"},
    "ledger": {"composition", "mechanisms", "numerics"},
    "dp_sgd": {"baselines", "contract", "ledger", "numerics"},
}
"""Each folder and file within `fedsim/privacy`, and those that it may import."""
FREE = {"acceptance", "assessment", "deploying", "pipeline", "stages", "cli", "__main__", ""}


def modules() -> dict[str, Path]:
    """Every module of the product by its import name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(part for part in parts if part != "__init__")] = path
    return found


MODULES = modules()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement below `node`; expressions, which are most of a tree, hold none."""
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        below = getattr(node, name, [])
        for each in below if isinstance(below, list) else []:
            yield each
            yield from statements(each)


@functools.cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, also inside functions."""
    found: list[str] = []
    for node in statements(parsed(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


@functools.cache
def arrows() -> dict[str, set[str]]:
    """The modules of the product that each of them imports."""
    found: dict[str, set[str]] = {name: set() for name in MODULES}
    for name, path in MODULES.items():
        for target in imports(path):
            module = target if target in MODULES else target.rpartition(".")[0]
            if module in MODULES and module != name:
                found[name].add(module)
    return found


def room(module: str) -> str:
    """Where a module stands: a folder or file of the core, or the attacks, or the defenses."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == "fedsim" else top


def offenders(
    folder: Path, is_wrong: Callable[[str], bool], allowed: tuple[Path, ...] = ()
) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(folder.rglob("*.py"))
        if not any(path == a or a in path.parents for a in allowed)
        for name in imports(path)
        if is_wrong(name)
    ]


def importers(folder: Path, *packages: str) -> list[str]:
    """Imports of `packages`; of files none of whose lines begins like one, none is parsed."""
    line = re.compile(rf"^\s*(from \.|(from|import) ({'|'.join(packages)})\b)", re.MULTILINE)
    return [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(folder.rglob("*.py"))
        if line.search(path.read_text(encoding="utf-8"))
        for name in imports(path)
        if name.partition(".")[0] in packages
    ]


def starts(*prefixes: str) -> Callable[[str], bool]:
    return lambda name: any(name == p or name.startswith(p + ".") for p in prefixes)


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The nodes of one circle; none if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_each_test_file_has_a_name_of_its_own() -> None:
    """pytest imports a test file by its base name, and stops at the second of one name."""
    names = collections.Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_import_attacks_and_defenses_as_packages() -> None:
    """`attacks` is `tests/attacks`, or the folder beside it, as pytest is started."""
    for folder in (ROOT / "tests", ROOT / "benchmarks"):
        assert importers(folder, "attacks", "defenses") == []


def test_a_circle_is_found() -> None:
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert not circle(arrows())


def test_rooms_import_only_what_stands_below_them() -> None:
    assert not circle(ROOMS)
    known = ROOMS.keys() | FREE
    assert {room(name) for name in MODULES} == known
    wrong = [
        f"{module} imports {target}"
        for module, targets in arrows().items()
        for target in sorted(targets)
        if room(module) not in FREE
        and room(target) not in {room(module), *ROOMS[room(module)]}
        and target not in {"fedsim", "fedsim_attacks", "fedsim_defenses"}
    ]
    assert not wrong


def test_folders_of_privacy_import_only_what_stands_below_them() -> None:
    assert not circle(PRIVACY)
    within = "fedsim.privacy."
    graph = {
        module.removeprefix(within): {t.removeprefix(within) for t in targets if within in t}
        for module, targets in arrows().items()
        if module.startswith(within)
    }
    assert {module.partition(".")[0] for module in graph} == PRIVACY.keys()
    wrong = [
        f"{module} imports {target}"
        for module, targets in graph.items()
        for target in sorted(targets)
        if target.partition(".")[0] not in {(own := module.partition(".")[0]), *PRIVACY[own]}
    ]
    assert not wrong


def test_families_of_attacks_do_not_import_each_other_in_circles() -> None:
    families: dict[str, set[str]] = {}
    for module, targets in arrows().items():
        if module.startswith("fedsim_attacks."):
            own = module.split(".")[1]
            others = {t.split(".")[1] for t in targets if t.startswith("fedsim_attacks.")}
            families.setdefault(own, set()).update(others - {own})
    assert len(families) > 5
    assert not circle(families)


def test_an_attack_is_a_file_without_underscore() -> None:
    """And what has one helps attacks, and is no entry point."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    attacks = document["project"]["entry-points"]["fedsim.attacks"]
    named = {target.partition(":")[0] for target in attacks.values()}
    files = {
        name
        for name, path in MODULES.items()
        if name.startswith("fedsim_attacks.")
        and path.name != "__init__.py"
        and not path.name.startswith("_")
    }
    assert files == named


def test_every_folder_says_what_it_is_for() -> None:
    for name, path in MODULES.items():
        if path.name == "__init__.py":
            said = ast.get_docstring(parsed(path))
            assert said, f"{name} has no docstring"


def test_the_core_never_names_an_attack_or_a_defense() -> None:
    assert not offenders(CORE, starts("fedsim_attacks", "fedsim_defenses", "attacks", "defenses"))


def test_only_the_federation_imports_flower() -> None:
    assert not offenders(CORE, starts("flwr", "ray"), allowed=(CORE / "federation",))
    assert not offenders(ATTACKS, starts("flwr", "ray"))
    assert not offenders(DEFENSES, starts("flwr", "ray"))


def test_only_its_tap_imports_nvflare() -> None:
    assert not offenders(CORE, starts("nvflare"), allowed=(CORE / "nvflare_tap.py",))
    assert "fedsim.nvflare_tap" not in reached("fedsim", "fedsim.cli.main", "fedsim.pipeline")


def test_attacks_cannot_name_the_truth() -> None:
    assert not offenders(ATTACKS, starts("fedsim.types.GroundTruth", "fedsim.types.RowTruth"))


def test_the_server_side_cannot_name_a_data_set() -> None:
    """What a server holds is built from a description (`Server.described`)."""
    wrong = starts("fedsim.data", "fedsim.training.workload", "fedsim.training.source")
    for file in ("server_app.py", "tap.py", "delivery.py", "spool.py"):
        assert not offenders(CORE / "federation" / file, wrong)
        assert not [name for name in imports(CORE / "federation" / file) if wrong(name)]
    assert not [name for name in imports(CORE / "training" / "server.py") if wrong(name)]


def reached(*modules: str) -> set[str]:
    """What these modules import, directly and by way of others, and they themselves."""
    graph, found, waiting = arrows(), set(modules), [*modules]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


SERVER = ("fedsim.federation.server_app", "fedsim.federation.tap", "fedsim.training.server")
CLIENTS = {
    "fedsim.recording.truth",
    "fedsim.federation.client_app",
    "fedsim.federation.client_state",
    "fedsim.training.client",
    "fedsim.training.workload",
}


def test_the_server_side_reaches_neither_truth_nor_what_clients_keep() -> None:
    assert reached("fedsim.federation.client_app") > CLIENTS
    assert not reached(*SERVER) & CLIENTS


def test_what_attacks_are_asked_through_reaches_no_truth() -> None:
    found = reached("fedsim.attacking.question")
    assert not found & {"fedsim.recording.truth", "fedsim.attacking.jobs", "fedsim.scoring"}


def test_what_checks_a_scenario_reaches_nothing_that_shows_results() -> None:
    """`fedsim validate` would import it for as long as it checks."""
    heavy = starts("fedsim.report", "fedsim.results", "fedsim.pipeline", "fedsim.attacking")
    found = reached("fedsim.acceptance")
    assert "fedsim.federation.refusals" in found
    assert not [name for name in found if heavy(name)]


def test_no_file_of_the_server_side_names_the_folder_of_truth() -> None:
    """It is named in one place."""
    named = [
        name
        for name, path in MODULES.items()
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Constant) and node.value == "truth"
    ]
    assert "fedsim.recording.truth" in named
    assert not set(named) & reached(*SERVER)


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
        [sys.executable, "-c", STRIPPED + code, *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_attack_stage_imports_without_flower_data_and_torchs_compiler() -> None:
    """The compiler is imported for longer than all else; a model's size is counted without it."""
    run_stripped(
        "from fedsim.models.base import size_of\n"
        "from fedsim.types import ModelSpec\n"
        "shape = dict(input_shape=(3, 32, 32), num_classes=10, mean=(0.5,) * 3, std=(0.5,) * 3)\n"
        "for name in ('mlp', 'convnet'):\n"
        "    assert size_of(ModelSpec(name=name, parameters={}, **shape))\n"
        "assert not {'sympy', 'torch._dynamo'} & set(sys.modules)\n"
        "import pkgutil, importlib, fedsim_attacks\n"
        "found = list(pkgutil.walk_packages(fedsim_attacks.__path__, 'fedsim_attacks.'))\n"
        "assert len(found) > 60\n"
        "for module in found:\n"
        "    importlib.import_module(module.name)\n"
        "import fedsim, fedsim.attacking.replay\n"
        "fedsim.attack, fedsim.load_observation\n"
    )


def test_stripping_works() -> None:
    with pytest.raises(AssertionError, match="is absent here"):
        run_stripped("import fedsim.data.bundled")
    with pytest.raises(AssertionError, match="is absent here"):
        run_stripped("import flwr")


def test_every_package_is_installed() -> None:
    """setup.py finds folders with an `__init__.py`; an editable installation finds others, too."""
    assert [path for path in MODULES.values() if not (path.parent / "__init__.py").exists()] == []


def test_tests_import_their_helpers_as_pytest_finds_them() -> None:
    """`tests.` is found by `python -m pytest` alone, which puts the folder it runs in first."""
    assert importers(ROOT / "tests", "tests") == []
