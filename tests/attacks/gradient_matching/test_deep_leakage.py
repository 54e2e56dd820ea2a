"""DLG and iDLG on their own ground: LeNet, one image, one gradient."""

import math

import pytest
import torch

from fedsim.attacking.knowledge import hand_over
from fedsim.contracts.attack import solve
from fedsim.contracts.grant import Grant, Knowledge
from fedsim.data.bundled import Faces
from fedsim.models.victim import rebuild
from fedsim.testing import make_observation
from fedsim_attacks.gradient_matching.deep_leakage import IDLG, DeepLeakage, _label_misfit


def face():
    faces = Faces(size=16).load()
    return faces.train_images[5:6].float() / 255, faces.train_labels[5:6]


def psnr(found, truth):
    return -10 * math.log10(float((found - truth).square().mean()))


@pytest.mark.parametrize(
    ("attack", "labels"),
    [
        (DeepLeakage(iterations=120), "none"),
        pytest.param(DeepLeakage(iterations=120), "known", marks=pytest.mark.slow),
        (IDLG(iterations=80), "inferred"),
    ],
)
def test_a_face_is_recovered_with_its_label(attack, labels):
    images, truth = face()
    seen = hand_over(*make_observation(images, truth), Grant(labels=labels))
    found = solve(attack, *seen, seed=0).reconstruction
    assert psnr(found.images, images) > 30
    assert torch.equal(found.labels, truth)
    assert found.loss < 1e-6


def test_labels_that_are_only_inferred_are_not_used_by_dlg():
    """Its soft labels are optimized; that they turn out right is its own doing."""
    observation, truth = make_observation(*face())
    stream = torch.Generator()
    attack = DeepLeakage()
    for granted in (Knowledge(), Knowledge(grant=Grant(labels="inferred"))):
        assert attack.init(observation, granted, stream).candidate.logits is not None
    known = Knowledge(grant=Grant(labels="known"), true_labels=truth.labels)
    assert attack.init(observation, known, stream).candidate.logits is None


def test_an_image_held_to_its_label_is_found_from_a_pattern():
    """CPL (Wei et al.): patterned starts, and the misfit of predictions in the objective."""
    images, truth = face()
    seen = hand_over(*make_observation(images, truth), Grant(labels="inferred"))
    attack = IDLG(iterations=150, label_weight=1e-4, pattern=4)
    start = attack.init(*seen, torch.Generator().manual_seed(0)).candidate.images.detach()
    torch.testing.assert_close(start[:, :, 4:], start[:, :, :-4])
    found = solve(attack, *seen, seed=0).reconstruction
    assert psnr(found.images, images) > 25


def test_the_misfit_of_a_label_is_that_of_the_predicted_probabilities():
    images, truth = face()
    observation, _ = make_observation(images, truth)
    model = rebuild(observation)
    at = torch.rand(images.shape, generator=torch.Generator().manual_seed(0))
    predicted = model(at).detach().softmax(1)[0]
    wanted = torch.eye(len(predicted))[int(truth)]
    value, slope = _label_misfit(model, at, truth)
    assert float(value) == pytest.approx(float((predicted - wanted).square().sum()))
    ahead, behind = (_label_misfit(model, at + s * slope, truth)[0] for s in (0.01, -0.01))
    expected = 0.02 * float(slope.square().sum())
    assert float(ahead - behind) == pytest.approx(expected, rel=0.02)
