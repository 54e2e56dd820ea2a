"""What is known of patches and their equations: exact answers, laws, and honest uncertainty."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedsim
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Knowledge
from fedsim.testing import make_observation
from fedsim.types import Effect, LocalTraining
from fedsim_attacks.patch_embedding.patch_inversion import (
    PatchInversion,
    _correlation,
    _solve_patches,
)

SMALL = {"patch": 4, "width": 32, "heads": 2}
"""16 patches of a 16x16 image, in tokens of 32 entries."""


def _image(seed=0):
    """A smooth image of 16x16, in 8 bits, and its label."""
    coarse = torch.rand(1, 3, 5, 5, generator=torch.Generator().manual_seed(seed))
    fine = nn.functional.interpolate(coarse, (16, 16), mode="bicubic", align_corners=True)
    return (fine.clamp(0, 1) * 255).round() / 255, torch.tensor([seed % 10])


def _attacked(seed=0, model=None, **settings):
    """The answer and its PSNR."""
    images, labels = _image(seed)
    options = {"model": "vit", "model_parameters": {**SMALL, **(model or {})}, **settings}
    observation, _ = make_observation(images, labels, seed=seed, **options)
    found = solve(PatchInversion(), observation, Knowledge(), seed=0).reconstruction
    return found, _psnr(found.images, images)


def _psnr(found, images):
    return float(-10 * (found - images).square().mean().log10())


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("pool", ["class_token", "mean"])
@pytest.mark.parametrize("head", [None, {"width": 64}], ids=["linear", "two_layers"])
def test_one_image_is_exact(norm, pool, head):
    found, psnr = _attacked(1, {"norm": norm, "pool": pool, "head": head})
    assert psnr > 50
    assert bool(found.determined)
    assert found.labels.tolist() == [1]
    assert found.loss < 1e-10


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("defense", [[], [{"name": "clip", "norm": 1e-3}]], ids=["none", "clip"])
def test_local_steps_on_the_image_leave_it_exact(momentum, defense):
    """However far the model moves: the steps' signals add up in both gradients."""
    training = LocalTraining(
        algorithm="fedavg", steps=5, batch_size=1, lr=0.1, batches="same", momentum=momentum
    )
    found, psnr = _attacked(3, training=training, defense=defense)
    assert psnr > 45
    assert bool(found.determined)


def test_tokens_with_fewer_entries_than_patches_leave_the_image_open():
    found, psnr = _attacked(4, {"width": 14})
    grey = _psnr(torch.full((1, 3, 16, 16), 0.5), _image(4)[0])
    assert psnr > grey + 3
    assert not bool(found.determined)


@pytest.mark.parametrize(
    "defense",
    [
        *(
            pytest.param({"name": "gaussian_noise", "std": std}, marks=pytest.mark.slow)
            for std in (1e-6, 1e-4)
        ),
        {"name": "gaussian_noise", "std": 1e-2},
        {"name": "gradient_pruning", "ratio": 0.1},
        {"name": "gradient_pruning", "ratio": 0.5, "scope": "tensor"},
        {"name": "quantization", "bits": 8},
        {"name": "dp_sgd", "norm": 1.0, "noise_multiplier": 0.01},
    ],
    ids=lambda defense: "-".join(map(str, defense.values())),
)
def test_no_image_is_called_determined_that_is_not(defense):
    for seed in range(3):
        for model in ({}, {"norm": "post", "width": 18}):
            found, psnr = _attacked(seed, model, defense=[defense])
            assert psnr > 40 or not bool(found.determined), (seed, model, psnr)


def test_patches_are_solved_for_and_their_error_is_foretold():
    """Of a made-up gradient with noise of known variance, and of one without."""
    stream = torch.Generator().manual_seed(5)
    patches, width, pixels = 9, 24, 40
    side = torch.arange(3.0).double() / 3
    alike = _correlation(torch.cartesian_prod(side, side))
    mean = torch.full((pixels,), 0.3).double()
    spread = torch.full((pixels,), 2.0).double()
    drawn = torch.randn(patches, pixels, generator=stream).double()
    truth = mean + spread * (torch.linalg.cholesky(alike) @ drawn)
    signals = torch.randn(patches, width, generator=stream).double()
    exact = signals.T @ truth
    found = _solve_patches(signals, exact, mean, spread, alike)
    torch.testing.assert_close(found.values, truth, rtol=0, atol=1e-6)
    assert float(found.variances.max()) < 1e-12
    for std in (0.01, 1.0, 100.0):
        noisy = exact + std * torch.randn(width, pixels, generator=stream).double()
        found = _solve_patches(signals, noisy, mean, spread, alike)
        error = float((found.values - truth).square().mean().sqrt())
        foretold = float(spread[0] * found.variances.mean().sqrt())
        assert foretold == pytest.approx(error, rel=0.3)


class _Rows(nn.Module):
    """Takes each row of an image as a patch, embedded by a linear layer, positions on request."""

    def __init__(self, trained):
        super().__init__()
        self.embed = nn.Linear(24, 32)
        self.where = nn.Parameter(0.1 * torch.randn(8, 32), requires_grad=trained)
        self.block = nn.TransformerEncoderLayer(32, 2, 64, dropout=0, batch_first=True)
        self.classify = nn.Linear(32, 10)

    def forward(self, images):
        rows = images.permute(0, 2, 1, 3).flatten(2)
        return self.classify(self.block(self.embed(rows) + self.where).mean(1))


@pytest.mark.parametrize("trained", [True, False])
def test_a_models_own_patches_are_found_if_their_positions_are_trained(trained):
    torch.manual_seed(7)
    model = _Rows(trained)
    images, labels = torch.rand(1, 3, 8, 8), torch.tensor([2])
    loss = nn.functional.cross_entropy(model(images), labels)
    wanted = [p for p in model.parameters() if p.requires_grad]
    update = torch.autograd.grad(loss, wanted)
    seen = fedsim.observe(model, update, input_shape=(3, 8, 8), classes=10, batch_size=1)
    if not trained:
        with pytest.raises(AttackFailed, match="no parameter that is trained is added"):
            solve(PatchInversion(), seen, Knowledge(), seed=0)
        return
    found = solve(PatchInversion(), seen, Knowledge(), seed=0).reconstruction
    assert _psnr(found.images, images) > 50


def test_what_cannot_be_solved_is_refused_in_words():
    images, labels = torch.rand(2, 3, 16, 16), torch.tensor([1, 2])
    several, _ = make_observation(images, labels, model="vit", model_parameters=SMALL)
    other, _ = make_observation(images[:1], labels[:1], model="lenet")
    one, _ = make_observation(images[:1], labels[:1], model="vit", model_parameters=SMALL)
    for seen, reason in (
        (several, "2 images, whose signals at a position"),
        (other, "no layer that embeds patches"),
        (replace(one, effect=Effect(mixed=True)), "mixes entries"),
    ):
        with pytest.raises(AttackFailed, match=reason):
            solve(PatchInversion(), seen, Knowledge(), seed=0)
