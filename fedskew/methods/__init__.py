"""Methods, one short file each. Importing this package registers all of them in the catalogue."""

import sys
from types import ModuleType

from fedskew.methods import (  # noqa: F401
    afl,
    balancefl,
    bounds,
    ccvr,
    creff,
    ditto,
    fed3r,
    fedacg,
    fedavg,
    fedavgm,
    fedbabu,
    fedbn,
    fedcm,
    fedconcat,
    fedcurv,
    feddecorr,
    feddisco,
    feddyn,
    fedetf,
    fedexp,
    fedgc,
    fedgela,
    fedgf,
    fedgr,
    fedkd,
    fedlaw,
    fedlc,
    fedlesam,
    fedlf,
    fedlmd,
    fedmr,
    fedncm,
    fednh,
    fednova,
    fedntd,
    fedopt,
    fedper,
    fedprox,
    fedrep,
    fedrod,
    fedrs,
    fedsam,
    fedsmoo,
    fedsol,
    feduv,
    fedvls,
    focal_loss,
    fpl,
    label_smoothing,
    logit_adjustment,
    moon,
    perfedavg,
    pfedme,
    pkd,
    robust,
    scaffold,
    weighted_ce,
)
from fedskew.methods.catalogue import METHODS, Entry, find, is_reference_bound, matching_entries, method, register
from fedskew.methods.composition import Method, canonical_name, combined_entry, make_method
from fedskew.methods.method_list import MethodList, methods
from fedskew.methods.parts import (
    Client,
    Gradient,
    Objective,
    Outputs,
    Part,
    Seen,
    ServerRule,
    Solver,
    Tensors,
    Trained,
    Updates,
    Weighting,
    pack,
    unpack,
)
from fedskew.methods.personal import Personal, Phase
from fedskew.methods.regularisers import Regulariser
from fedskew.methods.stages import Calibration, Schedule, Stage, Survey

__all__ = [
    "METHODS",
    "Calibration",
    "Client",
    "Entry",
    "Gradient",
    "Method",
    "MethodList",
    "Objective",
    "Outputs",
    "Part",
    "Personal",
    "Phase",
    "Regulariser",
    "Schedule",
    "Seen",
    "ServerRule",
    "Solver",
    "Stage",
    "Survey",
    "Tensors",
    "Trained",
    "Updates",
    "Weighting",
    "canonical_name",
    "combined_entry",
    "find",
    "is_reference_bound",
    "make_method",
    "matching_entries",
    "method",
    "methods",
    "pack",
    "register",
    "unpack",
]


BUILT_IN = frozenset(METHODS)
"""The names of the methods that fedskew itself registers, in every process."""


class _CallablePackage(ModuleType):
    """Makes this package callable, because its name hides the public function `fedskew.methods()`."""

    def __call__(self, pattern: str = "*") -> MethodList:
        return methods(pattern)


sys.modules[__name__].__class__ = _CallablePackage
