"""Every scenario that ships is valid, and so is its resolved form."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedsim.scenario import dump, expand, load, open_document

FILES = sorted((Path(__file__).parent.parent / "scenarios").rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_valid(path: Path, tmp_path: Path) -> None:
    for variant in expand(open_document(path)):
        resolved = tmp_path / "resolved.yaml"
        resolved.write_text(dump(variant.scenario))
        assert load(resolved) == variant.scenario
        assert [] in variant.scenario.defenses.values(), "no positive control"


def test_the_quickstart_shows_what_it_promises() -> None:
    quickstart = load(Path(__file__).parent.parent / "scenarios" / "quickstart.yaml")
    assert len(quickstart.defenses) >= 4 and len(quickstart.attacks) >= 2
    assert quickstart.data.source.name == "faces" and quickstart.observe.batch_sizes == [1, 4]
