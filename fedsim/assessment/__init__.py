"""Reports of what a tap recorded of anybody's Flower app, scored against what a witness saw."""

from fedsim.assessment.assess import AssessSettings, assess, built_model

__all__ = ["AssessSettings", "assess", "built_model"]
