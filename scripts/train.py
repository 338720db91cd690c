"""One run in its own process; started by the study, which reads its events from standard output.

python -m scripts.train PLAN               train the run of runs/NAME/plan.json, or continue it from its checkpoint
python -m scripts.train --answer QUESTION  answer a question of the study (study.planner), such as the times of steps
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
