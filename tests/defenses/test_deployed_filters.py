"""Filters that people deploy: what they do, what they claim, and the ε that is proven of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from fedsim.contracts.guarantee import Guarantee
from fedsim.contracts.stack import Stack, chain
from fedsim.privacy.ledger import Entry, claim
from fedsim.testing.cases import example_training, stream
from fedsim.types import PrivacyClaim
from fedsim_defenses import svt_privacy
from fedsim_defenses.clip import Clip
from fedsim_defenses.dp_sgd import DPSGD
from fedsim_defenses.gaussian_noise import GaussianNoise
from fedsim_defenses.local_dp_mod import LocalDpMod
from fedsim_defenses.percentile_privacy import PercentilePrivacy
from fedsim_defenses.soteria import Soteria
from fedsim_defenses.svt_privacy import SparseVectorRelease, SvtPrivacy

WEIGHTS = {"a": torch.zeros(300), "b": torch.zeros(20, 10)}


def apply(defense: object, update: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    assert isinstance(defense, PercentilePrivacy | SvtPrivacy | LocalDpMod)
    return dict(defense.apply(update, {}, stream(seed))[0])


def claimed(
    *defenses: object, weights: dict[str, Tensor] = WEIGHTS, rounds: int = 1
) -> PrivacyClaim:
    stack: Stack = chain(*defenses)  # type: ignore[arg-type]
    stack.note_shapes(weights.values())
    return claim(stack, example_training(), Entry(rounds=rounds, num_examples=50, delta=1e-5))


def test_percentile_zeroes_below_its_cutoff_and_truncates() -> None:
    update = {"a": torch.tensor([0.0, 1.0, -2.0, 3.0, -4.0]), "scalar": torch.tensor(9.0)}
    found = apply(PercentilePrivacy(percentile=40, gamma=1.5, steps=2), update)
    # Magnitudes per step are 0, 0.5, 1, 1.5, 2 and 4.5: 40 percent of the way is 1.
    assert found["a"].tolist() == [0, 0, -2, 3, -3]
    assert float(found["scalar"]) == 9


def test_percentile_proves_a_bound_but_no_epsilon() -> None:
    filtered = PercentilePrivacy(gamma=0.01)
    assert claimed(filtered).epsilon == math.inf
    assert claimed(filtered).claimed_epsilon is None
    # 500 entries of at most 0.01: with noise behind it, the filter is a clip to 0.01 √500.
    noised = claimed(filtered, GaussianNoise(std=1.0)).epsilon
    bound = 0.01 * math.sqrt(500)
    assert noised == pytest.approx(
        claimed(Clip(norm=bound), GaussianNoise(std=1.0)).epsilon, rel=1e-4
    )
    # A tensor that is a single number passes unbounded.
    lone = {**WEIGHTS, "scale": torch.zeros(())}
    assert claimed(filtered, GaussianNoise(std=1.0), weights=lone).epsilon == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("steps", [1, 3, 7])
def test_percentile_sends_no_more_than_it_proves(dtype: torch.dtype, steps: int) -> None:
    filtered = PercentilePrivacy(percentile=10, gamma=0.011, steps=steps)
    proven = filtered.guarantee(Guarantee(shapes=((4,),))).sensitivity
    update = {"a": torch.tensor([9.0, -9.0, math.inf, math.nan], dtype=dtype)}
    assert float(apply(filtered, update)["a"].double().norm()) <= proven
    # A bound from before it holds as well: what stays is not rounded by the steps.
    inner = {"a": torch.rand(1000, generator=stream(1)).to(dtype)}
    wide = filtered.model_copy(update={"gamma": 1e3})
    shown = apply(wide, inner)["a"]
    assert bool((shown.abs() <= inner["a"].abs()).all())


def test_soteria_behind_noise_claims_nothing() -> None:
    noised = DPSGD(norm=1.0, noise_multiplier=1.0)
    # Which columns it prunes is read off the images, and shows in the noise.
    assert math.isinf(claimed(noised, Soteria(ratio=0.5)).epsilon)
    assert claimed(Soteria(ratio=0.5), noised).epsilon == claimed(noised).epsilon < math.inf


def test_svt_rounds_away_the_low_bits_of_what_it_shows() -> None:
    update = {"a": torch.full((1000,), math.pi / 4, dtype=torch.float64)}
    filtered = SvtPrivacy(gamma=1.0, epsilon=10.0, noise_var=1.0, tau=0.0)
    shown = apply(filtered, update)["a"]
    # Noise has the scale 2: multiples of 2 / 2^18, whatever entry is behind it.
    assert torch.equal((shown * 2**17).round(), shown * 2**17)


def test_svt_spends_epsilon_for_every_entry_that_it_releases() -> None:
    # δ so small that Rényi divergences help nothing: the sum of all pure ε is left.
    release = SparseVectorRelease(
        unit="client", relation="replace_one", accountant="", selection=0.3, each=0.1, count=5
    )
    assert release.epsilon(1e-300, 2) == pytest.approx(2 * (0.3 + 0.5))
    # Many small ones: the divergence of each is ε²/2 to second order, and they add up.
    many = replace(release, count=100_000).epsilon(1e-5, 1)
    expected = 100_000 * 0.1**2 / 2 + math.sqrt(2 * 100_000 * 0.1**2 * math.log(1e5))
    assert many == pytest.approx(0.3 + expected, rel=0.05)
    assert many < 0.3 + 10_000


def test_svt_claims_less_than_is_proven_and_composes_over_rounds() -> None:
    one, ten = (claimed(SvtPrivacy(), rounds=rounds) for rounds in (1, 10))
    assert one.claimed_epsilon == ten.claimed_epsilon == 0.1
    assert one.unit == "client"
    # 50 of 500 entries at ε 0.1 each, beside the comparisons.
    assert 0.1 < one.epsilon <= 5 + 0.1 / 0.1
    assert one.epsilon < ten.epsilon
    unknown = chain(SvtPrivacy())
    assert math.isinf(
        claim(unknown, example_training(), Entry(rounds=1, num_examples=9, delta=1e-5)).epsilon
    )
    assert math.isinf(claimed(SvtPrivacy(), weights={"scale": torch.zeros(())}).epsilon)


def test_svt_releases_the_share_that_it_says_with_its_noise() -> None:
    update = {"a": 1e-6 * torch.randn(20_000, generator=stream(3))}
    shown = apply(SvtPrivacy(replace=False, gamma=1e-5), update)["a"].double()
    released = shown[shown != 0]
    assert len(released) == 2_000
    # Laplace noise of scale 2γ / 0.1 has √2 times that for its deviation; 2,000 draws: ± 2.5%.
    assert float(released.std()) == pytest.approx(math.sqrt(2) * 2e-4, rel=0.1)
    fewer = apply(SvtPrivacy(gamma=1e-5), update)["a"]
    assert 1_700 < int((fewer != 0).sum()) < 2_000


def test_svt_prefers_large_entries_where_its_noise_is_small() -> None:
    update = {"a": torch.cat([torch.full((50,), 0.9), torch.full((450,), 0.1)])}
    filtered = SvtPrivacy(epsilon=1e5, noise_var=1e5, gamma=1.0, tau=0.5, replace=False)
    shown = apply(filtered, update)["a"]
    assert torch.equal((shown != 0).nonzero().flatten(), torch.arange(50))
    torch.testing.assert_close(shown[:50], update["a"][:50], atol=1e-3, rtol=0)


def test_svt_that_would_compare_for_ever_is_refused() -> None:
    filtered = SvtPrivacy(epsilon_threshold=1e-9, epsilon=1.0, gamma=1.0, fraction=0.002)
    with pytest.raises(Exception, match="epsilon_threshold"):
        for seed in range(20):  # the threshold's noise is as often far below as far above
            apply(filtered, {"a": torch.zeros(500)}, seed)


def test_local_dp_mod_states_what_follows_from_its_noise() -> None:
    mod = LocalDpMod(clipping_norm=1.0, sensitivity=1.0, epsilon=10.0, delta=1e-5)
    stated = claimed(mod)
    assert stated.claimed_epsilon == 10
    equal = claimed(Clip(norm=1.0), GaussianNoise(std=math.sqrt(2 * math.log(1.25e5)) / 10))
    assert stated.epsilon == equal.epsilon == pytest.approx(10.4, abs=0.05)
    # A tensor that is a single number passes without noise.
    assert math.isinf(claimed(mod, weights={**WEIGHTS, "scale": torch.zeros(())}).epsilon)
    # A sensitivity of a ten thousandth of the clip, as a public platform has it.
    loose = LocalDpMod(clipping_norm=1.0, sensitivity=1e-4, epsilon=10.0, delta=1e-5)
    assert claimed(loose).epsilon == pytest.approx(213_089_418, rel=1e-3)


def test_soteria_prunes_the_features_with_the_least_slope_over_size() -> None:
    images = torch.tensor([[[[1.0, 5.0], [0.2, 3.0]]]])

    def features(parameters: object, x: Tensor) -> Tensor:
        return x.flatten(1) * torch.tensor([1.0, 1.0, 4.0, 0.1])

    step = StepOf(features)
    direction = Soteria(ratio=0.5).gradient(step)  # type: ignore[arg-type]
    found = direction({}, images, torch.tensor([0]), stream())["head.weight"]
    # Slopes over sizes are 1/1.1, 1/5.1, 4/0.9 and 0.1/0.4.
    assert found.tolist() == [[1, 0, 1, 0]] * 3


class StepOf:
    """A local step whose direction is all ones."""

    def __init__(self, features: object) -> None:
        self.features = features

    def gradient(self, *_: object) -> dict[str, Tensor]:
        return {"body.weight": torch.ones(2, 4), "head.weight": torch.ones(3, 4)}


class TestBesideNvflare:
    """The same tensors through NVFlare's own filters; skipped where it is not installed."""

    def run(self, filtered: object, update: dict[str, Tensor]) -> dict[str, np.ndarray]:
        dxo = pytest.importorskip("nvflare.apis.dxo")
        context = pytest.importorskip("nvflare.apis.fl_context").FLContext()
        shareable = pytest.importorskip("nvflare.apis.shareable").Shareable()
        data = {name: tensor.numpy().copy() for name, tensor in update.items()}
        message = dxo.DXO(dxo.DataKind.WEIGHT_DIFF, data)
        message.set_meta_prop(dxo.MetaKey.NUM_STEPS_CURRENT_ROUND, 3)
        return dict(filtered.process_dxo(message, shareable, context).data)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("percentile", [0, 10, 73.2, 100])
    def test_percentile_privacy(self, percentile: float) -> None:
        theirs = pytest.importorskip("nvflare.app_common.filters.percentile_privacy")
        update = {
            "a": 0.05 * torch.randn(40, 30, generator=stream(1)),
            "b": 0.2 * torch.randn(17, generator=stream(2)),
            "scalar": torch.tensor(4.0),
        }
        expected = self.run(theirs.PercentilePrivacy(percentile, 0.02), update)
        ours = apply(PercentilePrivacy(percentile=percentile, gamma=0.02, steps=3), update)
        for name in update:
            np.testing.assert_allclose(ours[name].numpy(), expected[name], rtol=1e-6)

    def test_svt_privacy_without_its_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        theirs = pytest.importorskip("nvflare.app_common.filters.svt_privacy")
        update = {"b": torch.full((100,), 0.03), "a": torch.linspace(0.1, 0.2, 10)}
        update["b"][::2] *= -1
        update["b"][:23] *= 5
        # Without noise the 33 entries above τ are accepted, and all of them are released.
        monkeypatch.setattr(svt_privacy, "_laplace", lambda _, count, rng: torch.zeros(count))
        monkeypatch.setattr(np.random, "laplace", lambda scale, size=(): np.zeros(size))
        settings = {"fraction": 0.3, "tau": 0.02, "gamma": 0.05, "replace": False}
        expected = self.run(theirs.SVTPrivacy(**settings), update)
        ours = apply(SvtPrivacy(**settings, steps=3), update)
        assert sum(int((tensor != 0).sum()) for tensor in ours.values()) == 33
        for name in update:
            # What is shown is rounded to a grid 2^18 times finer than the noise, of scale 1 here.
            np.testing.assert_allclose(ours[name].numpy(), expected[name], atol=3 * 2.0**-18)

    def test_svt_privacy_states_less_than_it_spends(self) -> None:
        theirs = pytest.importorskip("nvflare.app_common.filters.svt_privacy")
        filtered = theirs.SVTPrivacy()
        self.run(filtered, {"a": 1e-5 * torch.randn(1000, generator=stream(1))})
        (spent,) = filtered.get_privacy_ledger()
        proven = SvtPrivacy().guarantee(Guarantee(shapes=((1000,),))).mechanism
        assert isinstance(proven, SparseVectorRelease)
        assert proven.each * proven.count == pytest.approx(spent["epsilon_release"])
        # NVFlare counts 100 acceptances; a pass may accept all of 1,000.
        assert proven.selection == pytest.approx(
            spent["epsilon_threshold"] + 10 * spent["epsilon_query"]
        )
