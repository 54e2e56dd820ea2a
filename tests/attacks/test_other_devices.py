"""Attacks compute where the observation lies, and mix no tensors of two devices.

Where there is a GPU, on that; everywhere, on a pretended device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from deep_victims import observe
from pretended_device import DEVICE, here_only, pretended
from slow_cases import slow_but
from test_attack_contracts import SUITES

from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.contracts.plugins import load, names
from fedsim.system.device import compute_exactly, move_tensors
from fedsim.testing.attack import AnyAttackContract
from fedsim_attacks.fast_autograd import _tape
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion

_OTHERS_ROWS = ("other_rows", "candidate")
"""What of an attacker's knowledge stays in CPU memory."""
over_suites = pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
ONE_OF_EACH = {type(suite().make()): name for name, suite in reversed(SUITES.items())}
"""The first suite of each attack."""


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yields the name of a device that this process pretends to have."""
    with pretended(monkeypatch):
        yield DEVICE


@pytest.mark.parametrize("suite", slow_but(ONE_OF_EACH.values(), SUITES))
def test_an_attack_mixes_no_devices(
    suite: type[AnyAttackContract], elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _plain_on_the_processor(monkeypatch)
    _attack_there(suite, elsewhere)


@pytest.mark.gpu
@over_suites
@pytest.mark.parametrize("pays", [_tape.PAYS_ON_GPU, 1])
def test_an_attack_on_a_gpu(
    suite: type[AnyAttackContract], pays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if, from the third call on, whatever the attack would repeat is a graph."""
    monkeypatch.setattr(_tape, "PAYS_ON_GPU", pays)
    _attack_there(suite, "cuda")


RECORDED = (
    *("TestInvertingGradients", "TestInvertingGradientsOnConvolutions", "TestDeepLeakage"),
    *("TestFactoredInversionOnConvolutions", "TestGradInversion"),
)


@pytest.mark.parametrize("suite", slow_but(["TestDeepLeakage"], RECORDED))
def test_what_becomes_a_graph_reads_no_value(
    suite: str, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor a number that lies on the processor, which a graph would keep as it was."""
    recorded = _watch_graphs(monkeypatch)
    _plain_on_the_processor(monkeypatch)
    _attack_there(SUITES[suite], elsewhere)
    assert recorded


@pytest.mark.slow
def test_stages_of_a_deep_body_become_graphs_that_read_no_value(
    elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor the width of jumps, which narrows: it has to lie where the images do."""
    recorded = _watch_graphs(monkeypatch)
    _plain_on_the_processor(monkeypatch)
    observation, _ = observe([])
    found = solve(
        FactoredInversion(iterations=12), move_tensors(observation, elsewhere), Knowledge(), 5
    )
    _lies_on(found.reconstruction, elsewhere)
    assert {function.__self__.__class__.__name__ for function in recorded} == {  # type: ignore[attr-defined]
        "PartGradient",
        "Relaxation",
    }


def test_a_process_that_attacks_computes_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process has settings of its own, and workers attack."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    compute_exactly("cpu")
    assert torch.backends.cudnn.allow_tf32
    with pretended(monkeypatch):
        _attack_there(SUITES["TestInvertingGradients"], DEVICE)
    assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.deterministic


def test_tensors_of_two_devices_are_noticed(elsewhere: str) -> None:
    """The pretence itself: what would fail on a GPU fails."""
    there = torch.ones(3).to(elsewhere)
    assert (there + 1).device.type == elsewhere
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)


def _watch_graphs(monkeypatch: pytest.MonkeyPatch) -> list[_tape.Function]:
    """Lists the functions that become graphs; each is run once where no value may be read."""
    recorded: list[_tape.Function] = []

    def record(function: _tape.Function, inputs: tuple[torch.Tensor, ...]) -> None:
        with _tape._NoReading():  # type: ignore[no-untyped-call]
            function(*(each.detach().clone() for each in inputs))
        recorded.append(function)

    monkeypatch.setattr(_tape, "_record", record)
    monkeypatch.setattr(_tape, "PAYS", 1)
    return recorded


def _attack_there(suite: type[AnyAttackContract], device: str) -> None:
    answers = 0
    for most in (False, True):
        given, known = suite().case(suite.batch_sizes[-1], most)
        observation = move_tensors(given, device)
        knowledge = move_tensors(known, device, but=_OTHERS_ROWS)
        try:
            found = solve(suite().make(), observation, knowledge, 5).reconstruction
        except AttackFailed:
            continue
        _lies_on(found, device)
        suite().check(found, observation)
        answers += 1
    assert answers, "every case was refused"


def _lies_on(found: Any, device: str) -> None:
    answers = [*vars(found).values(), *found.more.values()]
    tensors = [each for each in answers if isinstance(each, torch.Tensor)]
    assert tensors
    assert {tensor.device.type for tensor in tensors} == {device}


def _plain_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes attacks that compute in CPU memory out of the pretence, those within others too."""
    for name in names("fedsim.attacks"):
        cls = load("fedsim.attacks", name)
        if cls.on_processor:
            for step in ("init", "step", "postprocess"):
                monkeypatch.setattr(cls, step, here_only(getattr(cls, step)))
