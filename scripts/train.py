"""One run in its own process; started by the study, which reads its events from standard output.

python -m scripts.train STUDY_DIR VARIANT SEED                     train, or continue from the last checkpoint
python -m scripts.train STUDY_DIR VARIANT SEED --time S --micro M  only time steps for S seconds, for the plan
    [--beside VARIANT ...]  time these for S seconds each as well, a step of each in turn
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
