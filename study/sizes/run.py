"""Run the study of each size, the smallest first, and write the page of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from study.runner.settings import StudySettings
from study.runner.study import Study
from study.sizes.configuration import SizeStudy
from study.sizes.write import write_sizes

STOPPED = 130


def run_sizes(
    studies: Sequence[SizeStudy], settings: StudySettings, first_line: Callable[[SizeStudy], str]
) -> int:
    """Run what is missing at each size; return the exit status for the shell.

    A failed run does not keep the larger sizes from running. settings: of the study of all sizes.
    """
    directory, status = settings.results_dir / settings.name, 0
    for number, one in enumerate(studies, 1):
        print(f"size {number} of {len(studies)}: {first_line(one)}", flush=True)
        found = Study(one.symbols, one.text).run()
        page = write_sizes(directory, settings.sizes)
        if found == STOPPED:
            return STOPPED
        status = max(status, found)
        print()
    print(page)
    return status
