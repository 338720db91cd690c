"""`make faults`: do every harm in the table to a small study, and print what was expected and what was seen."""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from tests.faults import data, failures, signals, storage, surroundings  # noqa: F401  (they fill the table)
from tests.faults.harness import TABLE, Bench, CannotDoError


def main(words: list[str]) -> int:
    """All rows, or those whose name contains one of the words."""
    rows = [row for row in TABLE if not words or any(word in row.name for word in words)]
    failed = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for number, row in enumerate(rows, 1):
            began = time.monotonic()
            try:
                seen = row.inflict(bench)
                verdict = "as expected" if seen == row.expected else "OTHERWISE"
            except CannotDoError as reason:
                seen, verdict = f"not done: {reason}", "not done"
            except Exception as error:
                seen, verdict = f"{type(error).__name__}: {error}", "OTHERWISE"
            failed += verdict == "OTHERWISE"
            print(f"{number:2d}/{len(rows)}  {row.name}  ({time.monotonic() - began:.0f} s)")
            print(f"       expected  {row.expected}")
            print(f"       seen      {seen}")
            print(f"       {verdict}", flush=True)
    print(f"{len(rows) - failed} of {len(rows)} rows are as expected or could not be done here")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
