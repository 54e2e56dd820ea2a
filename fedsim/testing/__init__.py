"""Contract suites that the author of an attack or a defense inherits. They need pytest."""

from fedsim.testing.aggregation_defense import AggregationDefenseContract
from fedsim.testing.attack import AttackContract, RowAttackContract
from fedsim.testing.data_defense import DataDefenseContract
from fedsim.testing.defense import UpdateDefenseContract
from fedsim.testing.observation import make_observation
from fedsim.testing.release import make_kernel_release, make_release
from fedsim.testing.statistic_defense import StatisticDefenseContract
from fedsim.testing.training_defense import TrainingDefenseContract

__all__ = [
    "AggregationDefenseContract",
    "AttackContract",
    "DataDefenseContract",
    "RowAttackContract",
    "StatisticDefenseContract",
    "TrainingDefenseContract",
    "UpdateDefenseContract",
    "make_kernel_release",
    "make_observation",
    "make_release",
]
