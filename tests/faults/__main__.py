"""`make faults`: inject every fault of the table into a small study and print expected and observed outcome.

Exit status: 0 if every row is as expected, 1 if one is not, 2 if some could not be injected here and the others are
as expected.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests import process_defaults  # noqa: F401  (before torch is loaded)
from tests.faults import (  # noqa: F401  (they fill the table)
    clusters,
    damaged,
    data,
    failures,
    grpo_studies,
    ranks,
    seed_demands,
    signals,
    storage,
    surroundings,
)
from tests.faults.harness import TABLE, Bench, CannotDoError

AS_EXPECTED, OTHERWISE, NOT_DONE = "as expected", "OTHERWISE", "not done here"


def main(words: list[str]) -> int:
    """All rows, or those whose name contains one of the words; the exit status."""
    rows = [row for row in TABLE if not words or any(word in row.name for word in words)]
    if not rows:
        print(f"no row of the table has {' or '.join(words)} in its name, of {len(TABLE)}", file=sys.stderr)
        return 1
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        bench = Bench(Path(folder))
        for number, row in enumerate(rows, 1):
            began = time.monotonic()
            try:
                found = row.inflict(bench)
                verdict = AS_EXPECTED if found == row.expected else OTHERWISE
            except CannotDoError as reason:
                found, verdict = f"nothing: {reason}", NOT_DONE
            except Exception as error:
                found, verdict = f"{type(error).__name__}: {error}", OTHERWISE
            verdicts[verdict] += 1
            print(f"{number:2d}/{len(rows)}  {row.name}  ({time.monotonic() - began:.0f} s)")
            print(f"       expected  {row.expected}")
            print(f"       observed  {found}")
            print(f"       {verdict}", flush=True)
    counts = [f"{verdicts[verdict]} {verdict}" for verdict in (AS_EXPECTED, OTHERWISE, NOT_DONE)]
    print(f"{len(rows)} rows: {', '.join(counts)}")
    return 1 if verdicts[OTHERWISE] else 2 if verdicts[NOT_DONE] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
