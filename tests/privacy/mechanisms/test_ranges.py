"""What is out of the range of a closed form is refused, by the name of the argument."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from fedsim.privacy.baselines import mutual_information_leverage
from fedsim.privacy.mechanisms import (
    kernel_distance,
    laplace,
    laplace_vector,
    least_squares,
    projection,
    wishart,
)
from fedsim.privacy.numerics import gaussian
from fedsim.types import FedsimError


@pytest.mark.parametrize(
    ("function", "arguments", "said"),
    [
        (gaussian.log_delta, (math.nan, 1.0), "noise_multiplier: .*at least 0"),
        (gaussian.log_delta, ("much", 1.0), "noise_multiplier: .*at least 0"),
        (laplace._log_delta, (0.0, 1, 1, 1), "sensitivity"),
        (laplace._log_delta, (1, -1, 1, 1), "scale"),
        (laplace._log_delta, (1, 1, math.inf, 1), "bound"),
        (laplace.bound, (1.0, 0.0, 0.1), "epsilon: got 0; expected a number above 0"),
        (laplace_vector._log_delta, (0, 1, 1, 1, 1.0), "distance"),
        (laplace_vector._log_delta, (1.0, 1.0, 1.0, 0, 1.0), "dimension"),
        (projection.log_delta, (1.1, 2, 1.0), "leverage"),
        (projection.log_delta, (0.1, 0, 1.0), "r: got 0"),
        (projection.log_delta, (0.1, 2, -1.0), "epsilon"),
        (projection.max_leverage, (1.0, 0.0, 5), "delta: got 0"),
        (least_squares.log_delta, (0.3, 0.2, 5, 2, 1.0), "more than q"),
        (least_squares.log_delta, (0.1, 0.2, 5, math.nan, 1.0), "d: got nan"),
        (wishart.log_delta, (0, 0.1, 1.0), "k: got 0"),
        (wishart.log_delta, (5, -0.1, 1.0), "distance"),
        (kernel_distance.lift_distance, (math.nan, 1.0), "beta"),
        (kernel_distance.eigenvalues_under_lift, (1.0, 0.0), "lift"),
        (kernel_distance.eigenvalues_above_floor, (1.0, math.inf), "least"),
        (mutual_information_leverage, (1.0, 3), "delta"),
    ],
)
def test_what_is_out_of_range_is_refused(
    function: Callable[..., Any], arguments: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(FedsimError, match=said):
        function(*arguments)
