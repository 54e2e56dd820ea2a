"""fedsim: what does a federated-learning deployment leak, and which defense is worth its price?

    import fedsim

    finished = fedsim.run("scenarios/quickstart.yaml")
    fedsim.attack(finished.observations()[0], "inverting_gradients")

    seen = fedsim.observe(model, gradient, input_shape=(3, 32, 32), classes=10, batch_size=1)
    fedsim.attack(seen, "inverting_gradients", truth=(images, labels))

    fedsim.preflight(model, input_shape=(3, 32, 32), classes=10, batch_size=1).verdict

Names are loaded when first used, so `import fedsim` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedsim.acceptance import validate
    from fedsim.assessment.assess import AssessSettings, assess
    from fedsim.attacking.observe import observe
    from fedsim.attacking.replay import attack
    from fedsim.contracts.grant import Grant
    from fedsim.federation.tapping import client_tap, tap, witness
    from fedsim.forecasting.preflight import preflight
    from fedsim.pipeline import run
    from fedsim.recording.files import load_observation
    from fedsim.scenario import Scenario, load

    __version__: str

_HOMES = {
    "assess": "fedsim.assessment.assess",
    "AssessSettings": "fedsim.assessment.assess",
    "Grant": "fedsim.contracts.grant",
    "attack": "fedsim.attacking.replay",
    "client_tap": "fedsim.federation.tapping",
    "observe": "fedsim.attacking.observe",
    "preflight": "fedsim.forecasting.preflight",
    "run": "fedsim.pipeline",
    "load_observation": "fedsim.recording.files",
    "Scenario": "fedsim.scenario",
    "load": "fedsim.scenario",
    "tap": "fedsim.federation.tapping",
    "witness": "fedsim.federation.tapping",
    "validate": "fedsim.acceptance",
}

__all__ = [
    "AssessSettings",
    "Grant",
    "Scenario",
    "assess",
    "attack",
    "client_tap",
    "load",
    "load_observation",
    "observe",
    "preflight",
    "run",
    "tap",
    "validate",
    "witness",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("importlib.metadata").version("fedsim")
    raise AttributeError(f"module 'fedsim' has no attribute {name!r}")
