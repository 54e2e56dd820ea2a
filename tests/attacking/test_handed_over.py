"""What attacks are handed of an update that a defense changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fedsim.attacking.jobs import hide_defenses
from fedsim.attacking.knowledge import remove_truncated
from fedsim.models.base import normalize
from fedsim.scenario import build_stack
from fedsim.scenario.model import PluginRef
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch, make_kernel_release, stream
from fedsim_attacks.gradient_matching._matching import Matching

CUT = 0.01
PERCENTILE = {"name": "percentile_privacy", "percentile": 0, "gamma": CUT}
CLIP = {"name": "clip", "norm": 0.05}


@pytest.mark.parametrize("behind", [[], [CLIP]])
def test_truncated_entries_reach_attacks_as_zeros(behind: list[Mapping[str, Any]]) -> None:
    """A clip behind the filter scales truncated entries, too: they are below its bound then."""
    batch = example_batch(1)
    plain, _ = make_observation(*batch, model="mlp")
    seen, _ = make_observation(*batch, model="mlp", defense=[PERCENTILE, *behind])
    shown = remove_truncated(seen)
    assert shown.effect.truncated is None and shown.effect.removed == "others"
    for name, own in plain.update.items():
        cut = own.abs() >= CUT
        assert not shown.update[name][cut].any()
        assert torch.equal(shown.update[name][~cut], seen.update[name][~cut])


def test_a_scaled_update_of_zeros_stays() -> None:
    """Of nothing, nothing is the largest entry."""
    seen, _ = make_observation(*example_batch(1), model="mlp", defense=[PERCENTILE, CLIP])
    for value in seen.update.values():
        value.zero_()
    assert not any(bool(t.any()) for t in remove_truncated(seen).update.values())


def test_truncation_is_simulated_client_by_client() -> None:
    """The server's mean is of truncated updates, and no truncated mean."""
    images, labels = torch.rand(4, 1, 16, 16, generator=stream(3)), torch.arange(4)
    defense = [{"name": "percentile_privacy", "gamma": CUT}, {"name": "aggregate"}]
    seen, _ = make_observation(images, labels, model="mlp", defense=defense, num_clients=4)
    matching = Matching(seen, dtype=torch.float64, effects="simulated")
    again = matching.update(normalize(images, seen.model).double(), labels, create_graph=False)
    for name, value in zip(matching.names, again, strict=True):
        there = seen.update[name] != 0
        off = (value - seen.update[name])[there].norm()
        # Entries that some clients removed are in the mean of the others.
        assert off < 0.02 * seen.update[name].norm()


@pytest.mark.parametrize("clip_first", [True, False])
def test_a_clip_is_simulated_before_or_behind_the_truncation(clip_first: bool) -> None:
    """At the true images nothing is left to match, whichever acts first."""
    cut = {**PERCENTILE, "gamma": 1e-3}
    defense = [CLIP, cut] if clip_first else [cut, CLIP]
    images, labels = example_batch(2)
    seen, _ = make_observation(images, labels, model="mlp", defense=defense)
    matching = Matching(seen, dtype=torch.float64, effects="simulated")
    again = matching.update(normalize(images, seen.model).double(), labels, create_graph=False)
    for name, value in zip(matching.names, again, strict=True):
        torch.testing.assert_close(value.float(), seen.update[name], rtol=1e-4, atol=1e-7)
    largest = max(float(value.abs().max()) for value in seen.update.values())
    assert largest == pytest.approx(1e-3) if clip_first else largest < 1e-3


def test_blind_attacks_are_not_told_of_noise_or_dropout() -> None:
    laplace = {"name": "truncated_laplace", "beta": 0.01, "epsilon": 0.7, "delta": 4e-4}
    rows = (255 * torch.rand(6, 1, 4, 4, generator=stream(5))).to(torch.uint8)
    labels, members = torch.arange(6) % 2, torch.ones(6, dtype=torch.bool)
    release, _ = make_kernel_release(rows, labels, members, defense=[laplace])
    assert release.release.statistics and not hide_defenses(release).release.statistics
    seen, _ = make_observation(
        *example_batch(1),
        model="mlp",
        model_parameters={"head": {"width": 64}},
        defense=[{"name": "dropout", "rate": 0.5}, CLIP],
    )
    hidden = hide_defenses(seen)
    assert (hidden.training.dropout, hidden.defense, hidden.effect.scaled) == (0.0, (), False)
    assert seen.training.dropout == 0.5 and seen.effect.scaled  # what was recorded stays


@pytest.mark.parametrize("name", ["percentile_privacy", "svt_privacy"])
def test_steps_that_no_float_holds_are_refused(name: str) -> None:
    with pytest.raises(ValidationError, match="steps"):
        build_stack([PluginRef(name=name, parameters={"steps": 10**400})])
