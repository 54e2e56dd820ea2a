"""Provides the contract suites of attacks, for a plugin's author to inherit.

Few iterations do for what `make` returns: results have to be sound, not good.
"""

from __future__ import annotations

import math
import random
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.attacking.knowledge import hand_over, hand_over_candidates, hand_over_row
from fedsim.attacking.question import Public
from fedsim.contracts.attack import Attack, AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge, SourceRecords
from fedsim.testing.cases import (
    PluginContract,
    copy,
    example_batch,
    example_rows,
    make_observation,
    make_release,
    same,
)
from fedsim.types import (
    CANDIDATE_INPUTS,
    CANDIDATE_LABELS,
    CANDIDATE_MEMBERS,
    GroundTruth,
    Observation,
    Reconstruction,
    Tensors,
)

_SIZES = (1, 3)
_LIMIT = 10_000
"""Maximum number of steps of an attack that promises no total."""
_SEED = 5
_PUBLIC = 5

over_sizes = pytest.mark.parametrize("size", _SIZES)
over_knowledge = pytest.mark.parametrize("most", [False, True], ids=["least", "most"])


class AnyAttackContract(PluginContract[Attack[Any]]):
    """Base of suites that test what every `Attack` keeps to; a subclass has `make` and `case`."""

    batch_sizes: ClassVar[tuple[int, ...]] = _SIZES
    """Sizes among 1 and 3 that the method works on; it refuses the other by `AttackFailed`."""

    @abstractmethod
    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Returns what is seen and granted for `size` images, or for rows of `size` clients.

        With `most` everything is granted, else what the attack requires.
        """

    def check(self, reconstruction: Reconstruction, observation: Observation) -> None:
        """Asserts an answer without gradients and a finite loss; each suite adds what fits it."""
        answers = _tensors(reconstruction)
        assert answers, "nothing is recovered"
        assert not any(tensor.requires_grad for tensor in answers.values())
        assert math.isfinite(reconstruction.loss)
        assert reconstruction.iterations >= 0

    @over_knowledge
    @over_sizes
    def test_what_is_returned_is_in_shape_and_range(self, size: int, most: bool) -> None:
        observation, knowledge = self.case(size, most)
        if size not in self.batch_sizes:
            with pytest.raises(AttackFailed):
                self._solve(observation, knowledge)
        else:
            self.check(self._solve(observation, knowledge), observation)

    def test_same_seed_same_result(self) -> None:
        observation, knowledge = self.case(self.batch_sizes[-1])
        first = self._solve(observation, knowledge)
        # An attack that draws from the global stream finds it changed now.
        torch.manual_seed(12345)
        second = self._solve(observation, knowledge)
        assert same(_tensors(first), _tensors(second))
        assert first.loss == second.loss
        assert first.iterations == second.iterations

    def test_inputs_are_not_changed(self) -> None:
        observation, knowledge = self.case(self.batch_sizes[-1], most=True)
        before = copy(_tensors(observation)), copy(_tensors(knowledge))
        self._solve(observation, knowledge)
        assert same(_tensors(observation), before[0])
        assert same(_tensors(knowledge), before[1])

    def test_it_stops(self) -> None:
        attack = self.make()
        observation, knowledge = self.case(self.batch_sizes[0])
        state = attack.init(observation, knowledge, rng.generator(_SEED, "attack", 0))
        promised = attack.total()
        for _ in range(_LIMIT if promised is None else promised + 1):
            if attack.terminate(state):
                break
            before = state.iteration
            state = attack.step(state)
            assert state.iteration > before or attack.terminate(state)
        assert attack.terminate(state), "give `make` fewer iterations, or let the attack terminate"
        assert promised is None or state.iteration <= promised

    def test_global_random_streams_are_left_alone(self) -> None:
        observation, knowledge = self.case(self.batch_sizes[0])
        before = torch.get_rng_state(), random.getstate()
        self._solve(observation, knowledge)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]

    def test_an_update_of_mere_noise_is_survived(self) -> None:
        observation, knowledge = self.case(self.batch_sizes[-1])
        stream = rng.generator(_SEED, "noise")
        noise = {n: torch.randn(t.shape, generator=stream) for n, t in observation.update.items()}
        observation = replace(observation, update=noise)
        try:
            reconstruction = self._solve(observation, knowledge)
        except AttackFailed:
            return
        self.check(reconstruction, observation)

    @pytest.mark.parametrize("value", [0.0, math.nan, math.inf])
    def test_an_unusable_update_is_a_stated_failure(self, value: float) -> None:
        observation, knowledge = self.case(self.batch_sizes[0])
        update = copy(observation.update)
        for tensor in update.values():
            if value == 0:
                tensor.zero_()
        # One bad entry has to be enough, wherever the rest is sound.
        next(iter(update.values())).view(-1)[0] = value
        with pytest.raises(AttackFailed, match="zero" if value == 0 else "non-finite"):
            self._solve(replace(observation, update=update), knowledge)

    def _solve(self, observation: Observation, knowledge: Knowledge) -> Reconstruction:
        return solve(self.make(), observation, knowledge, _SEED).reconstruction


class AttackContract(AnyAttackContract):
    """Tests what `make` returns as an `Attack` on images, of 1x16x16 pixels in 10 classes."""

    model: ClassVar[str] = "lenet"
    """Name of a registered model that the method works on."""
    model_parameters: ClassVar[Mapping[str, Any]] = {}
    """Parameters of that model."""

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Returns the update of `size` images and what is granted, see `AnyAttackContract.case`."""
        observation, truth = self._observe(*example_batch(size))
        return self._hand_over(observation, truth, most, size)

    def _observe(self, images: Tensor, labels: Tensor) -> tuple[Observation, GroundTruth]:
        return make_observation(
            images, labels, model=self.model, model_parameters=self.model_parameters
        )

    def _hand_over(
        self, observation: Observation, truth: GroundTruth, most: bool, used: int
    ) -> tuple[Observation, Knowledge]:
        # An attack must not find its own truth among the public images: they follow the used ones.
        images, labels = example_batch(used + _PUBLIC)
        public = (images[used:] * 255).round().to(torch.uint8)
        grant = Grant.most() if most else self.make().required()
        return hand_over(observation, truth, grant, Public(images=public, labels=labels[used:]))

    def check(self, reconstruction: Reconstruction, observation: Observation) -> None:
        """Asserts shape, type, range and device of images, labels and features in the answer."""
        super().check(reconstruction, observation)
        count, model = observation.num_images, observation.model
        for tensor in _tensors(reconstruction).values():
            assert tensor.device == observation.device
        if reconstruction.images is not None:
            assert reconstruction.images.shape == (count, *model.input_shape)
            assert reconstruction.images.dtype == torch.float32
            assert bool(((reconstruction.images >= 0) & (reconstruction.images <= 1)).all())
        if reconstruction.labels is not None:
            assert reconstruction.labels.shape == (count,)
            assert reconstruction.labels.dtype == torch.int64
            assert bool(
                ((reconstruction.labels >= 0) & (reconstruction.labels < model.num_classes)).all()
            )
        if reconstruction.features is not None:
            assert reconstruction.features.ndim == 2
            assert len(reconstruction.features) == count
            assert bool(reconstruction.features.isfinite().all())


class CandidateAttackContract(AttackContract):
    """Tests what `make` returns as an attack asked of candidates, of which half are members."""

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Returns the update of `size` images; candidates are these, then as many others."""
        images, labels = example_batch(2 * size)
        observation, truth = self._observe(images[:size], labels[:size])
        asked = {
            CANDIDATE_INPUTS: images,
            CANDIDATE_LABELS: labels,
            CANDIDATE_MEMBERS: torch.arange(2 * size) < size,
        }
        truth = replace(truth, more={**truth.more, **asked})
        seen, known = self._hand_over(observation, truth, most, 2 * size)
        return seen, replace(known, candidates=hand_over_candidates(truth, (seen,)))

    def check(self, reconstruction: Reconstruction, observation: Observation) -> None:
        """Asserts a score of each candidate, none of them NaN, and a finite loss."""
        AnyAttackContract.check(self, reconstruction, observation)
        scores = reconstruction.membership
        assert scores is not None, "nothing is answered"
        assert scores.shape == (2 * observation.num_images,)
        assert not bool(scores.isnan().any())


class SourceAttackContract(CandidateAttackContract):
    """Tests what `make` returns as an attack asked which of 3 clients holds each record."""

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Returns the update of client 2, and 3 `size` records: record i is of client i % 3."""
        _, known = super().case(size, most)
        images, labels = example_batch(3 * size)
        seen = tuple(
            replace(self._observe(images[client::3], labels[client::3])[0], client=client)
            for client in range(3)
        )
        records = SourceRecords(
            inputs=images, labels=labels, seen=seen, participants=((0,), (1,), (2,))
        )
        return seen[-1], replace(known, candidates=None, records=records)

    def check(self, reconstruction: Reconstruction, observation: Observation) -> None:
        """Asserts finite scores `source` (records, clients), and a finite loss."""
        AnyAttackContract.check(self, reconstruction, observation)
        scores = reconstruction.more.get("source")
        assert scores is not None, "nothing is answered"
        assert scores.shape == (3 * observation.num_images, 3)
        assert bool(scores.isfinite().all())


class RowAttackContract(AnyAttackContract):
    """Tests what `make` returns as an `Attack` on rows: 20 a client, of which 13 or 14 are used."""

    learner: ClassVar[str] = "sketch"
    """Name of a registered closed-form learner whose releases the method reads."""
    learner_parameters: ClassVar[Mapping[str, Any]] = {"columns": 40}
    """Parameters of that learner; `columns` are those of the random matrix, not of the rows."""

    def case(self, size: int, most: bool = False) -> tuple[Observation, Knowledge]:
        """Returns the combined release of `size` clients, and what is granted to find one row."""
        observation, truth = make_release(
            *example_rows(20 * size),
            learner=self.learner,
            parameters=self.learner_parameters,
            defense=[{"name": "aggregate"}] if size > 1 else [],
            num_clients=size,
        )
        attack = self.make()
        grant = Grant.most() if most else attack.required()
        target = int(truth.members.nonzero()[0])
        return observation, hand_over_row(truth, target, grant, attack.asked_of_candidates)

    def check(self, reconstruction: Reconstruction, observation: Observation) -> None:
        """Asserts one row in [-1, 1], one score of membership that is no NaN, or both."""
        super().check(reconstruction, observation)
        assert reconstruction.rows is not None or reconstruction.membership is not None, (
            "nothing is recovered"
        )
        if reconstruction.rows is not None:
            assert reconstruction.rows.shape == (1, len(observation.release.names))
            assert bool((reconstruction.rows.abs() <= 1).all())
        if reconstruction.membership is not None:
            assert reconstruction.membership.shape == (1,)
            assert not bool(reconstruction.membership.isnan().any())


def _tensors(value: Observation | Knowledge | Reconstruction) -> Tensors:
    tensors: dict[str, Tensor] = {}
    for field in fields(value):
        member = getattr(value, field.name)
        if isinstance(member, Tensor):
            tensors[field.name] = member
        elif isinstance(member, Mapping):
            tensors |= {f"{field.name}.{name}": tensor for name, tensor in member.items()}
        elif isinstance(member, tuple) and all(isinstance(t, Tensor) for t in member):
            tensors |= {f"{field.name}.{index}": tensor for index, tensor in enumerate(member)}
    return tensors
