"""Draws of the model are fitted with the images, and an orthogonal direction's norms are read."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from fedsim.data.bundled import Faces
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    Matching,
    _GivenDraws,
    _orthogonal_distance,
    squared_distance,
)

MODEL = {"model": "convnet", "model_parameters": {"width": 8}, "num_classes": 2}


def observe(first, defense):
    faces = Faces(size=16).load()
    pixels, labels = faces.train_images.float() / 255, faces.train_labels
    mine = slice(first, first + 2)
    seen, _ = make_observation(pixels[mine], labels[mine], defense=[{"name": defense}], **MODEL)
    return seen, normalize(pixels, seen.model), labels


def stream():
    return torch.Generator().manual_seed(1)


def test_draws_are_variables_and_the_objective_is_zero_at_the_true_ones():
    seen, images, labels = observe(0, "precode")
    blind = Matching(seen).random_candidate(labels[:2], stream())
    matching = Matching(seen, effects="simulated")
    drawn = matching.random_candidate(labels[:2], stream()).drawn
    assert not blind.drawn and [tuple(each.shape) for each in drawn] == [(2, 256)]
    truth = replace(Candidate(images[:2], labels[:2]), drawn=drawn)
    # The simulator hands out no draws: the client of these ones is simulated here.
    with _GivenDraws(drawn):
        update = matching.update(truth.images, truth.targets(), create_graph=False)
    client = replace(seen, update=dict(zip(matching.names, update, strict=True)))
    knows = Matching(client, effects="simulated")
    loss, slopes = knows.differentiate(truth, squared_distance)
    assert float(loss) < 1e-9 and len(slopes) == 2
    other = replace(truth, drawn=tuple(each + 0.1 for each in drawn))
    loss, slopes = knows.differentiate(other, squared_distance)
    assert float(loss) > 1e-6 and all(bool(slope.any()) for slope in slopes)


def test_an_orthogonal_direction_tells_its_batch_from_all_others():
    seen, images, labels = observe(4, "censor")
    matching = Matching(seen, effects="simulated")

    def distance(at):
        candidate = Candidate(images[at : at + 2], labels[at : at + 2])
        return float(matching.differentiate(candidate, squared_distance)[0])

    found = {at: distance(at) for at in range(0, 20, 2)}
    assert found.pop(4) < 1e-6
    assert min(found.values()) > 1e-2


def test_the_orthogonal_distances_slope_is_autograds():
    """A tensor of one entry or of zeros says nothing."""
    target = [torch.randn(5, 4, generator=stream()), torch.tensor([3.0]), torch.zeros(3)]
    update = [torch.randn_like(each).requires_grad_() for each in target]
    u, t = update[0].flatten(), target[0].flatten()
    expected = (u.norm() / t.norm()).log().square() + 20 * F.cosine_similarity(u, t, dim=0) ** 2
    norms = [each.norm() for each in target]
    loss, slopes = _orthogonal_distance([each.detach() for each in update], target, norms)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(slopes[0], torch.autograd.grad(expected, update[0])[0])
    assert not slopes[1].any() and not slopes[2].any()
