"""Whether torch.compile can make machine code here."""

import shutil
import sys

import pytest

NO_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")) or " " in sys.prefix,
    reason="there is no C++ compiler here, or torch lies in a path with a space, where torch.compile cannot link",
)
