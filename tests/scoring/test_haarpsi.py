"""HaarPSI has the values of its authors' code, the laws of a likeness, and reasons for no value."""

import pytest
import torch

from fedsim.scoring.image import haarpsi

# Values of the authors' haarPsi.py (github.com/rgcda/haarpsi) for `pair`, one a shape.
PUBLISHED = {
    (3, 32, 32): 0.6088308443094407,
    (1, 25, 25): 0.5834595368569787,
    (3, 33, 40): 0.6234348004123532,
    (1, 16, 17): 0.4977401094510225,
}


def pair(shape):
    """Two waves of which the second is bent, brighter and clipped."""
    channels, height, width = shape
    c, y, x = torch.meshgrid(
        *(torch.arange(n, dtype=torch.float64) for n in (channels, height, width)), indexing="ij"
    )
    truth = 0.5 + 0.5 * torch.sin(0.37 * x + 0.11 * y * (c + 1))
    other = (truth + 0.3 * torch.cos(0.9 * y - 0.2 * x * (c + 1))).clamp(0, 1)
    return truth[None], other[None]


def value(a, b):
    (found,) = haarpsi(a, b).tolist()
    return found


@pytest.mark.parametrize("shape", PUBLISHED)
def test_value_is_that_of_the_authors_code(shape):
    truth, other = pair(shape)
    assert value(other, truth) == pytest.approx(PUBLISHED[shape], abs=1e-9)
    assert value(truth, other) == pytest.approx(PUBLISHED[shape], abs=1e-9)


def test_pictures_without_any_edge_have_a_value():
    black, white = torch.zeros(1, 3, 16, 16), torch.ones(1, 3, 16, 16)
    assert value(black, black) == pytest.approx(1.0)
    assert 0 < value(black, white) < 0.5


def test_each_image_is_judged_on_its_own():
    truth, other = pair((3, 32, 32))
    both = haarpsi(torch.cat([other, truth]), torch.cat([truth, truth]))
    assert both.tolist() == pytest.approx([value(other, truth), 1.0])


@pytest.mark.parametrize(
    ("shape", "cause"), [((2, 32, 32), "channels"), ((1, 15, 40), "15 x 40"), ((3, 8, 8), "8 x 8")]
)
def test_what_it_is_not_defined_for_has_a_reason(shape, cause):
    assert cause in haarpsi(torch.zeros(1, *shape), torch.zeros(1, *shape)).reason
