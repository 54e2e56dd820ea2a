"""The paper's image attack: its terms at the truth, its U-Net, and where its features come from."""

import pytest
import torch
from deep_victims import HEAD
from pydantic import ValidationError

import fedsim
from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.attack import AttackFailed, solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch
from fedsim.types import FedsimError
from fedsim_attacks.gradient_matching._drawing import Drawing, DrawingSettings, _UNet
from fedsim_attacks.gradient_matching._image_priors import ForwardPrior, KnownFeatures
from fedsim_attacks.images_from_features._heads import doubts, head_of
from fedsim_attacks.images_from_features.feature_inversion import FeatureInversion


def observe(norm="batch"):
    parameters = {"width": 8, "norm": norm, "head": HEAD}
    return make_observation(*example_batch(3), model="convnet", model_parameters=parameters)


@pytest.mark.parametrize("measure", ["squared_cosine", "relative"])
def test_the_features_term_is_zero_at_the_truth(measure):
    observation, truth = observe()
    prior = ForwardPrior(observation, Knowledge(), KnownFeatures(truth.features, measure))
    assert float(prior(normalize(truth.images, observation.model))[0]) < 1e-6
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > 1e-4
    value, slope = ForwardPrior(observation, Knowledge(), None)(truth.images)
    assert float(value) == 0
    assert not slope.any()


def test_equation_2_does_not_see_signs_or_norms():
    found, known = torch.randn(2, 4, 6).unbind()
    cosine = KnownFeatures(known, "squared_cosine").misfit(found)
    assert torch.isclose(KnownFeatures(-3 * known, "squared_cosine").misfit(found), cosine)
    relative = KnownFeatures(known, "relative").misfit(found)
    assert not torch.isclose(KnownFeatures(-3 * known, "relative").misfit(found), relative)


@pytest.mark.parametrize("bn", ["exact", "inferred"])
def test_the_batch_norm_term_is_least_at_the_truth(bn):
    """Zero for exact statistics; inferred variances are unbiased, which adds a little."""
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least(bn=bn))
    prior = ForwardPrior(seen, knowledge, None, batch_norm=1.0)
    right = float(prior(normalize(truth.images, observation.model))[0])
    assert right < (1e-4 if bn == "exact" else 0.5)
    assert float(prior(normalize(1 - truth.images, observation.model))[0]) > right + 0.5


def test_ungranted_statistics_are_not_used():
    observation, truth = observe()
    seen, knowledge = hand_over(observation, truth, Grant.least())
    assert float(ForwardPrior(seen, knowledge, None, batch_norm=1.0)(truth.images)[0]) == 0


@pytest.mark.parametrize(
    ("shape", "levels", "attentions"),
    [((3, 32, 32), 4, 2), ((1, 16, 16), 3, 2), ((1, 25, 25), 1, 0)],
)
def test_the_network_halves_down_to_four_pixels(shape, levels, attentions):
    network = _UNet(2, shape, 5, 8)
    features = torch.randn(2, 5)
    drawn = network(features)
    assert drawn.shape == (2, *shape)
    assert len(network.down) == levels
    assert not torch.equal(drawn, network(-features))
    assert sum(type(m).__name__ == "_PixelAttention" for m in network.modules()) == attentions


PLANTED = {"hidden": [12], "head": HEAD}
ORACLE = {"name": "tensor_features", "oracle": True}


def observe_mlp(count=3, **parameters):
    return make_observation(
        *example_batch(count), model="mlp", model_parameters=parameters or PLANTED
    )


def attack(**parameters):
    return FeatureInversion.model_validate({"iterations": 2, "prior": "pixel", **parameters})


@pytest.mark.parametrize(
    "source", ["tensor_features", "best_features", {"name": "head_fit"}, "suited"]
)
def test_features_are_those_of_the_attack_that_is_named(source):
    observation, _ = observe_mlp()
    answer = solve(attack(features_from=source), observation, Knowledge(), 1).reconstruction
    named = source["name"] if isinstance(source, dict) else source
    assert answer.features_by == ("best_features" if named == "suited" else named)
    assert answer.features is not None and answer.features.shape == (3, 12)


def test_without_a_source_labels_are_granted_and_no_feature_is_told():
    observation, truth = observe_mlp()
    seen, knowledge = hand_over(observation, truth, Grant(labels="known"))
    answer = solve(attack(features_from="none"), seen, knowledge, 1).reconstruction
    assert answer.features is None and answer.features_by is None
    assert answer.labels is not None and torch.equal(answer.labels, truth.labels)


def test_a_row_has_every_parameter_of_the_source():
    observation, _ = observe_mlp()
    parameters = {"prior": "pixel", "iterations": 1, "features_from": "tensor_features"}
    row = fedsim.attack(observation, "feature_inversion", parameters)[1]
    stated = row["attack"]["parameters"]["features_from"]
    assert stated["name"] == "tensor_features" and stated["rows"] == "combined"
    assert FeatureInversion.model_validate({"features_from": stated}).features_from == stated


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("best_feature", "best_features"),
        ({"name": "tensor_features", "whitened": True}, "tensor_features.whitened"),
        ({"name": "tensor_features", "iterations": 0}, "tensor_features.iterations"),
        ({"whiten": True}, "name"),
        ("row_reconstruction", "reads no update"),
    ],
)
def test_a_source_that_cannot_be_is_refused_before_any_work(source, reason):
    with pytest.raises(ValidationError, match=reason) as refused:
        attack(features_from=source)
    assert {error["loc"][0] for error in refused.value.errors()} == {"features_from"}


def test_an_attack_that_answers_no_features_is_no_source():
    observation, _ = observe_mlp()
    with pytest.raises(AttackFailed, match="label_inference answers no features"):
        solve(attack(features_from="label_inference"), observation, Knowledge(), 1)


def test_the_order_of_the_true_features_has_to_be_granted_and_is_ranked_apart():
    oracle = attack(features_from=ORACLE)
    assert Grant().lacks(oracle.required()) is not None
    assert oracle.required().from_truth() == ["features=known"]
    assert attack(features_from="tensor_features").required() == Grant.least()
    observation, _ = observe_mlp()
    with pytest.raises(FedsimError, match=r"knowledge\.features: known"):
        fedsim.attack(observation, "feature_inversion", {"features_from": ORACLE})


def test_features_in_the_order_of_the_truth_keep_its_labels():
    observation, truth = observe_mlp()
    seen, knowledge = hand_over(observation, truth, Grant(labels="known", features="known"))
    answer = solve(attack(features_from=ORACLE), seen, knowledge, 1).reconstruction
    assert answer.labels is not None and torch.equal(answer.labels, truth.labels)


def wrong(features, by):
    noise = torch.randn(features.shape, generator=torch.Generator().manual_seed(5))
    return features + by * noise * features.norm(dim=1, keepdim=True) / noise.norm(
        dim=1, keepdim=True
    )


@pytest.mark.parametrize("model", [PLANTED, {"hidden": [12]}])
def test_doubt_grows_with_the_error_of_features(model):
    observation, truth = observe_mlp(2, **model)
    head = head_of(observation)
    found = [float(doubts(head, wrong(truth.features, by)).mean()) for by in (0.0, 0.1, 1.0)]
    assert found[0] < 1e-6 < 1e-4 < found[1] < found[2] <= 1


def test_features_that_explain_nothing_hardly_count():
    """The misfit of features is then nearly none, whatever the candidates."""
    observation, _ = observe_mlp()
    wild = {"name": "tensor_features", "iterations": 1, "contraction": "third"}

    def loss(doubted, weight):
        tried = attack(features_from=wild, doubted=doubted, feature_weight=weight, iterations=1)
        return solve(tried, observation, Knowledge(), 1).reconstruction.loss

    doubting, trusting = (loss(doubted, 1.0) - loss(doubted, 0.0) for doubted in (True, False))
    assert trusting > 0.05
    assert 0 <= doubting < 0.5 * trusting


def test_labels_of_doubtful_features_are_those_that_are_granted():
    observation, truth = observe_mlp(5)
    wild = {"name": "tensor_features", "iterations": 1, "contraction": "third"}
    seen, knowledge = hand_over(observation, truth, Grant(labels="known"))
    answer = solve(attack(features_from=wild), seen, knowledge, 1).reconstruction
    assert torch.equal(answer.labels.sort().values, truth.labels.sort().values)


@pytest.mark.slow
def test_a_network_learns_to_draw_pixels_before_it_goes_on():
    observation, _ = make_observation(*example_batch(1, (3, 16, 16)), model="mlp")
    settings = DrawingSettings(canvas="unet", iterations=10, width=8, rate=0.01)
    drawing = Drawing(settings, observation, torch.Generator().manual_seed(1), seed=1)
    rising = torch.linspace(-0.5, 0.5, observation.model.input_shape[2])
    wanted = torch.ones(1, *observation.model.input_shape) * rising
    before = float((drawing.draw().detach() - wanted).square().mean())
    drawing.copy(wanted)
    assert float((drawing.draw().detach() - wanted).square().mean()) < 0.8 * before
    tried = attack(prior="unet", width=8, iterations=4, pixels_first=0.5, features_from="none")
    assert solve(tried, observation, Knowledge(), 1).reconstruction.iterations == 4


@pytest.mark.slow
def test_the_network_draws_an_image_well_above_its_guess():
    """A bright disc before a shaded ground. The guess has its mean color, which no attacker has."""
    y, x = torch.meshgrid(*[torch.linspace(-1, 1, 16)] * 2, indexing="ij")
    ground = torch.stack([0.3 + 0.2 * x, 0.4 - 0.2 * y, 0.5 * torch.ones_like(x)])
    image = torch.where((x - 0.2).square() + y.square() < 0.3, 0.9, ground)[None]
    observation, _ = make_observation(
        image, torch.tensor([3]), model="mlp", model_parameters={"hidden": [24]}
    )
    drawing = {"prior": "unet", "width": 8, "iterations": 150, "learning_rate": 0.01}
    drawing |= {"total_variation": 0.001, "pixels_first": 0.3}
    tried = attack(cosines="weighted_mean", features_from="classifier_fit", **drawing)
    drawn = solve(tried, observation, Knowledge(), 1).reconstruction.images
    guess = image.mean((2, 3), keepdim=True)
    assert (drawn - image).square().mean() < (guess - image).square().mean() / 4, "6 dB"
