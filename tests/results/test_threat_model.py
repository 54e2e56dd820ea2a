"""A row's threat model: what the row says was granted, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from answer_rows import trial

from fedsim.contracts.grant import Grant, Meaning
from fedsim.report.threat import HONEST, ThreatModel, threat_model_of
from fedsim.results.lines import ResultRow
from fedsim_attacks.gradient_matching.inverting_gradients import InvertingGradients


def of(**changes: Any) -> ThreatModel:
    """The threat model of a row with these changes."""
    row = trial(12.0, defense="none") | {"knowledge": {}} | changes
    return threat_model_of(ResultRow.model_validate(row))


@pytest.mark.parametrize("knowledge", [{}, Grant().model_dump(), {"labels": "inferred"}])
def test_default_is_the_honest_server(knowledge: Mapping[str, str]) -> None:
    model = of(knowledge=knowledge)
    assert model == HONEST
    assert (model.is_default, model.title) == (True, "honest server")


WITHIN = ["labels=none", "bn=running"]
BEYOND = ["labels=known", "bn=inferred", "bn=exact", "features=known", "rows=others", "public=test"]
UNKNOWN = ["timing=power", "timing=none"]


@pytest.mark.parametrize("entry", [*WITHIN, *BEYOND, *UNKNOWN])
def test_what_an_honest_server_has_not_is_another_threat_model(entry: str) -> None:
    name, _, value = entry.partition("=")
    model = of(knowledge={name: value})
    assert not model.is_default
    if entry in WITHIN:
        assert (model.beyond, model.within) == ((), (entry,))
        assert model.title == f"honest server, with {entry}"
    else:
        assert model.beyond == (entry,)
        assert model.title == f"honest server, granted {entry}"


def test_every_value_of_every_grant_is_told_apart() -> None:
    found = [
        of(knowledge={name: value}) for name, values in Grant.values().items() for value in values
    ]
    defaults = len(Grant.model_fields)  # each field has one value that is the default
    assert len(set(found)) == len(found) - defaults + 1


def test_a_new_field_of_grants_is_beyond_from_its_second_value() -> None:
    class Wider(Grant):
        clock: Annotated[
            Literal["none", "rough", "exact"], Meaning("images", "", "a clock", "an exact clock")
        ] = "none"

        @classmethod
        def values(cls) -> dict[str, tuple[str, ...]]:
            return {**Grant.values(), "clock": ("none", "rough", "exact")}

        @classmethod
        def meanings(cls, of: str | None = None) -> dict[str, Meaning]:
            return {**Grant.meanings(of), "clock": cls.model_fields["clock"].metadata[0]}

    assert Wider().beyond_honest() == []
    assert Wider(clock="rough").beyond_honest() == ["clock=rough"]


def test_models_sort_by_how_much_they_take() -> None:
    models = [
        of(server="modified"),
        of(server="planted", knowledge={"labels": "known"}),
        of(server="planted"),
        of(knowledge={"public": "test"}),
        of(knowledge={"labels": "none"}),
        of(),
    ]
    assert sorted(models) == models[::-1]


def test_what_an_attack_brought_is_another_threat_model() -> None:
    model = of(attack={"name": "a", "label": "a", "brought": ["public=photos"]})
    assert model.beyond == ("own public=photos",)


@pytest.mark.parametrize(
    ("parameters", "server"),
    [({"head": {"planted": 64}}, "planted"), ({"imprint": {"bins": 8}}, "modified")],
)
def test_no_row_is_honest_by_its_word_alone(parameters: Mapping[str, Any], server: str) -> None:
    assert of(model={"name": "lenet", "parameters": parameters}, server="honest").server == server
    assert of(model={"name": "lenet", "parameters": {}}, server=server).server == server


def test_values_that_read_alike_are_told_apart() -> None:
    assert of(knowledge={"clock": True}).beyond == ("clock=True",)
    assert of(knowledge={"clock": True}) != of(knowledge={"clock": "True"})
    assert of(knowledge={"a": "1, b=2"}) != of(knowledge={"a": "1", "b": "2"})
    assert of(knowledge={"own public": "x"}) != of(
        attack={"name": "a", "label": "a", "brought": ["public=x"]}
    )


def test_files_and_folders_that_parameters_name_are_brought(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Collecting(InvertingGradients):
        folder: str = ""
        network: Path | None = None
        ensemble: tuple[str, ...] = ()
        options: dict[str, Any] | None = None
        mode: Literal["photos", "none"] = "photos"

    (tmp_path / "photos").mkdir()
    for name in ("a.pt", "b.pt", "c.pt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for none in (Collecting(), InvertingGradients(), Collecting(folder="x" * 5000)):
        assert none.brings() == ()
    assert Collecting(folder="later.pt").brings() == (), "there is no such file yet"
    assert Collecting(folder="photos").brings() == ("folder=photos",)
    attack = Collecting(
        folder=str(tmp_path / "photos"),
        network=tmp_path / "a.pt",
        ensemble=(str(tmp_path / "b.pt"), "none"),
        options={"prior": {"file": str(tmp_path / "c.pt")}},
    )
    assert attack.brings() == ("folder=photos", "network=a.pt", "ensemble=b.pt", "options=c.pt")
