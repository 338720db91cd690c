"""Stand-ins for sbatch, squeue, scancel and scontrol, as one program under four names.

State is in FAKE_SLURM: jobs.json has the tasks, whose states a test sets, calls.txt every command line.
"""

import json
import os
import sys
from pathlib import Path

NAMES = ("sbatch", "squeue", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Write the programs; return the environment in which they are found first."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in NAMES:
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def read(folder: Path) -> list[dict[str, object]]:
    path = folder / "jobs.json"
    found: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    return found


def write(folder: Path, jobs: list[dict[str, object]]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))


def main() -> int:
    folder, name, words = Path(os.environ["FAKE_SLURM"]), sys.argv[1], sys.argv[2:]
    with (folder / "calls.txt").open("a") as calls:
        calls.write(f"{name} {' '.join(words)}\n")
    if (folder / f"{name}.fails").exists():
        print(f"{name}: error: no", file=sys.stderr)
        return 1
    jobs = read(folder)
    if name == "sbatch":
        options = dict(word.removeprefix("--").partition("=")[::2] for word in words)
        number = 1 + max((int(str(job["array"])) for job in jobs), default=0)
        last = int(options["array"].partition("%")[0].partition("-")[2])
        for index in range(last + 1):
            job: dict[str, object] = {"array": number, "index": index, "name": options["job-name"]}
            jobs.append(job | {"state": "PENDING"})
        write(folder, jobs)
        print(number)
    if name == "squeue":
        for job in jobs:
            print(f"{job['array']}_{job['index']}|{job['name']}|{job['state']}|node{job['index']}")
    if name == "scancel" and "--batch" not in words:
        write(folder, [job for job in jobs if f"{job['array']}_{job['index']}" not in words])
    return 0


if __name__ == "__main__":
    sys.exit(main())
