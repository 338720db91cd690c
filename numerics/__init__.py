"""Accuracy debugging for any torch module: record what a training step computes, and compare two records.

Section numbers in this package are those of the "Foundation Model Training Accuracy Debugging Guide" (MindStudio).
The package needs torch and numpy, and nothing of the trainer. A name is imported at its first use, so that a program
that only compares needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numerics.checklist.pack import ConfigChecker
    from numerics.debugger import PrecisionDebugger
    from numerics.errors import NumericsError
    from numerics.fixes.apply import fix
    from numerics.logp.diff import logp_diff
    from numerics.record_config import RecorderConfig
    from numerics.recorder import Recorder
    from numerics.seed import seed_all

MODULES = {
    "ConfigChecker": "checklist.pack",
    "NumericsError": "errors",
    "PrecisionDebugger": "debugger",
    "Recorder": "recorder",
    "RecorderConfig": "record_config",
    "fix": "fixes.apply",
    "logp_diff": "logp.diff",
    "seed_all": "seed",
}

__all__ = [
    "ConfigChecker",
    "NumericsError",
    "PrecisionDebugger",
    "Recorder",
    "RecorderConfig",
    "fix",
    "logp_diff",
    "seed_all",
]


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"numerics.{MODULES[name]}"), name)
