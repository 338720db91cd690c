"""Accuracy debugging for any torch module: record what a training step computes, and compare two records.

Section numbers in this package are those of the "Foundation Model Training Accuracy Debugging Guide" (MindStudio).
The package needs torch and numpy, and nothing of the trainer. A name is imported at its first use, so that a program
that only compares needs no torch.
"""

import importlib
from typing import Any

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
