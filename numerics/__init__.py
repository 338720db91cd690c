"""Accuracy debugging for any torch module: record what a training step computes, and compare two records.

Section numbers in this package are those of the "Foundation Model Training Accuracy Debugging Guide" (MindStudio).
The package needs torch and numpy, and nothing of the trainer. A name is imported at its first use, so that a program
that only compares needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numerics.errors import NumericsError as NumericsError
    from numerics.monitor.monitor import Monitor as Monitor
    from numerics.monitor.monitor import TrainerMon as TrainerMon
    from numerics.monitor.settings import MonitorConfig as MonitorConfig
    from numerics.record.debugger import PrecisionDebugger as PrecisionDebugger
    from numerics.record.record_settings import RecorderConfig as RecorderConfig
    from numerics.record.recorder import Recorder as Recorder
    from numerics.repeat.step import repeat_step as repeat_step
    from numerics.rounding.operation_checks import check_operation as check_operation
    from numerics.rounding.optimizer_checks import check_optimizer as check_optimizer
    from numerics.runs.logp_diff import logp_diff as logp_diff
    from numerics.search.fix_words import fix as fix
    from numerics.seed import seed_all as seed_all
    from numerics.setup.config_checker import ConfigChecker as ConfigChecker

MODULES = {
    "ConfigChecker": "numerics.setup.config_checker",
    "Monitor": "numerics.monitor.monitor",
    "MonitorConfig": "numerics.monitor.settings",
    "NumericsError": "numerics.errors",
    "PrecisionDebugger": "numerics.record.debugger",
    "Recorder": "numerics.record.recorder",
    "RecorderConfig": "numerics.record.record_settings",
    "check_operation": "numerics.rounding.operation_checks",
    "check_optimizer": "numerics.rounding.optimizer_checks",
    "fix": "numerics.search.fix_words",
    "TrainerMon": "numerics.monitor.monitor",
    "logp_diff": "numerics.runs.logp_diff",
    "repeat_step": "numerics.repeat.step",
    "seed_all": "numerics.seed",
}

__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)
