"""A whole Slurm on this machine: munged, slurmctld and two nodes. Needs root and the packages of Debian."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.faults.harness import CannotDoError

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol")
NODES = ("n0", "n1")
SECONDS = 60.0  # until the nodes are idle

CONFIGURATION = """ClusterName=sandbox
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=10
KillWait=20
InactiveLimit=0
MaxJobCount={jobs}
MinJobAge=5
JobRequeue=1
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
"""


class SlurmCluster:
    """Start it with `with`; its commands find it by `environment`."""

    def __init__(self, folder: Path, jobs: int = 10_000) -> None:
        """jobs: most that it knows at once."""
        missing = [name for name in PROGRAMS if not shutil.which(name)]
        if missing:
            raise CannotDoError(f"{', '.join(missing)} missing; fix: apt-get install slurm-wlm munge")
        if os.geteuid():
            raise CannotDoError("Slurm on one machine needs root")
        self.folder, self.jobs = folder, jobs
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        host, folder = socket.gethostname(), self.folder
        (folder / "munge").mkdir(parents=True)
        (folder / "munge").chmod(0o755)
        key = folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        munge = folder / "munge"
        options = (f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed"))
        self._start("munged", "--force", "--foreground", f"--socket={munge}/socket", *options)
        ports = [_free_port() for _ in range(len(NODES) + 1)]
        lines = [CONFIGURATION.format(host=host, port=ports[0], folder=folder, jobs=self.jobs)]
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=2000 State=UNKNOWN\n"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP\n"]
        (folder / "slurm.conf").write_text("".join(lines))
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        self._start("slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        deadline = time.monotonic() + SECONDS
        while self.run("sinfo", "-h", "-N", "-o", "%T").split() != ["idle"] * len(NODES):
            if time.monotonic() > deadline:
                self.__exit__()
                raise CannotDoError(f"Slurm's nodes are not idle after {SECONDS:.0f} s: {self.run('sinfo')}")
            time.sleep(0.2)
        return self

    def _start(self, *command: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{command[0]}.out").open("ab") as log:
            environment = os.environ | self.environment
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        self._processes.append(process)
        return process

    def start_node(self, node: str) -> None:
        self._nodes[node] = self._start("slurmd", "-D", "-N", node)

    def kill_node(self, node: str, place: Path) -> None:
        """Send SIGKILL to the node's slurmd and to all jobs, which run in the folder `place`, as in a power cut."""
        named = (*_named("scripts.train"), *_named("slurm_script"))
        jobs = [process for process in named if _folder(process) == place.resolve()]
        self._signal([self._nodes[node].pid, *_named("slurmstepd: ["), *jobs])
        self._nodes[node].wait()

    def _signal(self, processes: list[int]) -> None:
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=os.environ | self.environment, capture_output=True, text=True, timeout=60
        )
        return done.stdout + done.stderr

    def __exit__(self, *error: object) -> None:
        if (self.folder / "slurm.conf").exists():
            self.run("scancel", "--user=root")
            time.sleep(1.0)
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _named(words: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if words in line:
            found.append(int(path.name))
    return found


def _folder(process: int) -> Path | None:
    try:
        return Path(f"/proc/{process}/cwd").resolve()
    except OSError:
        return None


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
