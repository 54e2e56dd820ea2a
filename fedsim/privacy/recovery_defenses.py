"""Says what theory bounds behind each defense: the paper's attack from above, any from below."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from fedsim.contracts.listing import key_table
from fedsim.contracts.plugins import parameters
from fedsim.privacy.contract import Count, Keys, PositiveSize
from fedsim.privacy.recovery import (
    TensorBound,
    gaussian_success_limit,
    least_direction_error,
    tensor_bound,
    tensor_rate,
)
from fedsim.types import FedsimError

_PositiveShare = Annotated[float, Field(gt=0, le=1)]


class RecoverySetting(Keys):
    """The two-layer head, its batch and the defenses of which bounds are asked."""

    width: Count
    """m, planted neurons."""
    dimension: Annotated[int, Field(ge=2, le=1_000_000_000)]
    """d of the features."""
    images: Count = 1
    """B, images of a batch."""
    classes: Count = 10
    """K."""
    activation: Literal["relu", "leaky_relu", "elu", "gelu", "sigmoid", "softplus", "tanh"] = "relu"
    """σ of the head."""
    independence: _PositiveShare = 1.0
    """π_min, the least singular value of the unit features: 1 if they are orthogonal."""
    steps: Count = 2
    """Local steps."""
    noise: Annotated[float, Field(ge=0, le=1e12)] = 1.0
    """σ, standard deviation of the noise over the size of one image's part of an entry of ∂L/∂A.
    It is neither an absolute deviation nor a noise multiplier."""
    clipped: Annotated[float, Field(ge=1, le=1e12)] = 1.0
    """max(1, |g| / S): by how much clipping shortens a gradient."""
    noise_multiplier: PositiveSize | None = None
    """z of DP-SGD: noise over the bound of one image's gradient. Without it DP-SGD has no limit."""
    clients: Count = 10
    """Clients in a sum."""
    kept: _PositiveShare = 0.5
    """Share of neurons that dropout keeps."""
    candidates: Count = 1000
    """Images among which an attacker may look for the true one, each as likely."""


@dataclass(frozen=True, kw_only=True)
class DefenseBounds:
    """What theory says of one defense; None where it says nothing, with the reason."""

    defense: str
    rate: float | None
    """`tensor_rate`, to which the tensor attack's error is proportional."""
    upper: float | None
    """Upper bound of the tensor attack's error, a root mean square distance of unit features, with
    the hidden constant and logarithms at 1."""
    valid: bool
    """Whether the conditions of the theorem hold, as far as they can be checked."""
    reason: str | None
    """Why the theorem does not apply, or says nothing; None if it applies."""
    lower: float | None
    """Least mean sine of the angle between a feature of uniform direction and the span of any
    attack's answers, one for each image: the span error of tables."""
    identified: float | None
    """Chance of any attack, at most, to have a given image of the batch among its answers: as many
    candidates as the batch has images. To have any of them is likelier."""
    lower_reason: str | None
    """Why `lower` and `identified` are None; None if they are not."""


def make_setting(keys: Mapping[str, Any]) -> RecoverySetting:
    """Builds a setting from values of its fields by name; one that misfits is a FedsimError."""
    from fedsim.scenario.explain import explain, known_keys

    try:
        return RecoverySetting.model_validate(dict(keys))
    except ValidationError as error:
        told = explain(error, dict(keys), known_keys(RecoverySetting))
        lines = [
            f"{'.'.join(map(str, path))}: {message}".removeprefix(": ") for path, message in told
        ]
        raise FedsimError("\n".join(f"recovery: {line}" for line in lines)) from error


def list_keys(as_json: bool = False) -> str:
    """Returns the keys of `recovery` with type, default, range and description, for a terminal."""
    keys = [asdict(parameter) for parameter in parameters(RecoverySetting)]
    return json.dumps(keys, indent=2) if as_json else "\n".join(key_table(keys, 80))


def recovery(keys: Mapping[str, Any]) -> list[DefenseBounds]:
    """Returns the bounds behind each of nine defenses of Liu et al., section 3, in a fixed order.

    `keys` has values of the fields of `RecoverySetting` by name.

    Raises:
        FedsimError: a key is missing, unknown or out of range.
    """
    asked = make_setting(keys)
    plain = asked.model_copy(update={"noise": 0.0, "clipped": 1.0})
    several = asked.steps > 1
    # Whatever is not random is a function of the data: an attacker may know it by heart.
    silent = "nothing random is released"
    return [
        _bounds("none", plain, silent),
        _bounds("local steps, one batch", plain, silent, steps=asked.steps),
        _bounds(
            "local steps, other batches",
            plain,
            silent,
            images=asked.images * asked.steps,
            steps=asked.steps if several else 1,
        ),
        _bounds("clipping", plain, silent),
        _bounds("noise", asked.model_copy(update={"clipped": 1.0}), _UNCLIPPED),
        _dp_sgd(asked),
        _bounds("aggregation", plain, silent, images=asked.images * asked.clients),
        _bounds("dropout", plain, "it hides neurons and adds no noise", kept=asked.kept),
        DefenseBounds(
            defense="pruning",
            **_no_upper(
                "entries that are kept depend on the weights, so that Stein's lemma does not "
                "apply (section 3.6)"
            ),
            **_no_lower(silent),
        ),
    ]


_UNCLIPPED = "noise without a bound of one image's part: a large enough gradient shows through it"


def _bounds(
    defense: str,
    asked: RecoverySetting,
    silent: str,
    *,
    images: int | None = None,
    steps: int = 1,
    kept: float = 1.0,
) -> DefenseBounds:
    count = images or asked.images
    rate = tensor_rate(
        width=asked.width,
        dimension=asked.dimension,
        images=count,
        classes=asked.classes,
        noise=asked.noise,
        clipped=asked.clipped,
        kept=kept,
    )
    found = tensor_bound(
        rate,
        # Neurons that a defense removed give no equation: the rest is a narrower head.
        width=max(1, math.floor(kept * asked.width)),
        dimension=asked.dimension,
        images=count,
        classes=asked.classes,
        activation=asked.activation,
        independence=asked.independence,
        steps=steps,
    )
    return DefenseBounds(defense=defense, **_upper(found), **_no_lower(silent))


def _dp_sgd(asked: RecoverySetting) -> DefenseBounds:
    found = _bounds("clipping and noise (DP-SGD)", asked, "noise_multiplier is not given")
    if asked.noise_multiplier is None:
        return found
    # An image moves the released sum by its bound at most, in each step that it is in.
    distance = math.sqrt(asked.steps) / asked.noise_multiplier

    def success(chance: float) -> float:
        return gaussian_success_limit(chance, distance)

    return replace(
        found,
        lower=least_direction_error(asked.dimension, success, asked.images),
        identified=success(min(1.0, asked.images / asked.candidates)),
        lower_reason=None,
    )


def _upper(found: TensorBound) -> dict[str, Any]:
    return {
        "rate": found.rate,
        "upper": found.value,
        "valid": found.is_valid,
        "reason": found.reason,
    }


def _no_upper(reason: str) -> dict[str, Any]:
    return _upper(TensorBound(reason=reason))


def _no_lower(reason: str) -> dict[str, Any]:
    return {"lower": None, "identified": None, "lower_reason": reason}


def describe(bounds: DefenseBounds) -> str:
    """Words the bounds of a defense in lines for a terminal."""
    above = "no bound" if bounds.upper is None else f"at most {bounds.upper:.4g} x constant"
    lines = [bounds.defense, f"    tensor attack  {above}"]
    if bounds.reason:
        lines.append(f"    not valid      {bounds.reason}")
    if bounds.lower is None or bounds.identified is None:
        lines.append(f"    any attack     no bound: {bounds.lower_reason}")
    else:
        lines.append(
            f"    any attack     mean span error at least {bounds.lower:.4g}; "
            f"a given image is among its answers with at most {bounds.identified:.4g}"
        )
    return "\n".join(lines)
