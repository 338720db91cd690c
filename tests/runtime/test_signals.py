"""A process that is asked to stop finishes its step; only a second Ctrl-C ends it immediately."""

import signal
import subprocess
import sys

import pytest

ASKED = """
import signal, sys
from runtime.signals import Interrupted, Stop
stop = Stop().install()
stop.at_once = False  # it has made a step
for name in sys.argv[1:]:
    signal.raise_signal(signal.Signals[name])
try:
    stop.check()
except Interrupted as reason:
    print("saves, asked by", reason)
"""


@pytest.mark.parametrize(
    ("asked", "at_once"),
    [
        (["SIGHUP", "SIGTERM", "SIGTERM"], False),
        (["SIGINT", "SIGTERM"], False),
        (["SIGINT", "SIGINT"], True),
        (["SIGTERM", "SIGINT", "SIGHUP", "SIGINT"], True),
    ],
)
def test_only_the_second_interrupt_ends_a_process_before_it_has_saved(
    asked: list[str], at_once: bool
) -> None:
    done = subprocess.run([sys.executable, "-c", ASKED, *asked], capture_output=True, text=True)
    assert done.returncode == (128 + signal.SIGINT if at_once else 0), done.stderr
    assert done.stdout.startswith("saves") != at_once


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel call exists on Linux only")
@pytest.mark.parametrize(
    ("parent", "ends"), [("os.getppid()", False), ("os.getppid() + 1", True), ("0", False)]
)
def test_a_process_whose_parent_died_before_the_request_ends(parent: str, ends: bool) -> None:
    code = f"import os; from runtime.signals import end_with_parent; end_with_parent(9, {parent})"
    done = subprocess.run([sys.executable, "-c", code], check=False)
    assert done.returncode == (-signal.SIGKILL if ends else 0)
