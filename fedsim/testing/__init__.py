"""Provides contract suites that authors of attacks and defenses inherit. They need pytest."""

from fedsim.testing.attack import AttackContract as AttackContract
from fedsim.testing.attack import CandidateAttackContract as CandidateAttackContract
from fedsim.testing.attack import RowAttackContract as RowAttackContract
from fedsim.testing.attack import SourceAttackContract as SourceAttackContract
from fedsim.testing.cases import make_kernel_release as make_kernel_release
from fedsim.testing.cases import make_observation as make_observation
from fedsim.testing.cases import make_release as make_release
from fedsim.testing.defense import AggregationDefenseContract as AggregationDefenseContract
from fedsim.testing.defense import DataDefenseContract as DataDefenseContract
from fedsim.testing.defense import ModelDefenseContract as ModelDefenseContract
from fedsim.testing.defense import StatisticDefenseContract as StatisticDefenseContract
from fedsim.testing.defense import TrainingDefenseContract as TrainingDefenseContract
from fedsim.testing.defense import UpdateDefenseContract as UpdateDefenseContract
