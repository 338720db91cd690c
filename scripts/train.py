"""One run in its own process: python -m scripts.train results/NAME/runs/B0/plan.json

It trains the run, or continues it from its last checkpoint. The study starts it, and by hand it does the same.
"""

from __future__ import annotations

import os
import sys

from study.worker import main

if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # To unload torch takes a sixth of its import. After a failed rank, threads of its group could abort the process.
    os._exit(status)
