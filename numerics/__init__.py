"""Accuracy debugging for any torch module: record what a training step computes, and compare two records.

Section numbers in this package are those of the "Foundation Model Training Accuracy Debugging Guide" (MindStudio).
The package needs torch and numpy, and nothing of the trainer.
"""

from numerics.debugger import PrecisionDebugger
from numerics.errors import NumericsError
from numerics.record_config import RecorderConfig
from numerics.recorder import Recorder
from numerics.seed import seed_all

__all__ = ["NumericsError", "PrecisionDebugger", "Recorder", "RecorderConfig", "seed_all"]
