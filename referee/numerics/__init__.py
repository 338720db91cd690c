"""Accuracy debugging for any torch module: record what a training step computes, and compare two records.

Section numbers in this package are those of the "Foundation Model Training Accuracy Debugging Guide" (MindStudio).
The package needs torch and numpy, and nothing of the trainer. A name is imported at its first use, so that a program
that only compares needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from referee.errors import NumericsError as NumericsError
    from referee.numerics.monitor.monitor import Monitor as Monitor
    from referee.numerics.monitor.targets import MonitorConfig as MonitorConfig
    from referee.numerics.monitor.trainer_mon import TrainerMon as TrainerMon
    from referee.numerics.record.record_settings import RecorderConfig as RecorderConfig
    from referee.numerics.record.recorder import PrecisionDebugger as PrecisionDebugger
    from referee.numerics.record.recorder import Recorder as Recorder
    from referee.numerics.repeat.repeat_evidence import repeat_step as repeat_step
    from referee.numerics.rounding.operation_checks import check_operation as check_operation
    from referee.numerics.runs.logp_diff import logp_diff as logp_diff
    from referee.numerics.search.fix_words import fix as fix
    from referee.numerics.seed import seed_all as seed_all
    from referee.numerics.setup.config_checker import ConfigChecker as ConfigChecker

MODULES = {
    "ConfigChecker": "referee.numerics.setup.config_checker",
    "Monitor": "referee.numerics.monitor.monitor",
    "MonitorConfig": "referee.numerics.monitor.targets",
    "NumericsError": "referee.errors",
    "PrecisionDebugger": "referee.numerics.record.recorder",
    "Recorder": "referee.numerics.record.recorder",
    "RecorderConfig": "referee.numerics.record.record_settings",
    "check_operation": "referee.numerics.rounding.operation_checks",
    "fix": "referee.numerics.search.fix_words",
    "TrainerMon": "referee.numerics.monitor.trainer_mon",
    "logp_diff": "referee.numerics.runs.logp_diff",
    "repeat_step": "referee.numerics.repeat.repeat_evidence",
    "seed_all": "referee.numerics.seed",
}

__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
