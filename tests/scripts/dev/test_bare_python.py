"""Set-up and clean run where no package is installed."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_set_up_detection_and_clean_need_the_standard_library_alone() -> None:
    modules = "scripts.dev.setup, scripts.dev.clean, runtime.detected_hardware"
    program = f"import sys; sys.path.insert(0, '.'); import {modules}"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
