"""Defenses that change the batch of a step: what they make of images and labels, exactly."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import chain
from fedsim.contracts.views import apply_view
from fedsim.models.base import denormalize, normalize
from fedsim.models.local import gradient, loss_function
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch, example_spec, example_training, same, stream
from fedsim.types import Augmentation, Effect, ImageChange, LocalTraining, Mixture, Observation
from fedsim_defenses import mixup
from fedsim_defenses.ats import ATS
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.instahide import InstaHide
from fedsim_defenses.mixup import MixUp, mix
from fedsim_defenses.oasis import Oasis

SPEC = example_spec((1, 4, 6), 3)
TRAINING = example_training()


def observe(*defense: dict[str, Any], images: int = 3) -> Observation:
    return make_observation(*example_batch(images, (1, 8, 8)), model="mlp", defense=defense)[0]


def plain(images: Tensor, labels: Tensor, like: Observation) -> dict[str, Tensor]:
    """The gradient of the mean loss at pixels `images`."""
    training = LocalTraining(algorithm="fedsgd", steps=1, batch_size=len(images), lr=0.1)
    loss = loss_function(rebuild(like), {}, training)
    return dict(gradient(loss, like.parameters, normalize(images, like.model), labels))


def test_a_single_image_is_mixed_with_itself() -> None:
    images = torch.rand(1, 1, 4, 6, generator=stream())
    mixed, labels = MixUp().change(images, torch.eye(3)[:1], SPEC, stream())
    torch.testing.assert_close((mixed, labels), (images, torch.eye(3)[:1]))


def test_a_share_of_one_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixing with weight 0 for the partner, soft labels included, is no defense at all."""
    monkeypatch.setattr(mixup, "uniform", lambda shape, rng: torch.ones(shape))
    bare, mixed = observe(), observe({"name": "mixup"})
    assert same(mixed.update, bare.update)


def test_images_and_labels_have_the_same_mean() -> None:
    # An image that is its own one-hot label: both have to come out alike.
    both = torch.eye(4)
    for defense in (MixUp(alpha=0.4), InstaHide(images=3)):
        images, labels = defense.change(both[:, None, None], both, SPEC, stream())
        torch.testing.assert_close(images.abs()[:, 0, 0], labels)
        torch.testing.assert_close(labels.sum(1), torch.ones(4))
    weights, partners = torch.tensor([[0.75, 0.25]]), torch.tensor([[2, 0]])
    assert mix(both, weights, partners).tolist() == [[0.25, 0, 0.75, 0]]


def test_instahide_flips_signs_and_bounds_coefficients() -> None:
    ones, labels = torch.ones(200, 1, 4, 6), torch.eye(3).repeat(67, 1)[:200]
    encoded, _ = InstaHide().change(ones, labels, SPEC, stream())
    # A mean of ones is one, so that nothing is left but the signs, half of them negative.
    torch.testing.assert_close(encoded.abs(), ones)
    assert abs(float(encoded.mean())) < 5 / 4800**0.5
    _, mixed = InstaHide(images=2, largest=0.65).change(
        torch.eye(200), torch.eye(200), SPEC, stream()
    )
    assert 0.5 < float(mixed[mixed < 0.99].max()) <= 0.65
    with pytest.raises(pydantic.ValidationError, match="largest"):
        InstaHide(images=2, largest=0.5)


def test_oasis_takes_the_mean_over_all_copies() -> None:
    images, labels = example_batch(3, (1, 8, 8))
    seen = observe({"name": "oasis", "shears": [], "flips": True})
    copies = [images, *(torch.rot90(images, turns, (2, 3)) for turns in (1, 2, 3))]
    copies += [images.flip(3), images.flip(2)]
    each = [plain(copy, labels, seen) for copy in copies]
    for name, update in seen.update.items():
        torch.testing.assert_close(
            update, torch.stack([part[name] for part in each]).mean(0), atol=1e-6, rtol=1e-4
        )


def test_a_change_that_dp_sgd_replaces_is_not_declared() -> None:
    dp_sgd = DPSGD(norm=1.0, noise_multiplier=1.0)
    assert chain(MixUp(), dp_sgd).effect(TRAINING) == chain(dp_sgd).effect(TRAINING)
    assert chain(dp_sgd, ATS()).effect(TRAINING).batch == ATS().effect(TRAINING).batch


def test_ats_shows_one_of_its_views() -> None:
    images = torch.rand(40, 1, 8, 8, generator=stream())
    defense = ATS()
    (declared,) = defense.effect(TRAINING).batch
    assert isinstance(declared, Augmentation)
    views = torch.stack([apply_view(images, view, SPEC) for view in declared.views])
    changed, _ = defense.change(images, torch.eye(3)[[0] * 40], SPEC, stream())
    which = (views - changed).abs().amax((2, 3, 4)).argmin(0)
    chosen = views[which, torch.arange(40)]
    torch.testing.assert_close(changed, chosen)
    assert len(set(which.tolist())) > 8


def test_views_move_whole_pixels_and_keep_the_mean_of_contrast() -> None:
    pixels = torch.rand(2, 1, 4, 6, generator=stream())

    def view(name: Any, by: float = 0.0) -> Tensor:
        return apply_view(pixels, [ImageChange(name=name, by=by)], SPEC)

    moved = view("translate_x", 2 / 6)
    torch.testing.assert_close(moved[..., :4], pixels[..., 2:])
    assert not moved[..., 4:].any()
    torch.testing.assert_close(view("translate_y", -0.25)[:, :, 1:], pixels[:, :, :-1])
    torch.testing.assert_close(view("rotate", 180), pixels.flip(2, 3))
    sheared = view("shear", 2.0)
    torch.testing.assert_close(sheared[:, :, 2, :-1], pixels[:, :, 2, 1:])
    torch.testing.assert_close(sheared[:, :, 1, 1:], pixels[:, :, 1, :-1])
    flat = view("contrast", 0.5)
    torch.testing.assert_close(flat.mean((2, 3)), pixels.mean((2, 3)))
    torch.testing.assert_close(flat.std((2, 3)), pixels.std((2, 3)) / 2)


def test_black_comes_from_outside_however_images_are_normalized() -> None:
    seen = observe()
    images = normalize(torch.rand(1, 1, 8, 8, generator=stream()), seen.model)
    moved = apply_view(images, [ImageChange(name="translate_y", by=0.5)], seen.model)
    torch.testing.assert_close(denormalize(moved, seen.model)[:, :, 4:], torch.zeros(1, 1, 4, 8))


def test_the_last_defense_of_a_stack_changes_the_images_first() -> None:
    effect = chain(MixUp(), Oasis()).effect(TRAINING)
    assert [type(change) for change in effect.batch] == [Augmentation, Mixture]
    assert not effect.exact
    images, labels = example_batch(2, (1, 8, 8))
    both = observe({"name": "mixup"}, {"name": "oasis"}, images=2)
    assert not same(both.update, plain(images, labels, both))


def test_effects_are_read_back_from_what_is_written() -> None:
    whole = chain(InstaHide(), ATS(), Oasis()).effect(TRAINING)
    adapter = TypeAdapter(Effect)
    assert adapter.validate_json(adapter.dump_json(whole)) == whole


def test_noise_on_clipped_inputs_proves_nothing_of_images_in_several() -> None:
    noised = DPSGD(norm=1.0, noise_multiplier=1.0).guarantee(Guarantee(), TRAINING)
    for defense in (MixUp(), InstaHide(), Oasis()):
        assert defense.guarantee(noised, TRAINING).mechanism is None
    # Each image has one view of its own, and what is proven of that holds of the image.
    assert ATS().guarantee(noised, TRAINING).mechanism == noised.mechanism
