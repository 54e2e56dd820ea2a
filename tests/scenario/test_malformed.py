"""Whatever a scenario file holds, `fedsim run` says where it is wrong and what to do, or runs.

Each case changes `BASE`; `# <-` marks the line that the message has to name.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

if TYPE_CHECKING:
    from click.testing import Result

from fedsim.cli.commands import app
from fedsim.scenario import Document, ScenarioError, expand
from fedsim.scenario.reader import parse_yaml

BASE = """\
name: base
seed: 7
device: cpu
data:
  source: {name: faces, size: 16}
  clients: 4
  partition: {name: iid}
model: {name: mlp, head: {width: 64, planted: 32}}
training:
  rounds: 3
  local: {steps: 1, batch_size: 4, lr: 0.1}
federation: {engine: local, participation: 1.0}
defenses:
  none: []
  dp:
    - {name: clip, norm: 1.0}
    - {name: gaussian_noise, multiplier: 1.1}
attacks:
  - {name: inverting_gradients, iterations: 5}
  - {name: label_inference}
observe:
  rounds: [1, last]
  clients: [0]
  batch_sizes: [1, 4]
  trials: 2
knowledge: {labels: inferred, bn: none}
"""


@dataclass(frozen=True)
class Case:
    """`old` in `BASE` becomes `new`; one of `problems` messages names `path` and says `said`."""

    old: str
    new: str
    path: str
    said: str
    problems: int = 1


TABLE = r"""
# Keys
seed: 7 => sed: 7 # <-
    sed | unknown key; did you mean 'seed'?
seed: 7 => colour: 7 # <-
    colour | unknown key; remove it (known keys: name,
  rounds: 3 =>   round: 3 # <-
    training.round | did you mean 'rounds'?
iterations: 5} => iteratons: 5} # <-
    attacks[0].iteratons | did you mean 'iterations'?
device: cpu => seed: 8 # <-
    | written twice (first in line 2)
# Plugins
{name: label_inference} => {name: label_inferense} # <-
    attacks[1].name | did you mean 'label_inference'?
{name: label_inference} => labels_inference # <-
    attacks[1] | did you mean
{name: clip, norm: 1.0} => idlg # <-
    defenses.dp[0] | named 'idlg' in defenses
{name: clip, norm: 1.0} => {norm: 1.0} # <-
    defenses.dp[0].name | missing; add `name
{name: clip, norm: 1.0} =>  # <-
    defenses.dp[0] | expected a name or {name: ...}
# Types
rounds: 3 => rounds: three # <-
    training.rounds | expected a whole number, got 'three'
rounds: 3 => rounds: "3" # <-
    training.rounds | got '3'; remove the quotes
rounds: 3 => rounds: 3.0 # <-
    training.rounds | got 3.0; write 3
name: base => name: 5 # <-
    name | expected text, got 5; put it
batch_sizes: [1, 4] => batch_sizes: 4 # <-
    observe.batch_sizes | got 4; write [4]
  none: [] =>   none: clip # <-
    defenses.none | expected a list, got 'clip'
clients: [0] => clients: al # <-
    observe.clients | a list or 'all', got 'al'; did you
# Ranges
multiplier: 1.1 => multiplier: -1
    defenses.dp[1].multiplier | expected >= 0, got -1
engine: local => engine: locl
    federation.engine | simulation
device: cpu => device: gpu # <-
    device | expected auto, cpu, cuda or
name: base => name: ../etc # <-
    name | letters, digits and _ . + - that could
  none: [] =>   ../none: [] # <-
    defenses["../none"] | expected a name of letters
# Combinations
local: {steps: 1, => algorithm: fedsgd # <-\n  local: {steps: 4,
    training.algorithm | training.local.steps is 4; use fedavg, or steps 1
local: {steps: 1, => algorithm: fedsgd # <-\n  local: {steps: 1, momentum: 0.9,
    training.algorithm | use fedavg, or momentum 0
[1, last] => [1, 9]
    observe.rounds[1] | beyond training.rounds (3)
clients: [0] => clients: [0, 4]
    observe.clients[1] | use 0 to 3
[1, last] => [1, 1]
    observe.rounds[1] | listed twice; remove one
  batch_sizes: [1, 4]\n =>
    observe.trials | add `observe.batch_sizes
{name: label_inference} => {name: inverting_gradients} # <-
    attacks[1] | give each a `label: ...` of its own
{name: label_inference} => feature_regression # <-
    attacks[1] | knowledge.public: test
    - {name: clip, norm: 1.0}\n =>
    defenses.dp[0] | put clip directly before it
    - {name: clip, norm: 1.0} =>     - aggregate
    defenses.dp | put it last
planted: 32 => planted: 65
    model.head | exceed the width (64)
# YAML
[1, last] => [1, last
    | check that every bracket
name: base => name: "base
    | check that every quote is closed
  clients: 4 => \tclients: 4 # <-
    | indent with spaces, not with tabs
seed: 7 => seed: !!python/object/apply:os.system [id] # <-
    | is not supported; remove it
seed: 7 => seed: 7\n--- # <-\nname: other
    | one per file
seed: 7 => seed: *x # <-
    | alias *x has no anchor before it
name: base => name: "a\0b" # <-
    | remove the escape
# Sweeps
seed: 7 => sweep: [1, 2] # <-
    sweep | expected a mapping such as
seed: 7 => sweep: {training.rounds: 3} # <-
    sweep["training.rounds"] | expected a list
seed: 7 => sweep:\n  training.rounds:\n    - 3\n    - 0 # <-
    training.rounds | expected >= 1, got 0
seed: 7 => sweep: {training: [{}], training.rounds: [3]} # <-
    sweep["training.rounds"] | overlaps training
seed: 7 => sweep: {'attacks[7].iterations': [3]} # <-
    attacks[7].iterations | attacks has 2 items, counted from 0; use an index up to 1
"""
"""What of `BASE` becomes what and, below it, `path | said`."""


def read(table: str) -> dict[str, Case]:
    found = re.findall(r"^(?!#)(.+?) =>(?: (.*))?\n    (\S*) ?\| (.*)", table, re.MULTILINE)
    return {
        f"{path}: {said}": Case(unescaped(old), unescaped(new), path, said)
        for old, new, path, said in found
    }


def unescaped(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


CASES = {
    **read(TABLE),
    "missing section": Case(
        "attacks:\n", "observe2:\n", "attacks", "missing; add `attacks: ...`", problems=2
    ),
    "a whole number beyond double precision": Case(
        "lr: 0.1", f"lr: {10**400}", "training.local.lr", "(401 characters)"
    ),
    "a number of 5000 digits": Case(
        "rounds: 3", f"rounds: {'9' * 5000} # <-", "", "a number of 5000 digits; shorten it"
    ),
    "statistics that nobody sends": Case(
        BASE[BASE.index("  local:") :],
        "  local: {mode: eval}\nattacks: []\nknowledge: {bn: inferred} # <-\n",
        "knowledge.bn",
        "nothing can be inferred",
    ),
    "dropout without hidden neurons": Case(
        BASE[BASE.index("model:") : BASE.index("attacks:")],
        "model: mlp\ndefenses:\n  drop: [{name: dropout, rate: 0.5}] # <-\n",
        "defenses.drop",
        "add `head: {width: ...}`",
    ),
    "nested too deep": Case("seed: 7", f"seed: {'[' * 40}{']' * 40} # <-", "", "deeper than 32"),
    "nested too deep through an alias": Case(
        "seed: 7",
        f"x: &x {'[' * 20}{']' * 20}\ny: {'[' * 20}*x{']' * 20} # <-",
        "",
        "deeper than 32",
    ),
    "too many scenarios": Case(
        "seed: 7",
        f"sweep: {{training.rounds: {list(range(3, 40))}, seed: {list(range(40))}}} # <-",
        "sweep",
        "at most 1,000 are allowed",
    ),
}


def run(path: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["run", str(path), "--out", str(path.parent / "out"), *options])


def refused(result: Result, folder: Path) -> str:
    """What was said, after checking that it was said well and that nothing was written."""
    said = result.stderr
    assert result.exit_code == 2, said
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in said
    assert not (folder / "out").exists()
    return said


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_refused_with_place_and_remedy(case: Case, tmp_path: Path) -> None:
    assert BASE.count(case.old) >= 1
    text = BASE.replace(case.old, case.new, 1)
    path = tmp_path / "x.yaml"
    path.write_text(text, encoding="utf-8")
    said = refused(run(path), tmp_path)
    lines = said.splitlines()
    assert len(lines) == case.problems, said
    lines = [line for line in lines if case.said in line]
    assert lines, said
    assert lines[0].startswith(f"{path}:"), lines[0]
    if case.path:
        assert f": {case.path}: " in lines[0], lines[0]
    marked = [n for n, line in enumerate(text.splitlines(), 1) if "# <-" in line]
    for number in marked:
        assert lines[0].startswith(f"{path}:{number}: "), lines[0]


def test_base_is_right(tmp_path: Path) -> None:
    """Else every case above would pass for a wrong reason."""
    path = tmp_path / "x.yaml"
    path.write_text(BASE, encoding="utf-8")
    result = CliRunner().invoke(app, ["validate", str(path)])
    assert result.exit_code == 0, result.stderr


def test_every_problem_is_listed_in_order_of_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    text = BASE.replace("seed: 7", "seed: -1").replace("rounds: 3", "rounds: 0")
    text = text.replace("norm: 1.0", "norm: -1").replace("iterations: 5", "iteratons: 5")
    path.write_text(text.replace("trials: 2", "trials: 0"), encoding="utf-8")
    lines = refused(run(path), tmp_path).splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "seed",
        "training.rounds",
        "defenses.dp[0].norm",
        "attacks[0].iteratons",
        "observe.trials",
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "empty; a scenario needs at least name, data, model and attacks"),
        (b"just text\n", "expected a mapping that starts with `name: ...`, got 'just text'"),
        (b"name: base\nseed: \xff\n", "x.yaml:2: not UTF-8 text"),
        (b"\x00\x01\x02", "U+0000 is not allowed"),
        (b"name: a\n" * 200_000, "and at most 1.0 MiB are read"),
    ],
)
def test_files_that_are_no_scenario(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    assert said in refused(run(path), tmp_path)


def test_aliases_cannot_grow_without_bound(tmp_path: Path) -> None:
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    path = tmp_path / "x.yaml"
    path.write_text("\n".join(["a0: &a0 [1, 2, 3]", *levels]), encoding="utf-8")
    assert "more than 50,000 values" in refused(run(path), tmp_path)


@pytest.mark.parametrize(("inner", "outer"), [(1, 30), (16, 15), (30, 1)])
def test_an_alias_may_nest_as_deep_as_what_it_stands_for(inner: int, outer: int) -> None:
    """The limit is 32 levels: the document's, those of the lists, and that of the number."""

    value = f"{'[' * (inner - 1)}1{']' * (inner - 1)}"
    before, after = "[" * outer, "]" * outer
    parse_yaml(f"x: &x {value}\ny: {before}*x{after}", "x.yaml")
    with pytest.raises(ScenarioError, match=r"x\.yaml:2: nested deeper than 32 levels"):
        parse_yaml(f"x: &x {value}\ny: [{before}*x{after}]", "x.yaml")


def test_many_problems_are_told_in_time(tmp_path: Path) -> None:
    """Each list below took minutes when every problem was compared with every other."""
    many = ", ".join(["x"] * 3_000)
    attacks = f"attacks: [{many}]\nobserve:\n  rounds: [{many}]\n  batch_sizes: [{many}]\n"
    path = tmp_path / "x.yaml"
    path.write_text(BASE[: BASE.index("attacks:")] + attacks, encoding="utf-8")
    lines = refused(run(path), tmp_path).splitlines()
    assert len(lines) == 51 and lines[-1] == "and 8,950 more problems; correct these first"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.rounds=0", "--set training.rounds=0: training.rounds: expected >= 1, got 0"),
        ("attacks[9].iterations=1", "attacks has 2 items, counted from 0; use an index up to 1"),
        ("attacks.iterations=1", "attacks is a list; name an item by its index, such as"),
        ("training[0]=1", "training is a mapping, not a list"),
        ("model=nope", "--set model=nope: model: no plugin named 'nope' in models"),
        ("rounds", "--set rounds: expected key=value, such as training.rounds=10"),
        (f"a{'.a' * 500}=3", "' is no key path; expected one such as"),
        ("seed=[1", "--set seed=[1: not valid YAML"),
    ],
)
def test_overrides_are_refused_with_their_text(override: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(BASE, encoding="utf-8")
    message = refused(run(path, "--set", override), tmp_path)
    assert said in message
    assert message.startswith("--set ")


def test_an_override_below_a_swept_key_is_not_lost_in_silence(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(BASE + "sweep: {model: [mlp, lenet]}\n", encoding="utf-8")
    message = refused(run(path, "--set", "model.hidden=[3]"), tmp_path)
    assert "model.hidden: model is swept, so this would be lost; set sweep.model instead" in message


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_no_value_anywhere_leads_to_another_error(data: st.DataObject) -> None:
    """Any value in any place: it is a scenario, or it is refused with a message."""
    document = parse_yaml(BASE, "x.yaml")
    paths = sorted((path for path in document.marks if path), key=str)
    path = data.draw(st.sampled_from(paths))
    value = data.draw(VALUES)
    whole = dict(document.value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with contextlib.suppress(ScenarioError):
        expand(Document(whole, document.marks))


INDICATORS = " \n\t:-[]{},&*!|>'\"%@`#?<~.0aé\x85\ufeff\0"


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_no_damage_to_a_file_leads_to_another_error(data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(BASE)))
    end = data.draw(st.integers(start, min(len(BASE), start + 40)))
    junk = data.draw(st.text(st.sampled_from(INDICATORS), max_size=6))
    with contextlib.suppress(ScenarioError):
        expand(parse_yaml(BASE[:start] + junk + BASE[end:], "x.yaml"))
