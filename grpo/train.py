"""`python -m grpo.train RUN_DIR/config ARM SEED`: train or resume one run. `make grpo` starts it.

Progress goes to standard output, everything else to RUN_DIR/log.txt.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from grpo.grpo_settings import GrpoSettings
from grpo.records import EXIT_INTERRUPTED
from runtime import files
from runtime.dotconfig import read_symbols
from runtime.errors import UserError, one_line, run_command
from runtime.output import printable
from runtime.resolved_target import export_environment
from runtime.signals import Interrupted, Stop


def main() -> int:
    config, arm, seed = sys.argv[1:]
    settings = GrpoSettings.from_symbols(read_symbols(Path(config)))
    stop = Stop().install(os.getppid())
    export_environment()  # before torch is imported
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")

    def say(text: str) -> None:
        print(printable(text), file=out, flush=True)

    with files.open_append(settings.run_dir(arm, int(seed)) / "log.txt") as log:
        for descriptor in (1, 2):  # of libraries
            os.dup2(log.fileno(), descriptor)
        try:
            from grpo.worker import GrpoRun

            status = GrpoRun(settings, arm, int(seed), stop, say).run()
        except Interrupted:  # before its first step
            return EXIT_INTERRUPTED
        except Exception as error:
            known = isinstance(error, UserError)
            say(f"error: {error}" if known else f"error: {type(error).__name__}: {one_line(error)[:200]}")
            if not known:
                traceback.print_exc(file=log)
            return 1
    return EXIT_INTERRUPTED if status == "interrupted" else 0


if __name__ == "__main__":
    run_command(main)
