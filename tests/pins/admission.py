"""Whether each variant of the tests is admitted, and by which check it is refused: tests/fixtures/pins/admission.tsv.

The tests that examine a variant hold the result to its row. `python -m tests.pins.admission --write` runs them and
stores the results, in a commit of its own that says why.
"""

from __future__ import annotations

import os
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from ra.admission.results import Examination
from tests.pins.pinned import FOLDER

TABLE = FOLDER / "admission.tsv"
ADMITTED = "admitted"
RECORD = "RA_RECORD_ADMISSION"  # a file: results are appended to it instead of compared
TESTS = ("tests/ra/admission", "tests/ra/test_custom.py")


@cache
def results() -> dict[str, str]:
    """Return arm -> ADMITTED, or the check that refuses it first."""
    return dict(line.split("\t") for line in TABLE.read_text(encoding="utf-8").splitlines())


def hold_to_pin(found: Examination) -> None:
    """Assert that an examination has the pinned result."""
    result = found.violations[0].check if found.violations else ADMITTED
    if os.environ.get(RECORD):
        with Path(os.environ[RECORD]).open("a", encoding="utf-8") as file:
            file.write(f"{found.variant}\t{result}\n")
    else:
        assert result == results().get(found.variant), [found.variant, *map(str, found.violations)]


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    with tempfile.TemporaryDirectory() as temporary:
        recorded = Path(temporary) / "admission"
        os.environ[RECORD] = str(recorded)
        if pytest.main([*TESTS, "-q"]):
            sys.exit("a test failed: no result is stored")
        TABLE.write_text("".join(sorted(set(recorded.read_text(encoding="utf-8").splitlines(True)))))
