"""No test and no fault uses a GPU, and Ctrl-C reaches the processes that they start."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
CODE = """
import os, sys
class Finder:
    def find_spec(name, *others):
        if name == "torch":
            print(*(repr(os.environ[name]) for name in {names}))
            sys.exit()
sys.meta_path.insert(0, Finder)
import {module}, torch
"""


@pytest.mark.parametrize("module", ["tests.conftest", "tests.faults.__main__"])
def test_every_gpu_is_hidden_before_torch_is_loaded(module: str) -> None:
    visible = os.environ | dict.fromkeys(NAMES, "0")
    code = CODE.format(names=NAMES, module=module)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=visible, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["'' ''"]


@pytest.mark.parametrize("module", ["tests.conftest", "tests.faults.__main__"])
def test_ctrl_c_reaches_processes_of_a_run_in_the_background(module: str) -> None:
    code = f"import signal, {module}; print(signal.getsignal(signal.SIGINT) == signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"
