"""Whether torch.compile can make machine code here."""

import shutil

import pytest

NO_COMPILER = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="there is no C++ compiler here"
)
