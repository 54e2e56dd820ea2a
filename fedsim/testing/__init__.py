"""Contract suites that the author of an attack or a defense inherits. They need pytest."""

from fedsim.testing.attack import AttackContract, RowAttackContract
from fedsim.testing.cases import make_kernel_release, make_observation, make_release
from fedsim.testing.defense import (
    AggregationDefenseContract,
    DataDefenseContract,
    ModelDefenseContract,
    StatisticDefenseContract,
    TrainingDefenseContract,
    UpdateDefenseContract,
)

__all__ = [
    "AggregationDefenseContract",
    "AttackContract",
    "DataDefenseContract",
    "ModelDefenseContract",
    "RowAttackContract",
    "StatisticDefenseContract",
    "TrainingDefenseContract",
    "UpdateDefenseContract",
    "make_kernel_release",
    "make_observation",
    "make_release",
]
