"""The privacy calculator: δ(ε), ε(δ) and noise of any registered mechanism, by name."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError

from fedsim.contracts import plugins
from fedsim.privacy.contract import Answer, Calibration, Curve, KnownMechanism, Stated
from fedsim.types import FedsimError
from fedsim.words import nearest

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Found = TypeVar("_Found", bound="DataclassInstance")

GROUP = "fedsim.mechanisms"
QUESTIONS = {
    "delta": "curve",
    "epsilon": "curve",
    "calibrate": "calibration",
    "audit": "experiment",
}
"""The part of a mechanism that answers each question."""


def delta(mechanism: str, keys: Mapping[str, Any], *, epsilon: float) -> Answer:
    """Computes the least known δ of `mechanism` at ε >= 0; where the directions differ, the larger.

    `keys` are values of the mechanism's keys, which `fedsim privacy` lists. The field `delta` of
    the answer has δ, exact or a bound; an estimate has an `interval`. A FedsimError says that the
    mechanism or a key is unknown, a value is missing or out of range, or that the result cannot be
    computed.

    >>> round(delta("gaussian", {"sensitivity": 1, "sigma": 2}, epsilon=1.0).delta, 6)
    0.00683
    """
    made, at = curve(mechanism, keys), _epsilon(epsilon)
    with numerics_errors():
        return _with_unit(made, require_finite(made.delta(at)))


def epsilon(mechanism: str, keys: Mapping[str, Any], *, delta: float) -> Answer:
    """Computes the least known ε >= 0 of `mechanism` at δ in (0, 1), in the answer's `epsilon`.

    ε is inf if there is none. `keys`, intervals and errors are those of `delta`.
    """
    made, at = curve(mechanism, keys), probability(delta)
    with numerics_errors():
        return _with_unit(made, require_finite(made.epsilon(at)))


def calibrate(mechanism: str, keys: Mapping[str, Any], *, epsilon: float, delta: float) -> Answer:
    """Finds the least noise that makes `mechanism` (ε, δ)-private.

    The answer states the noise in a field such as `sigma` or `noise_multiplier`. Where the number
    of draws takes the place of noise, `draws` is the largest that is private.

    Args:
        mechanism: a name that `fedsim privacy` lists.
        keys: values of the keys of its calibration.
        epsilon: at least 0, at most 10^6.
        delta: in (0, 1).

    Raises:
        FedsimError: as of `delta`; the mechanism has no noise to find, or no noise is enough.
    """
    made = make(mechanism, "calibration", keys)
    assert isinstance(made, Calibration)
    least, at = _epsilon(epsilon), probability(delta)
    if least > _MOST_EPSILON:
        raise FedsimError(
            f"epsilon: got {least:g}; expected at most {_MOST_EPSILON:g}, beyond which noise is "
            "not looked for"
        )
    with numerics_errors():
        return _with_unit(made, require_finite(made.calibrate(least, at)))


def curve(mechanism: str, keys: Mapping[str, Any]) -> Curve:
    """Builds the privacy curve of `mechanism` from values of its keys; errors as `make`."""
    made = make(mechanism, "curve", keys)
    assert isinstance(made, Curve)
    return made


@contextmanager
def numerics_errors() -> Iterator[None]:
    """Makes numerical errors in the `with` block FedsimErrors, and ignores its RuntimeWarnings.

    Such errors are ArithmeticError, ValueError, RuntimeError and MemoryError.
    """
    with warnings.catch_warnings():
        # Branches that np.where discards may overflow; what matters is refused by `require_finite`.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            yield
        except (ArithmeticError, ValueError, RuntimeError, MemoryError) as error:
            raise _out_of_reach(f"{error}" or type(error).__name__) from error


def _with_unit(made: Stated, answer: Answer) -> Answer:
    return replace(answer, unit=made.unit, neighbours=made.neighbours())


def require_finite(found: _Found) -> _Found:
    """Returns the dataclass `found`; a FedsimError refuses NaN, and an infinite δ or noise."""
    for name, value in asdict(found).items():
        each = tuple(value.values()) if isinstance(value, dict) else value
        each = each if isinstance(each, tuple) else (each,)
        numbers = [number for number in each if isinstance(number, float)]
        # ε may be infinite (nothing is claimed), and so may log δ (δ = 0); noise may not.
        if any(map(math.isnan, numbers)) or (name in _FINITE and any(map(math.isinf, numbers))):
            raise _out_of_reach(f"{name} is not a finite number")
    return found


def _out_of_reach(cause: str) -> FedsimError:
    return FedsimError(f"beyond what can be computed: {cause}; use less extreme keys")


_FINITE = frozenset({"delta", "sigma", "noise_multiplier", "max_leverage", "scale", "bound"})
"""Fields of an answer that must not be infinite."""
_MOST_EPSILON = 1e6


def load(mechanism: str, part: str) -> type[BaseModel]:
    """Returns the class of a mechanism's `part`, whose fields are its keys.

    Parts are `curve`, `calibration` and `experiment`. A FedsimError says that there is no such
    mechanism, that it cannot be imported, or that it has no such part.
    """
    names = plugins.names(GROUP)
    if mechanism not in names:
        raise FedsimError(
            f"no mechanism named {mechanism!r}{nearest(mechanism, names)} "
            f"(known: {', '.join(names)})"
        )
    parts = plugins.load_as(GROUP, mechanism, (KnownMechanism,)).parts()
    if part not in parts:
        having = [row["mechanism"] for row in listing() if part in row["keys"]]
        raise FedsimError(
            f"{mechanism} has no {part}; mechanisms that have one: {', '.join(having)}"
        )
    return parts[part]


def make(mechanism: str, part: str, keys: Mapping[str, Any]) -> BaseModel:
    """Builds the `curve`, `calibration` or `experiment` of a mechanism from `keys`, values by name.

    A key that is unknown, missing or out of range is a FedsimError; so are the errors of `load`.
    """
    cls = load(mechanism, part)
    missing = [k for k, field in cls.model_fields.items() if field.is_required() and k not in keys]
    told = plugins.descriptions(cls)
    lines = [
        f"{key}: missing; add {key}=... ({' '.join(told.get(key, 'required').split()).rstrip('.')})"
        for key in missing
    ]
    try:
        return cls.model_validate(dict(keys))
    except ValidationError as error:
        from fedsim.scenario.explain import explain, known_keys

        said = explain(error, dict(keys), known_keys(cls))
        lines += [
            f"{'.'.join(map(str, path))}: {message}".removeprefix(": ")
            # Missing keys are listed above with their meaning;
            # pydantic's own line on them is left out.
            for path, message in said
            if path[-1:] not in [(key,) for key in missing]
        ]
        raise FedsimError("\n".join(f"{mechanism}: {line}" for line in lines)) from error


def parse(words: list[str] | None) -> dict[str, Any]:
    """Parses words `key=value` into ints, floats or else strings; None is no words.

    A word of another form, or a key that comes twice, is a FedsimError.
    """
    keys: dict[str, Any] = {}
    for word in words or []:
        key, sign, text = word.partition("=")
        if not (sign and key):
            raise FedsimError(f"{word!r} is not key=value; write for instance sigma=2")
        if key in keys:
            raise FedsimError(f"{key}: given twice; remove one")
        keys[key] = _number(text)
    return keys


def listing() -> list[dict[str, Any]]:
    """Lists every mechanism, sorted by name, as a dict with `mechanism`, `summary` and `keys`.

    `keys` maps each part of the mechanism to a list of dicts with name, type, default, required,
    range and description. A mechanism that cannot be imported has none, and a summary that starts
    with BROKEN.
    """
    rows = []
    for name in plugins.names(GROUP):
        try:
            cls = plugins.load_as(GROUP, name, (KnownMechanism,))
            keys = {
                part: [asdict(parameter) for parameter in plugins.parameters(known)]
                for part, known in cls.parts().items()
            }
            summary = (cls.__doc__ or "").partition("\n")[0]
        # One broken plugin must not hide all others.
        except plugins.PluginError as error:
            summary, keys = f"BROKEN: {error}", {}
        rows.append({"mechanism": name, "summary": summary, "keys": keys})
    return rows


def render(rows: list[dict[str, Any]], width: int = 80) -> str:
    """Returns the rows of `listing` as text for a terminal of `width` characters."""
    from fedsim.contracts.listing import key_table, wrap_text

    lines: list[str] = []
    for row in rows:
        lines += [row["mechanism"], *wrap_text(row["summary"], width, 4)]
        for part, keys in row["keys"].items():
            asked = [question for question, needs in QUESTIONS.items() if needs == part]
            lines += [f"    {', '.join(asked)}:", *key_table(keys, width)]
        lines.append("")
    return "\n".join(lines)


def _number(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _epsilon(value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise FedsimError(f"epsilon: got {value:g}; expected a finite number of at least 0")
    return float(value)


def probability(value: float) -> float:
    """Returns `value`, a δ, as a float; a FedsimError if it is not in (0, 1)."""
    if not 0 < value < 1:
        raise FedsimError(f"delta: got {value:g}; expected a probability above 0 and below 1")
    return float(value)


_LINES = {
    "forward": ("row removed", "#0f6b8f", "-"),
    "reverse": ("row added", "#c4622d", "--"),
    "both": ("both directions", "#0f6b8f", "-"),
}
_POINTS = 200
_LOWEST = -30.0
"""Lowest end of the axis, as a power of ten, unless the answer itself lies below."""


def draw(path: Path, mechanism: str, keys: Mapping[str, Any], answer: Answer) -> None:
    """Writes a PNG of the curve of `mechanism`, with an answer marked in it.

    Args:
        path: file to write, which ends in .png.
        mechanism: a name that `fedsim privacy` lists.
        keys: values of the keys of its curve.
        answer: what is marked, an answer of `delta` or `epsilon` with these keys.

    Raises:
        FedsimError: the path does not end in .png, a key is wrong, or the curve cannot be computed.
        OSError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix.lower() != ".png":
        raise FedsimError(f"plot: {path} does not end in .png; only that is written")
    made = curve(mechanism, keys)
    shown = answer.log_delta / math.log(10)
    lowest = min(_LOWEST, 1.2 * shown) if math.isfinite(shown) else _LOWEST
    floor = lowest * math.log(10)
    center = answer.epsilon if math.isfinite(answer.epsilon) else 0.0
    reach = max(2 * center, 1.0)
    with numerics_errors():
        while reach < 1e6 and made.delta(reach).log_delta > floor / 2:
            reach *= 2
        epsilons = np.linspace(0.0, reach, _POINTS)
        lines = made.log_deltas(epsilons)
    # The Agg canvas needs no display, and leaves pyplot's global state alone.
    figure = Figure(figsize=(6.4, 4.0), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for way, values in lines.items():
        label, color, style = _LINES[way]
        # A NaN leaves a gap in the line: δ = 0 has no place on a logarithmic axis.
        powers = np.where(np.isfinite(values), values / math.log(10), np.nan)
        axes.plot(epsilons, powers, style, color=color, label=label, linewidth=1.8)
    if math.isfinite(answer.epsilon) and math.isfinite(shown):
        axes.plot([answer.epsilon], [shown], "o", color="#222222", markersize=6)
        # Below 1e-308 a double underflows to 0, so that the power itself is written.
        power = f"{10**shown:.3g}" if shown > -300 else f"10^{shown:.1f}"
        axes.annotate(
            f"ε = {answer.epsilon:.4g}, δ = {power}",
            (answer.epsilon, shown),
            xytext=(8, 8),
            textcoords="offset points",
        )
    axes.set_xlim(0, reach)
    axes.set_ylim(lowest, 0.5)
    ticks = [float(tick) for tick in axes.get_yticks() if lowest <= tick <= 0]
    axes.set_yticks(ticks, [f"$10^{{{tick:g}}}$" if tick else "1" for tick in ticks])
    axes.set_xlabel(f"ε  ({answer.unit}; neighbours: {answer.neighbours})")
    axes.set_ylabel("δ")
    said = ", ".join(f"{key} = {value}" for key, value in keys.items())
    # A key's value, such as a path, may hold a dollar sign, which would begin a formula.
    axes.set_title(f"{mechanism}: {said}", loc="left", fontsize=10, parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if len(lines) > 1:
        axes.legend(frameon=False)
    figure.savefig(path, format="png")
