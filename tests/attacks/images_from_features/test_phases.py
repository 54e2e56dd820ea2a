"""What comes when: deep bodies peeled and relaxed, or relaxed alone."""

import pytest
import torch
from deep_victims import descend, observe, staged

from fedsim import rng
from fedsim.attacking.knowledge import hand_over
from fedsim.attacking.question import Public
from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.testing.cases import example_batch
from fedsim_attacks.gradient_matching._image_priors import expose, trusted_contrast
from fedsim_attacks.head_features._head_gradient import HeadGradient
from fedsim_attacks.images_from_features._body_gradient import PartGradient, WholeGradient
from fedsim_attacks.images_from_features._heads import noise_share
from fedsim_attacks.images_from_features._stages import Relaxation, StagePeeling
from fedsim_attacks.images_from_features.factored_inversion import FactoredInversion


@pytest.mark.parametrize("std", [1e-4, pytest.param(1e-1, marks=pytest.mark.slow)])
def test_noise_that_buries_the_update_leaves_nothing_to_peel(std):
    observation, _ = observe([{"name": "gaussian_noise", "std": std}])
    kinds = descend(FactoredInversion(iterations=10), observation)[1]
    assert (StagePeeling in kinds) == (std < 1e-3)


@pytest.mark.parametrize(
    ("std", "expected"),
    [pytest.param(0.01, PartGradient, marks=pytest.mark.slow), (0.3, WholeGradient)],
)
def test_noise_that_drowns_a_shallow_body_leaves_the_whole_update(std, expected):
    observation, _ = observe([{"name": "gaussian_noise", "std": std}], model="convnet")
    state = FactoredInversion().init(observation, Knowledge(), rng.generator(0, "phases"))
    assert type(state.phase.misfit) is expected
    assert state.phase.iterations == 1500


@pytest.mark.slow
def test_several_local_steps_of_a_deep_body_are_relaxed_and_not_unrolled():
    observation, _ = observe([], steps=2)
    assert descend(FactoredInversion(iterations=10), observation)[1] == [Relaxation] * 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "iterations", "least"),
    [([], 400, 13.0), ([{"name": "gaussian_noise", "std": 0.01}], 200, 12.0)],
)
def test_a_deep_body_is_peeled_first_and_relaxed_last_and_its_images_come_out(
    defense, iterations, least, monkeypatch
):
    """Two photographs behind a ResNet-18."""
    observation, truth = observe(defense)
    kinds, step = [], FactoredInversion.step

    def watched(self, state):
        state = step(self, state)
        kinds.append(type(state.phase.misfit))
        return state

    monkeypatch.setattr(FactoredInversion, "step", watched)
    result = solve(FactoredInversion(iterations=iterations), observation, Knowledge(), 0)
    if not defense:
        assert kinds == [StagePeeling] * 140 + [PartGradient] * 160 + [Relaxation] * 100
    images = result.reconstruction.images
    error = (images[:, None] - truth.images[None]).square().flatten(2).mean(2).min(1).values
    assert float(-10 * error.log10().mean()) > least


def public(observation):
    images, _ = example_batch(30, observation.model.input_shape)
    return hand_over(
        observation, None, Grant.least(public="test"), Public(images=(images * 255).byte())
    )[1]


@pytest.mark.parametrize("std", [pytest.param(1e-2, marks=pytest.mark.slow), 0.3])
def test_public_images_tell_of_features_where_these_are_known(std):
    observation, _ = observe([{"name": "gaussian_noise", "std": std}], model="convnet")
    state = FactoredInversion().init(observation, public(observation), rng.generator(0, "phases"))
    apart = not torch.equal(*state.phases.distribution.means)
    assert apart == (state.phase.features is not None) == (std < 0.1)
    assert torch.equal(state.images, state.phases.distribution.means)


def test_contrast_is_seen_where_the_first_layer_has_a_bias_or_no_norm_layer():
    def seen(norm, mode, **model):
        observation, _ = observe([], norm=norm, mode=mode, **model)
        return staged(observation).contrast_seen

    assert seen("group", "train") < 1e-3
    assert seen("batch", "train") > 0.15  # one image's against the other's
    assert seen("batch", "eval") > 0.5
    assert 1e-3 < seen("group", "train", model="convnet") < 0.15  # by its bias
    assert seen("none", "train", model="convnet") > 1


def test_exposed_images_are_those_of_any_contrast():
    low, high = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    images = torch.rand(4, 3, 32, 32, generator=rng.generator(0, "exposed")) * 4.5 - 2
    found = expose(images, (low, high))
    torch.testing.assert_close(found, images, rtol=0.02, atol=0)
    factors = torch.tensor([0.3, 0.7, 1.0, 2.0]).view(4, 1, 1, 1)
    torch.testing.assert_close(expose(factors * images, (low, high)), found)
    assert torch.equal(expose(torch.zeros(1, 3, 4, 4), (low, high)), torch.zeros(1, 3, 4, 4))


def test_the_less_an_image_is_told_the_less_contrast_it_gets():
    assert trusted_contrast(0.0) == 1
    assert 1 > trusted_contrast(0.3) > trusted_contrast(0.6) > trusted_contrast(0.99) > 0
    assert trusted_contrast(1.0) == trusted_contrast(1.2) == 0  # an estimate may exceed all
    images = torch.rand(2, 3, 8, 8, generator=rng.generator(0, "exposed")) - 0.5
    box = torch.full((3, 1, 1), -2.0), torch.full((3, 1, 1), 2.5)
    torch.testing.assert_close(expose(images, box, 0.4), 0.4 * expose(images, box))


@pytest.mark.parametrize("std", [0.0, 1e-3, 0.1])
def test_the_noise_in_a_part_is_found(std):
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    clear, _ = observe([])
    observation, _ = observe(defense)
    seen = HeadGradient.read(observation)
    name = "body.conv1.weight"
    noise = observation.update[name] - clear.update[name]
    share = float(noise.square().sum() / observation.update[name].square().sum())
    assert noise_share(observation, seen, [name]) == pytest.approx(share, rel=0.1)
    whole = [each for each in observation.update if each.startswith("body.")]
    assert noise_share(observation, seen, whole) == pytest.approx(noise_share(observation, seen))


@pytest.mark.parametrize(
    ("norm", "std", "contrast"),
    [
        ("group", 0.0, None),
        pytest.param("group", 0.01, 1.0, marks=pytest.mark.slow),
        ("group", 0.3, 1.0),
        ("none", 0.3, None),
    ],
)
def test_contrast_that_total_variation_takes_is_given_back(norm, std, contrast):
    """Where noise asks for much of it and group norm leaves contrast hard to see."""
    defense = [{"name": "gaussian_noise", "std": std}] if std else []
    observation, _ = observe(defense, norm=norm, model="convnet")
    attack = FactoredInversion(iterations=1)
    state = attack.step(attack.init(observation, Knowledge(), rng.generator(0, "phases")))
    assert state.phase.contrast == contrast
    images = attack.postprocess(state).images
    box = state.matching.box
    shown = expose(state.best, box) if contrast else state.best
    torch.testing.assert_close(images, state.matching.pixels(shown))
    assert contrast is None or not torch.allclose(shown, state.best)
