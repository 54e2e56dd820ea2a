"""What DLG and iDLG share: L-BFGS on the squared distance of the updates."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedsim.attack import Attack, AttackState
from fedsim.types import Knowledge, Observation, Reconstruction
from fedsim_attacks.matching import Candidate, Matching, squared_distance

_HISTORY = 100
