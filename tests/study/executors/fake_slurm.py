"""Stand-ins for sbatch, squeue, scancel and scontrol, as one program under four names.

State is in FAKE_SLURM: jobs.json has the tasks, calls.txt every command line. With FAKE_SLURM_RUN=1, sbatch starts the
tasks at once; otherwise a test sets their states.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

NAMES = ("sbatch", "squeue", "scancel", "scontrol")


def install(folder: Path) -> dict[str, str]:
    """Write the programs; return the environment in which they are found first."""
    programs = folder / "bin"
    programs.mkdir(parents=True)
    for name in NAMES:
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{__file__}" {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", "FAKE_SLURM": str(folder)}


def read(folder: Path) -> list[dict[str, object]]:
    path = folder / "jobs.json"
    found: list[dict[str, object]] = json.loads(path.read_text()) if path.exists() else []
    return found


def write(folder: Path, jobs: list[dict[str, object]]) -> None:
    (folder / "jobs.json").write_text(json.dumps(jobs))


def is_alive(process: int) -> bool:
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return words[0] != "Z"


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
        script = sys.stdin.read()
        (folder / f"{number}.sh").write_text(script)
        last = int(options["array"].partition("%")[0].partition("-")[2])
        for index in range(last + 1):
            job: dict[str, object] = {"array": number, "index": index, "name": options["job-name"]}
            job |= {"state": "PENDING", "process": 0}
            if os.environ.get("FAKE_SLURM_RUN"):
                of_task = {"SLURM_ARRAY_JOB_ID": str(number), "SLURM_ARRAY_TASK_ID": str(index)}
                with (folder / f"{number}_{index}.log").open("w") as log:
                    process = subprocess.Popen(
                        ["bash", str(folder / f"{number}.sh")],
                        env=os.environ | of_task,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                job |= {"state": "RUNNING", "process": process.pid}
            jobs.append(job)
        write(folder, jobs)
        print(number)
    if name == "squeue":
        for job in jobs:
            if not job["process"] or is_alive(int(str(job["process"]))):
                print(f"{job['array']}_{job['index']}|{job['name']}|{job['state']}|node{job['index']}")
    if name == "scancel":
        for job in jobs:
            if f"{job['array']}_{job['index']}" in words and job["process"]:
                os.kill(int(str(job["process"])), signal.SIGTERM)
        if "--batch" not in words:
            write(folder, [job for job in jobs if f"{job['array']}_{job['index']}" not in words])
    return 0


if __name__ == "__main__":
    sys.exit(main())
