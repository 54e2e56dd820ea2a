"""Attacks that allow for what a defense did, whoever did it: exact where that can be known."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedsim.contracts.views import apply_view
from fedsim.data.bundled import Faces
from fedsim.models.base import normalize
from fedsim.testing import make_observation
from fedsim.testing.cases import example_batch, example_spec, stream
from fedsim.types import Augmentation, Effect, ImageChange, Mixture
from fedsim_attacks.gradient_matching._changed_batches import (
    ChangedBatch,
    _fold_signs,
    _separate,
    _undo_view,
)
from fedsim_attacks.gradient_matching._matching import (
    Candidate,
    GivenDraws,
    Matching,
    _orthogonal_distance,
    squared_distance,
)

SPEC = example_spec((1, 16, 16), 3)
BOX = (torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
COPIES = Augmentation(views=((), (ImageChange(name="flip_x"),)), copies=True)
DRAWN = Augmentation(views=((ImageChange(name="flip_y"),),), copies=False)


def blocks(count, seed=0):
    """Pictures (N, 1, 16, 16) of a few plain rectangles, whose edges are sparse."""
    draw = stream(seed)
    images = torch.full((count, 1, 16, 16), 0.1)
    for image in images:
        for _ in range(3):
            top, left = torch.randint(0, 10, (2,), generator=draw).tolist()
            image[:, top : top + 6, left : left + 5] = float(torch.rand((), generator=draw))
    return images


@pytest.mark.parametrize("effects", ["ignored", "simulated"])
def test_the_objective_of_copies_is_zero_at_the_images(effects):
    images, labels = example_batch(2)
    seen, _ = make_observation(images, labels, defense=[{"name": "oasis"}])
    matching = Matching(seen, effects=effects)
    at = Candidate(normalize(images, seen.model), labels)
    distance = float(matching.differentiate(at, squared_distance)[0])
    assert distance < 1e-6 if effects == "simulated" else distance > 1e-3


def test_a_drawn_view_is_found_among_all_and_undone():
    images = blocks(2, seed=3)
    views = [
        [ImageChange(name="translate_x", by=share), ImageChange(name="contrast", by=factor)]
        for share in (-0.25, 0.25)
        for factor in (0.6, 1.0)
    ]
    shown = torch.cat(
        [apply_view(images[:1], views[0], SPEC), apply_view(images[1:], views[3], SPEC)]
    )
    found = _undo_view(shown, views, SPEC, BOX)
    # A quarter of each image left the frame; the rest is what it was.
    torch.testing.assert_close(found[0, :, :, :12], images[0, :, :, :12], atol=0.05, rtol=0)
    torch.testing.assert_close(found[1, :, :, 4:], images[1, :, :, 4:], atol=0.05, rtol=0)


def test_each_step_and_its_labels_are_undone_apart():
    images, labels = example_batch(2)
    seen, _ = make_observation(images, labels)
    drawn = replace(seen, effect=Effect(batch=(DRAWN,)))
    flipped = normalize(images.flip(2), seen.model)
    matching = Matching(drawn, effects="simulated")
    found, kept = matching.undo_changes(flipped, labels, stream())
    # Total variation, which fills what a view does not show, smooths a little.
    torch.testing.assert_close(found, normalize(images, seen.model), atol=0.1, rtol=0)
    assert torch.equal(kept, labels)
    hidden = Matching(drawn, effects="ignored").undo_changes(flipped, labels, stream())[0]
    assert torch.equal(hidden, flipped)


def test_mixtures_are_separated():
    images = blocks(3)
    mixing = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.7, 0.3], [0.3, 0.0, 0.7]])
    mixed = torch.einsum("ij,jchw->ichw", mixing, images)
    apart = _separate(mixed, BOX, stream())
    found = torch.einsum("ij,jchw->ichw", apart.float(), mixed)
    nearest = torch.cdist(images.flatten(1), found.flatten(1), p=torch.inf).amin(1)
    blurred = torch.cdist(images.flatten(1), mixed.flatten(1), p=torch.inf).amin(1)
    assert float(nearest.max()) < 0.05 < float(blurred.min())


def test_labels_are_separated_with_their_images():
    images = blocks(2)
    mixing = torch.tensor([[0.7, 0.3], [0.3, 0.7]])
    mixed = torch.einsum("ij,jchw->ichw", mixing, images)
    change = ChangedBatch.read([Mixture(images=2)])
    _, labels = change.undo(mixed, mixing @ torch.eye(2), SPEC, BOX, stream())
    torch.testing.assert_close(labels.double(), torch.eye(2).double(), atol=0.1, rtol=0)


def test_folding_hides_nothing_but_the_side_of_the_mean():
    inputs = torch.tensor([[[[0.5, -1.5], [-0.2, 0.0]]]])
    wide, narrow = torch.full((1, 1, 1), 2.0), torch.full((1, 1, 1), 1.0)
    torch.testing.assert_close(_fold_signs(inputs, (-narrow, wide)), inputs.abs())
    torch.testing.assert_close(_fold_signs(inputs, (-wide, narrow)), -inputs.abs())


def test_copies_behind_chance_are_not_allowed_for():
    """Each copy is then an input of its own, of which there are more than images."""
    assert ChangedBatch.read([DRAWN, COPIES]) == ChangedBatch(copied=(COPIES,), drawn=(DRAWN,))
    assert ChangedBatch.read([COPIES, DRAWN]) == ChangedBatch()
    assert ChangedBatch.read([COPIES, Mixture(images=2)]) == ChangedBatch()


MODEL = {"model": "convnet", "model_parameters": {"width": 8}, "num_classes": 2}


def observe(first, defense):
    faces = Faces(size=16).load()
    pixels, labels = faces.train_images.float() / 255, faces.train_labels
    mine = slice(first, first + 2)
    seen, _ = make_observation(pixels[mine], labels[mine], defense=[{"name": defense}], **MODEL)
    return seen, normalize(pixels, seen.model), labels


def chance():
    return torch.Generator().manual_seed(1)


def test_draws_are_variables_and_the_objective_is_zero_at_the_true_ones():
    seen, images, labels = observe(0, "precode")
    blind = Matching(seen).random_candidate(labels[:2], chance())
    matching = Matching(seen, effects="simulated")
    drawn = matching.random_candidate(labels[:2], chance()).drawn
    assert not blind.drawn and [tuple(each.shape) for each in drawn] == [(2, 256)]
    truth = replace(Candidate(images[:2], labels[:2]), drawn=drawn)
    # The simulator hands out no draws: the client of these ones is simulated here.
    with GivenDraws(drawn):
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
    target = [torch.randn(5, 4, generator=chance()), torch.tensor([3.0]), torch.zeros(3)]
    update = [torch.randn_like(each).requires_grad_() for each in target]
    u, t = update[0].flatten(), target[0].flatten()
    expected = (u.norm() / t.norm()).log().square() + 20 * F.cosine_similarity(u, t, dim=0) ** 2
    norms = [each.norm() for each in target]
    loss, slopes = _orthogonal_distance([each.detach() for each in update], target, norms)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(slopes[0], torch.autograd.grad(expected, update[0])[0])
    assert not slopes[1].any() and not slopes[2].any()
