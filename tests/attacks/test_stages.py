"""Bodies in stages, peeled and descended together: zero at the truth, and led there."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fedsim import rng
from fedsim.adversary import solve
from fedsim.data.bundled import Photos
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.types import GroundTruth, Knowledge, LocalTraining, Observation
from fedsim_attacks.body_gradient import (
    Body,
    BodyGradient,
    PartGradient,
    PartUpdate,
    noise_energy,
    signals,
)
from fedsim_attacks.contrast import exposed, trusted
from fedsim_attacks.factored_inversion import FactoredInversion
from fedsim_attacks.head_gradient import HeadGradient
from fedsim_attacks.peeling import Peeling
from fedsim_attacks.relaxation import Relaxation
from fedsim_attacks.stages import Stage, StagedBody, stages

HEAD = {"width": 640, "planted": 512, "planted_std": 0.3, "planted_gain": 0.1}
RESNET: dict[str, Any] = {"width": 16, "stem": "imagenet", "norm": "group", "head": HEAD}

VICTIMS = pytest.mark.parametrize(
    ("defense", "mode", "norm"),
    [
        ([], "train", "group"),
        ([], "train", "batch"),
        ([], "eval", "batch"),
        ([{"name": "clip", "norm": 1e-3}], "train", "group"),
        ([{"name": "gradient_pruning", "ratio": 0.9}], "train", "group"),
    ],
    ids=["none", "batch norm", "batch norm, eval", "clip", "pruning"],
)


def photos(count: int) -> tuple[Tensor, Tensor]:
    data = Photos().load()
    chosen = (37 * torch.arange(count) + 5) % 64
    return data.test_images[chosen].float() / 255, data.test_labels[chosen]


def observe(
    defense: list[dict[str, Any]],
    count: int = 2,
    mode: Literal["train", "eval"] = "train",
    model: str = "resnet18",
    steps: int = 1,
    **parameters: Any,
) -> tuple[Observation, GroundTruth]:
    training = LocalTraining(
        algorithm="fedsgd" if steps == 1 else "fedavg",
        steps=steps,
        batch_size=count,
        lr=0.001,
        mode=mode,
        batches="same",
    )
    own = RESNET if model == "resnet18" else {"width": 8, "head": HEAD}
    return make_observation(
        *photos(count),
        model=model,
        model_parameters={**own, **parameters},
        defense=defense,
        training=training,
    )


def of(observation: Observation, width: float = 0.0) -> tuple[Body, list[Stage]]:
    body = Body(observation, width)
    return body, stages(body, observation.num_images, rng.generator(0, "stages"))


def maps(cut: list[Stage], observation: Observation, truth: GroundTruth) -> list[Tensor]:
    """What goes into each stage of the true images, and what comes out of the last."""
    found = [normalize(truth.images, observation.model)]
    with torch.no_grad():
        for stage in cut:
            found.append(stage.part.function(found[-1]))
    return found


def test_stages_are_the_body() -> None:
    observation, truth = observe([])
    _, cut = of(observation)
    assert len(cut) > 4
    names = [name for stage in cut for name, _ in stage.part.parameters]
    assert names == [name for name in observation.parameters if name.startswith("body.")]
    found = maps(cut, observation, truth)
    assert truth.features is not None
    torch.testing.assert_close(found[-1].flatten(1), truth.features, rtol=1e-4, atol=1e-4)
    assert [stage.shape for stage in cut] == [each.shape for each in found[:-1]]
    assert [stage.positive for stage in cut] == [False] + [True] * (len(cut) - 1)


@pytest.mark.parametrize(
    ("model", "count", "parameters"),
    [
        ("convnet", 64, {}),
        ("resnet18", 2, {"stem": "imagenet", "head": {**HEAD, "unit_features": True}}),
    ],
    ids=["more unknown than known", "features made of what comes out"],
)
def test_what_is_not_determined_is_not_cut(
    model: str, count: int, parameters: dict[str, Any]
) -> None:
    observation, truth = observe([], count, model=model, **parameters)
    _, cut = of(observation)
    assert len(cut) == 1
    assert truth.features is not None
    found = maps(cut, observation, truth)[-1]
    torch.testing.assert_close(found.flatten(1), truth.features, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [0.0, 1.0])
@VICTIMS
def test_every_stage_is_zero_at_the_truth(
    defense: list[dict[str, Any]], mode: Literal["train", "eval"], norm: str, width: float
) -> None:
    """Outputs, error signals and gradients fit, and each stage poses the one before."""
    # Of two images on maps of one pixel, batch norm in train mode leaves signs.
    observation, truth = observe(defense, 4, mode, norm=norm)
    body, cut = of(observation, width)
    found = maps(cut, observation, truth)
    assert truth.features is not None
    known = signals(observation, truth.features)
    outputs, errors = truth.features, known.errors
    for i in reversed(range(len(cut))):
        free = i < len(cut) - 1
        gradient = PartGradient(
            observation,
            body,
            cut[i].part,
            # Known up to a factor, which the inputs tell.
            outputs * 3 if free else outputs,
            errors / 3 if free else errors,
            scale=known.scale,
            weight=1.0,
            calls=1,
            free=free,
        )
        right = gradient(found[i])
        assert float(right.update) < 1e-6
        assert float(right.features) < 1e-6
        wrong = gradient(found[i].flip(0))
        assert float(wrong.update) + float(wrong.features) > 1e-3
        outputs, errors = gradient.pulled_back(found[i])


def test_peeling_finds_what_went_into_every_stage() -> None:
    """Up to a factor for each image behind norm layers; from inputs drawn at random."""
    observation, truth = observe([])
    _, cut = of(observation)
    true = maps(cut, observation, truth)
    assert truth.features is not None
    known, stream = signals(observation, truth.features), rng.generator(0, "peeling")
    staged = StagedBody(observation, 2, stream, width=1.0)
    peeling = Peeling(observation, staged, truth.features, known, stream, steps=400)
    losses = [float(peeling.step()) for _ in range(400)]
    assert peeling.unexplained <= min(losses[-20:])
    assert peeling.unexplained < 0.05
    assert len(peeling.maps) == len(cut) - 1
    for found, wanted in zip(peeling.maps, true[1:], strict=False):
        one, other = found.flatten(1), wanted.flatten(1)
        along = (one * other).sum(1) / one.norm(dim=1) / other.norm(dim=1)
        assert float(along.min()) > 0.97


def test_contrast_is_seen_where_the_first_layer_has_a_bias_or_no_norm_layer() -> None:
    def seen(norm: str, mode: Literal["train", "eval"], **model: Any) -> bool:
        observation, _ = observe([], norm=norm, mode=mode, **model)
        stream = rng.generator(0, "stages")
        return not StagedBody(observation, 2, stream, width=0.0).without_contrast

    assert not seen("group", "train")
    assert seen("batch", "eval")
    assert seen("batch", "train")
    assert seen("group", "train", model="convnet")


def test_exposed_images_are_those_of_any_contrast() -> None:
    low, high = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    images = torch.rand(4, 3, 32, 32, generator=rng.generator(0, "exposed")) * 4.5 - 2
    found = exposed(images, (low, high))
    torch.testing.assert_close(found, images, rtol=0.02, atol=0)
    factors = torch.tensor([0.3, 0.7, 1.0, 2.0]).view(4, 1, 1, 1)
    torch.testing.assert_close(exposed(factors * images, (low, high)), found)
    assert torch.equal(exposed(torch.zeros(1, 3, 4, 4), (low, high)), torch.zeros(1, 3, 4, 4))


def test_the_less_an_image_is_told_the_less_contrast_it_gets() -> None:
    assert trusted(0.0) == 1
    assert 1 > trusted(0.3) > trusted(0.6) > trusted(0.99) > 0
    assert trusted(1.0) == trusted(1.2) == 0  # an estimate may exceed all
    images = torch.rand(2, 3, 8, 8, generator=rng.generator(0, "exposed")) - 0.5
    box = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    torch.testing.assert_close(exposed(images, box, 0.4), 0.4 * exposed(images, box))


@pytest.mark.parametrize("std", [0.0, 1e-3, 0.1])
def test_the_noise_in_a_part_is_found(std: float) -> None:
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    clear, _ = observe([])
    observation, _ = observe(defense)
    seen = HeadGradient.of(observation)
    name = "body.conv1.weight"
    noise = observation.update[name] - clear.update[name]
    share = float(noise.square().sum() / observation.update[name].square().sum())
    assert noise_energy(observation, seen, [name]) == pytest.approx(share, rel=0.1)
    whole = [each for each in observation.update if each.startswith("body.")]
    assert noise_energy(observation, seen, whole) == pytest.approx(noise_energy(observation, seen))


def relaxation(
    observation: Observation,
    truth: GroundTruth,
    images: Tensor,
    maps: list[Tensor],
    steps: int = 1,
    width: float = 0.0,
    noise: float = 0.0,
    rough: bool = False,
) -> tuple[Relaxation, list[Tensor]]:
    """And the true images and maps."""
    assert truth.features is not None
    stream = rng.generator(0, "stages")
    staged = StagedBody(observation, observation.num_images, stream, width=width)
    known = signals(observation, truth.features)
    made = Relaxation(
        observation,
        staged,
        truth.features,
        known,
        images,
        maps,
        noise=noise,
        rough=rough,
        steps=steps,
    )
    return made, staged.maps(normalize(truth.images, observation.model))


@VICTIMS
def test_relaxed_stages_are_zero_at_the_truth(
    defense: list[dict[str, Any]], mode: Literal["train", "eval"], norm: str
) -> None:
    observation, truth = observe(defense, 4, mode, norm=norm)
    images = normalize(truth.images, observation.model)
    right, true = relaxation(observation, truth, images, [])
    misfit = right(images)
    assert float(misfit.update) < 1e-6
    assert float(misfit.features) < 1e-6
    wrong, _ = relaxation(observation, truth, images, [each.flip(0) for each in true[1:-1]])
    assert float(wrong(images).update) > 1e-2


def test_maps_of_images_leave_the_misfit_of_the_whole_body() -> None:
    """Error signals run back through all stages, and so does the slope."""
    observation, truth = observe([])
    assert truth.features is not None
    known = signals(observation, truth.features)
    images = torch.randn(2, 3, 32, 32, generator=rng.generator(0, "images"))
    whole = BodyGradient(observation, truth.features, known, weight=1.0, width=0.0, calls=1)
    relaxed, _ = relaxation(observation, truth, images, [])
    misfit, expected = relaxed(images), whole(images)
    torch.testing.assert_close(misfit.update, expected.update)
    torch.testing.assert_close(misfit.features, expected.features)


def test_the_slope_in_images_is_that_of_the_first_stage_alone() -> None:
    """With the maps and error signals behind it held where they are."""
    observation, truth = observe([])
    assert truth.features is not None
    images = normalize(truth.images, observation.model)
    relaxed, true = relaxation(observation, truth, images, [])
    body, cut = of(observation)
    known = signals(observation, truth.features)
    energies = [PartUpdate(observation, body, each.part, known.scale).energy for each in cut]
    share = float(energies[0] / torch.stack(energies).sum())

    outputs, errors = truth.features, known.errors
    for i in reversed(range(len(cut))):
        first = PartGradient(
            observation,
            body,
            cut[i].part,
            outputs,
            errors,
            scale=known.scale,
            weight=0.03
            / share,  # what a distance costs at first, of the energy of all of the update
            calls=1,
        )
        outputs, errors = first.pulled_back(true[i])
    off = images + 0.1 * torch.randn(images.shape, generator=rng.generator(0, "images"))
    torch.testing.assert_close(relaxed(off).slope, share * first(off).slope, rtol=1e-3, atol=1e-6)


def test_maps_are_taken_up_to_a_factor_of_each_image() -> None:
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    _, true = relaxation(observation, truth, images, [])
    factors = torch.tensor([0.3, 4.0]).view(2, 1, 1, 1)
    relaxed, _ = relaxation(observation, truth, images, [factors * each for each in true[1:-1]])
    misfit = relaxed(images)
    assert float(misfit.update) < 1e-6
    assert float(misfit.features) < 1e-6


def test_steps_of_known_maps_are_as_long_as_they_are_wrong() -> None:
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    _, true = relaxation(observation, truth, images, [])
    noise = torch.randn(images.shape, generator=rng.generator(0, "noise"))
    near, far = (
        relaxation(observation, truth, images + size * noise, true[1:-1])[0].step_size
        for size in (0.01, 0.1)
    )
    assert 0 < near < far / 3
    assert far < relaxation(observation, truth, images, [])[0].step_size


def test_the_less_an_update_tells_the_looser_are_maps_and_the_shorter_steps() -> None:
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)

    def made(noise: float, rough: bool = False) -> Relaxation:
        return relaxation(observation, truth, images, [], noise=noise, rough=rough)[0]

    clear, noisy, buried, rough = made(0.0), made(0.99), made(0.9999), made(0.0, rough=True)
    assert clear.tight > noisy.tight > buried.tight > 0
    assert clear.step_size > noisy.step_size > buried.step_size > 0
    assert made(1.0).tight == made(1.1).tight == buried.tight  # an estimate may exceed all
    assert rough.tight < clear.tight
    assert rough.step_size == clear.step_size


def test_maps_behind_relu_stay_positive() -> None:
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    relaxed, _ = relaxation(observation, truth, images.flip(0), [], steps=5, width=1.0)
    for _ in range(5):
        relaxed(images.flip(0))
    assert all(float(each.detach().min()) == 0 for each in relaxed.maps)


def test_maps_follow_their_images() -> None:
    """From images at the truth and maps a tenth off, maps come back."""
    observation, truth = observe([])
    images = normalize(truth.images, observation.model)
    _, true = relaxation(observation, truth, images, [])
    streams = rng.generator(0, "maps")
    off = [
        (each + 0.1 * each.std() * torch.randn(each.shape, generator=streams)).clamp_min(0)
        for each in true[1:-1]
    ]
    relaxed, _ = relaxation(observation, truth, images, off, steps=60, width=1.0)
    misfits = [relaxed(images) for _ in range(60)]
    assert float(misfits[-1].features) < 0.1 * float(misfits[0].features)
    assert float(misfits[-1].update) < 0.2 * float(misfits[0].update)


def kinds(observation: Observation, attack: FactoredInversion) -> list[type]:
    state = attack.init(observation, Knowledge(), rng.generator(0, "phases"))
    found = []
    while not attack.terminate(state):
        state = attack.step(state)
        found.append(type(state.phase.misfit))
    assert state.phase.contrast is not None
    return found


def test_a_deep_body_is_peeled_first_and_relaxed_last() -> None:
    observation, _ = observe([])
    found = kinds(observation, FactoredInversion(iterations=300))
    assert found == [Peeling] * 105 + [PartGradient] * 120 + [Relaxation] * 75


def test_what_peeling_loses_is_left_to_all_stages_together() -> None:
    """Of three steps nothing is explained."""
    observation, _ = observe([])
    found = kinds(observation, FactoredInversion(iterations=10))
    assert found == [Peeling] * 3 + [Relaxation] * 7


@pytest.mark.parametrize("std", [1e-4, 1e-1])
def test_noise_that_buries_the_update_leaves_nothing_to_peel(std: float) -> None:
    observation, _ = observe([{"name": "gaussian_noise", "std": std}])
    found = kinds(observation, FactoredInversion(iterations=10))
    assert (Peeling in found) == (std < 1e-3)


def test_several_local_steps_of_a_deep_body_are_relaxed_and_not_unrolled() -> None:
    observation, _ = observe([], steps=2)
    assert kinds(observation, FactoredInversion(iterations=10)) == [Relaxation] * 10


def test_contrast_follows_the_noise_in_the_first_stage() -> None:
    attack, found = FactoredInversion(iterations=1), []
    for defense in ([], [{"name": "gaussian_noise", "std": 1e-2}]):
        observation, _ = observe(defense)
        state = attack.step(attack.init(observation, Knowledge(), rng.generator(0, "phases")))
        contrast = state.phase.contrast
        assert contrast is not None
        expected = state.matching.pixels(exposed(state.best, state.matching.box, contrast))
        images = attack.postprocess(state).images
        assert images is not None
        torch.testing.assert_close(images, expected)
        found.append(contrast)
    whole = trusted(noise_energy(observation, HeadGradient.of(observation)))
    assert found[0] == 1
    assert whole < found[1] < 1  # early stages stand out of noise


def test_one_iteration_is_too_few_to_peel() -> None:
    observation, _ = observe([])
    assert kinds(observation, FactoredInversion(iterations=1)) == [Relaxation]


@pytest.mark.parametrize(
    ("defense", "least"), [([], 15.0), ([{"name": "gaussian_noise", "std": 0.01}], 12.0)]
)
def test_images_of_a_deep_body_come_out(defense: list[dict[str, Any]], least: float) -> None:
    """Two photographs behind a ResNet-18."""
    observation, truth = observe(defense)
    result = solve(FactoredInversion(iterations=400), observation, Knowledge(), 0)
    images = result.reconstruction.images
    assert images is not None
    error = (images[:, None] - truth.images[None]).square().flatten(2).mean(2).min(1).values
    assert float(-10 * error.log10().mean()) > least
