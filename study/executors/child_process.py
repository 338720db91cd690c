"""Training processes of this machine: their environment, their part of the machine, and requests to stop them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from runtime import files, ranks
from runtime.attempt import PLACE
from runtime.detected_hardware import SYS, cpu_threads, read_text
from runtime.errors import UserError
from runtime.resolved_target import ResolvedTarget
from runtime.torch_devices import TorchDevices, list_in_child

EXIT_FINISHED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 3
EXIT_OUT_OF_MEMORY, EXIT_NOT_FINITE, EXIT_DISK_FULL = 4, 5, 6
PATIENCE_SECONDS = 60.0  # for a step to end and a checkpoint to be written
# Training allocates the same large buffers at every step. A heap that never returns them avoids their page faults.
KEEP_HEAP = "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=17179869184:glibc.malloc.top_pad=67108864"
# An OpenMP thread that waits for another spins this many times, then sleeps. libgomp's default spins longer: two busy
# processes beside a run on two cores made its steps 7 times as long, and twice as long in CPU time. With this value
# they are twice as long, and equal in CPU time.
SPIN_COUNT = "1000"


# variables, or their beginnings, that set the number of threads or their processors
THREADS = (
    "OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "OMP_DYNAMIC", "OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_",
    "MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS", "NUMEXPR_",
)  # fmt: skip


def process_settings(environment: Mapping[str, str], heap: str | None = KEEP_HEAP) -> dict[str, str]:
    """Return the environment with the settings of a training process; those that it has already win.

    The variables of launchers are left out, and those that set threads: their number is the plan's.
    heap: GLIBC_TUNABLES of the process; None for the system's heap.
    """
    alone = ranks.without_launcher(environment)
    environment = {name: text for name, text in alone.items() if not name.startswith(THREADS)}
    settings = {"GLIBC_TUNABLES": heap} if heap else {}
    if "OMP_WAIT_POLICY" not in environment:
        settings["GOMP_SPINCOUNT"] = SPIN_COUNT
    return settings | dict(environment)


@dataclass(frozen=True)
class Slot:
    """A part of a machine for one process. environment: selects its card. cpus: logical CPUs; empty: all."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: frozenset[int] = frozenset()

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment, with the name."""
        return {**self.environment} | ({PLACE: self.name} if self.name else {})


def exit_text(status: int) -> str:
    """Describe an exit status."""
    if status >= 0:
        return f"exit status {status}"
    name = signal.Signals(-status).name
    hint = {
        "SIGKILL": " (by the out-of-memory killer of the system, or by kill -9)",
        "SIGBUS": " (a data shard was cut short while it was mapped, or the disk failed: `make data` checks)",
    }.get(name, "")
    return f"killed by {name}{hint}"


class StopAsked(BaseException):
    """A signal asked the study to stop."""


class Session:
    """Signals of a study and the training processes that they are passed on to.

    asked: number of requests to stop. lock: descriptor that holds the study's lock. module: of the processes.

    The first request is passed on to the runs, which save. A second SIGINT kills the runs. Further SIGTERMs and
    SIGHUPs, and a first SIGINT after them, change nothing: a supervisor, make and a terminal may each send one.
    """

    def __init__(self, module: str = "scripts.train") -> None:
        self.module = module
        self.asked, self._interrupts = 0, 0
        self.lock: int | None = None
        self.children: list[subprocess.Popen[bytes]] = []
        self._closing = False

    def start(self, plan: Path, log: Path, slot: Slot) -> subprocess.Popen[bytes]:
        """Start the process of a plan, which receives requests to stop; StopAsked after such a request.

        log: the file of its output. slot: the part of the machine that it may use.
        """
        if self.asked:
            raise StopAsked
        with files.open_append(log) as output:
            child = subprocess.Popen(
                [sys.executable, "-m", self.module, str(plan), "--parent", str(os.getpid())],
                env=process_settings(os.environ) | slot.variables,
                pass_fds=() if self.lock is None else (self.lock,),  # held as long as the process lives
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C reaches the study alone, which passes it on
            )
        if slot.cpus:  # long before it loads torch, which counts them
            os.sched_setaffinity(child.pid, slot.cpus)
        self.children.append(child)
        return child

    def close(self) -> None:
        """Ignore further requests: the study is stopping."""
        self._closing = True

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Handle SIGINT, SIGTERM and SIGHUP in the block."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._ask) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._closing:
            return
        self.asked += 1
        self._interrupts += number == signal.SIGINT
        if not self.children:
            raise StopAsked
        if number == signal.SIGINT and self._interrupts > 1:
            for child in self.children:
                child.kill()
            return
        if self.asked == 1 or number == signal.SIGINT:
            presses = "again" if self._interrupts else "twice"
            print(f"\nstopping after this step, which is saved (Ctrl-C {presses}: immediately)", flush=True)
        if self.asked == 1:
            for child in self.children:
                child.send_signal(signal.SIGTERM)


VARIABLES = {
    "cuda": ("CUDA_VISIBLE_DEVICES",),
    "rocm": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES",),
}
RUN_BYTES = 2**30  # of a run of small steps: about 0.4 GiB of Python and torch, and up to 0.25 GiB of a step


def local_slots(
    wanted: int,
    resolved: ResolvedTarget,
    threads: int,
    ranks: int = 1,
    small: bool = False,
) -> list[Slot]:
    """Return `wanted` slots of this machine. 0: one per card; on a CPU as many as fit if steps are small, else one.

    threads: of a run; 0: its share of the cores. small: whether a run uses few threads well.
    ranks: processes of a run; a run of several has the whole machine.
    One slot is the whole machine. UserError where there are too few cards of the study's kind, or too few cores.
    """
    if ranks > 1 and wanted > 1:
        raise UserError(
            f"CONFIG_SLOTS={wanted} and CONFIG_RANKS={ranks}: a run of several processes uses the whole machine; "
            "fix: CONFIG_SLOTS=1 or CONFIG_RANKS=1"
        )
    if ranks == 1 and resolved.device_type == "cpu":
        # without affinity, runs that know their threads share the cores unbound
        found = cores() or [frozenset()] * (cpu_threads(0) if threads else 0)
        wanted = wanted or runs_that_fit(threads, len(found), resolved.memory_bytes, small)
        return [Slot("")] if wanted == 1 else cpu_slots(wanted, threads, found)
    if wanted == 1 or ranks > 1:
        return [Slot("")]
    return card_slots(wanted, resolved, list_in_child())


def runs_that_fit(threads: int, found: int, memory_bytes: int, small: bool) -> int:
    """Return the runs at once on a CPU with `found` cores: one, or for small steps as many as have cores and memory."""
    return max(1, min(found // max(threads, 1), memory_bytes // RUN_BYTES)) if small else 1


def cores() -> list[frozenset[int]]:
    """Return the logical CPUs of each physical core that this process may use, within a container's quota."""
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    groups: dict[str, set[int]] = {}
    for cpu in allowed:
        siblings = read_text(SYS / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        groups.setdefault(siblings or str(cpu), set()).add(cpu)
    return [frozenset(group) for group in groups.values()][: cpu_threads(0)]


def threads_notice(resolved: ResolvedTarget, threads: int, ranks: int, found: int) -> str:
    """Return a notice where a run has more threads than the `found` cores; else ""."""
    need = max(threads, 1) * ranks
    if resolved.device_type != "cpu" or need <= found:
        return ""
    return (
        f"notice: a run has {need} threads (CONFIG_CPU_THREADS x CONFIG_RANKS), and {found} cores are available: it is "
        "slower than with as many threads as cores, which a new study can have"
    )


def cpu_slots(wanted: int, threads: int, found: list[frozenset[int]]) -> list[Slot]:
    """Return slots of equally many cores. found: the logical CPUs of each core."""
    each = len(found) // wanted
    if each < max(threads, 1):
        need = f"{wanted} x CONFIG_CPU_THREADS={threads}" if threads else f"CONFIG_SLOTS={wanted}"
        raise UserError(
            f"{need} needs {wanted * max(threads, 1)} cores, and {len(found)} are available; a run with fewer cores "
            f"than threads is many times slower; fix: CONFIG_SLOTS={max(1, len(found) // max(threads, 1))}"
        )
    return [
        Slot(f"slot {number}", cpus=frozenset().union(*found[number * each : (number + 1) * each]))
        for number in range(wanted)
    ]


def card_slots(
    wanted: int,
    resolved: ResolvedTarget,
    devices: TorchDevices,
    environment: Mapping[str, str] = os.environ,
) -> list[Slot]:
    """Return slots of one card each, all of the study's kind. wanted: 0 for all of them."""
    alike = [
        gpu
        for gpu in devices.gpus
        if not gpu.integrated
        and (gpu.name, gpu.memory_bytes) == (resolved.device_name, resolved.memory_bytes)
    ]
    wanted = wanted or len(alike)
    if wanted > len(alike):
        others = [gpu.name for gpu in devices.gpus if gpu not in alike]
        rest = f" (not used: {', '.join(others)}, since a study has one kind of card)" if others else ""
        raise UserError(
            f"CONFIG_SLOTS={wanted} needs {wanted} cards, and this machine has {len(alike)} x "
            f"{resolved.device_name}{rest}; fix: CONFIG_SLOTS={max(1, len(alike))}"
        )
    if wanted == 1:
        return [Slot("")]
    known = VARIABLES[devices.kind]
    variable = next((name for name in known if name in environment), known[0])
    visible = [entry.strip() for entry in environment.get(variable, "").split(",") if entry.strip()]
    entries = [visible[gpu.index] if visible else str(gpu.index) for gpu in alike[:wanted]]
    return [Slot(f"card {entry}", {variable: entry}) for entry in entries]
