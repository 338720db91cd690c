"""Detect the hardware without torch, fast enough for every `make defconfig`. Standard library only.

nvidia-smi lists NVIDIA cards, or /proc/driver/nvidia where nvidia-smi is missing or hangs. The kernel's compute
topology (/sys/class/kfd) lists AMD cards. Integrated GPUs are ignored. Other accelerators are known to torch alone
(torch_devices). Memory is total memory, not free memory.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runtime.gpu_specs import GIB, TARGETS, TargetError, match_target

# Read the CPU's name, and the memory and cores available to this process. Standard library only.
#
# A container's limits (cgroup v1 and v2) and the scheduler's affinity apply, not the machine's totals.


SYS, PROC = Path("/sys"), Path("/proc")
UNLIMITED = 2**60  # bytes; cgroup v1 writes "no limit" as a number just below 2**63


def read_text(path: Path) -> str:
    """Read a file's text without surrounding white space; empty where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def read_integer(path: Path) -> int:
    """Read a file's whole number; 0 where there is none."""
    text = read_text(path)
    return int(text) if text.isdecimal() else 0


def cpu_name(proc: Path = PROC) -> str:
    """Read the processor's model name."""
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", read_text(proc / "cpuinfo"), re.MULTILINE)
    return found.group(1).strip() if found else "CPU"


def memory_bytes(sys: Path = SYS, proc: Path = PROC) -> int:
    """Return the total memory available to this process, in bytes: the machine's, or a container's limit."""
    found = re.search(r"^MemTotal:\s+(\d+) kB", read_text(proc / "meminfo"), re.MULTILINE)
    total = int(found.group(1)) * 1024 if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [read_integer(folder / "memory.max") for folder in _groups(sys, proc, "")]
    limits += [read_integer(folder / "memory.limit_in_bytes") for folder in _groups(sys, proc, "memory")]
    return min([total, *(limit for limit in limits if 0 < limit < UNLIMITED)])


def allowed_cpus() -> set[int]:
    """Return the logical CPUs that this process may use; all of them where the system has no affinity (macOS)."""
    affinity = getattr(os, "sched_getaffinity", None)
    found: set[int] = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    return found


def cpu_threads(requested: int, sys: Path = SYS, proc: Path = PROC, allowed: set[int] | None = None) -> int:
    """Return `requested` threads, or for 0 one thread per physical core available to this process.

    Hyper-threads share a core's arithmetic units, so they count once. allowed: logical CPUs (default: the
    scheduler's affinity). A container's CPU quota is an upper bound; the result is at least 1.
    """
    if requested:
        return requested
    allowed = allowed_cpus() if allowed is None else allowed
    topology = [sys / "devices/system/cpu" / f"cpu{cpu}" / "topology" for cpu in sorted(allowed)]
    siblings = [read_text(folder / "thread_siblings_list") or str(folder) for folder in topology]
    quotas = [len(set(siblings)), *_cpu_quotas(sys, proc)]
    return max(1, int(min(quotas)))


def _cpu_quotas(sys: Path, proc: Path) -> Iterator[float]:
    """Yield the CPU limit of each enclosing cgroup, in CPUs. Groups without a limit are skipped."""
    for folder in _groups(sys, proc, ""):
        quota, _, period = read_text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)
    for folder in [*_groups(sys, proc, "cpu"), *_groups(sys, proc, "cpu,cpuacct")]:
        granted, period_us = (
            read_integer(folder / "cpu.cfs_quota_us"),
            read_integer(folder / "cpu.cfs_period_us"),
        )
        if granted and period_us:
            yield granted / period_us


def _groups(sys: Path, proc: Path, controller: str) -> list[Path]:
    """List this process's cgroup of a controller ("": v2) and its parents. A container may show any part of them."""
    path = ""
    for line in read_text(proc / "self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, where = rest.partition(":")
        if controllers == controller or (controller and controller in controllers.split(",")):
            path = where.strip("/")
    root = sys / "fs/cgroup" / controller
    parts = [part for part in path.split("/") if part and part != ".."]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


TIMEOUT_SECONDS = 8  # of a vendor's tool, which may need seconds to load the driver
NVIDIA_SMI = ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi")
QUERY = "--query-gpu=uuid,name,memory.total,mig.mode.current,driver_version"

# Processor graphics by LLVM target, from LLVM's AMDGPU guide. Datacentre APUs (gfx94x) count as cards.
INTEGRATED = {
    "gfx801", "gfx810", "gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037",
    "gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153",
}  # fmt: skip
LEAST_MEMORY_BYTES = 2 * GIB  # an AMD GPU with less counts as processor graphics
AMD_NAMES = {  # PCI device -> name, for the cards of the target table; sysfs seldom has names
    0x7448: "AMD Radeon PRO W7900",
    0x744A: "AMD Radeon PRO W7900 Dual Slot",
    0x74A1: "AMD Instinct MI300X",
    0x74B5: "AMD Instinct MI300X VF",
}

Run = Callable[[Sequence[str]], str]


@dataclass(frozen=True)
class Hardware:
    """The device of a study. count: visible discrete GPUs of its kind, 0 for a CPU.

    memory_bytes: total, 0 where unknown. ignored: the skipped devices and tools, each with a reason in brackets.
    """

    kind: str  # "cuda", "rocm" or "cpu"
    name: str
    memory_bytes: int
    count: int
    ignored: tuple[str, ...] = ()
    driver: str = ""


@dataclass(frozen=True)
class Card:
    """A GPU in the driver's order. index: its number there; slices of a card (MIG) share it."""

    kind: str
    index: int
    name: str
    memory_bytes: int
    uuid: str
    integrated: bool = False


def detected_target_name(environment: Mapping[str, str] = os.environ) -> str:
    """Return the row of the target table for this machine. RA_DETECTED in the environment overrides it."""
    if name := environment.get("RA_DETECTED"):
        if name not in TARGETS:
            raise TargetError(f"RA_DETECTED={name} is not a target; fix: use one of {', '.join(TARGETS)}")
        return name
    found = detect_hardware(environment=environment)
    return match_target(found.name, found.memory_bytes, found.kind).name


def run_tool(command: Sequence[str]) -> str:
    """Return a command's output. OSError where it is missing, SubprocessError where it fails or takes too long.

    A tool that hangs is killed without a wait, since it cannot end while the driver blocks it.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, list(command), output)
    return output


def detect_hardware(
    sys: Path = SYS,
    proc: Path = PROC,
    run: Run = run_tool,
    environment: Mapping[str, str] = os.environ,
) -> Hardware:
    """Return the first visible discrete GPU (NVIDIA, AMD), else the CPU. A missing tool is no error."""
    ignored: list[str] = []
    nvidia, nvidia_driver = _nvidia(proc, run, ignored)
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        nvidia = _fastest_first(nvidia)
    nvidia = _visible(nvidia, ("CUDA_VISIBLE_DEVICES",), environment, ignored)
    amd = _visible(_amd(sys), ("ROCR_VISIBLE_DEVICES",), environment, ignored)
    amd = [replace(card, index=index) for index, card in enumerate(amd)]
    amd = _visible(amd, ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), environment, ignored)
    ignored += [f"{card.name} (integrated)" for card in amd if card.integrated]
    amd = [card for card in amd if not card.integrated]
    for cards, others, driver in ((nvidia, amd, nvidia_driver), (amd, [], _amd_driver(sys, proc))):
        if cards:
            ignored += [f"{card.name} (another vendor)" for card in others]
            first = cards[0]
            return Hardware(first.kind, first.name, first.memory_bytes, len(cards), tuple(ignored), driver)
    return Hardware("cpu", cpu_name(proc), memory_bytes(sys, proc), 0, tuple(ignored))


def _visible(
    cards: list[Card], variables: Sequence[str], environment: Mapping[str, str], ignored: list[str]
) -> list[Card]:
    """Return the cards that the first set variable selects, in its order. `ignored` receives the others.

    Entries are indices or prefixes of UUIDs. An invalid entry ends the list, as in CUDA and HIP.
    """
    variable = next((name for name in variables if name in environment), None)
    if variable is None:
        return cards
    chosen: list[Card] = []
    for entry in environment[variable].split(","):
        entry = entry.strip()
        fits = [
            card
            for card in cards
            if card not in chosen
            and (card.index == int(entry) if entry.isdecimal() else entry and card.uuid.startswith(entry))
        ]
        if not fits:
            break
        chosen.append(fits[0])
    ignored += [f"{card.name} (hidden by {variable})" for card in cards if card not in chosen]
    return chosen


def _fastest_first(cards: list[Card]) -> list[Card]:
    """Sort cards in CUDA's default order as far as the table allows: by peak, by memory, by the driver's index."""

    def slowness(card: Card) -> tuple[float, int]:
        return -(match_target(card.name, card.memory_bytes, card.kind).peak_flops or 0), -card.memory_bytes

    order = sorted(
        {card.index for card in cards}, key=lambda i: min(slowness(c) for c in cards if c.index == i)
    )
    return [replace(card, index=new) for new, old in enumerate(order) for card in cards if card.index == old]


def _tool_failure(tool: str, error: Exception) -> str:
    """Return why a vendor's tool gave no answer."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"{tool} (no answer within {TIMEOUT_SECONDS} s)"
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.output or "").strip().splitlines()
        return f"{tool} ({lines[0] if lines else f'exit status {error.returncode}'})"
    return f"{tool} ({getattr(error, 'strerror', error)})"


# -- NVIDIA -----------------------------------------------------------------------------------------------------


def _nvidia(proc: Path, run: Run, ignored: list[str]) -> tuple[list[Card], str]:
    """Return NVIDIA cards and the driver's version."""
    for tool in NVIDIA_SMI:
        try:
            return _from_nvidia_smi(run([tool, QUERY, "--format=csv,noheader,nounits"]), tool, run)
        except FileNotFoundError:
            continue
        except (OSError, subprocess.SubprocessError) as error:
            ignored.append(_tool_failure("nvidia-smi", error))
        break
    return _from_proc(proc), ""


def _from_nvidia_smi(output: str, tool: str, run: Run) -> tuple[list[Card], str]:
    cards: list[Card] = []
    driver, slices = "", None
    rows = [line.split(", ") for line in output.splitlines()]
    for index, (uuid, name, memory, mig, version) in enumerate(row for row in rows if len(row) == 5):
        driver = version
        if mig == "Enabled":
            slices = run([tool, "-L"]) if slices is None else slices
            cards += _mig_slices(slices, index, uuid, name)
        else:
            # "[N/A]" where it shares the CPU's memory
            size = int(memory) * 2**20 if memory.isdecimal() else 0
            cards.append(Card("cuda", index, name, size, uuid))
    return cards, driver


def _mig_slices(listing: str, index: int, uuid: str, name: str) -> list[Card]:
    """Parse the slices of a card from `nvidia-smi -L`. A profile such as 3g.20gb includes the gigabytes."""
    _, _, below = listing.partition(f"(UUID: {uuid})")
    lines = re.split(r"^GPU ", below, flags=re.MULTILINE)[0]
    found = re.findall(r"MIG (\S*?(\d+)gb\S*)\s.*\(UUID: (\S+)\)", lines)
    return [
        Card("cuda", index, f"{name} MIG {profile}", int(gb) * GIB, slice_id)
        for profile, gb, slice_id in found
    ]


def _from_proc(proc: Path) -> list[Card]:
    """Return NVIDIA cards by name. The kernel module reports no memory size."""
    cards = []
    for index, file in enumerate(sorted((proc / "driver/nvidia/gpus").glob("*/information"))):
        fields = dict(re.findall(r"^([^:]+):\s+(.*)$", read_text(file), re.MULTILINE))
        if "Model" in fields:
            cards.append(Card("cuda", index, fields["Model"].strip(), 0, fields.get("GPU UUID", "").strip()))
    return cards


# -- AMD --------------------------------------------------------------------------------------------------------


def _amd(sys: Path) -> list[Card]:
    """Return AMD GPUs in the order of the compute topology, which is HIP's. Skips nodes closed to this process."""
    nodes = sys / "class/kfd/kfd/topology/nodes"
    cards: list[Card] = []
    for node in sorted(nodes.glob("*"), key=lambda path: (len(path.name), path.name)):
        found = dict(re.findall(r"^(\w+) (\d+)$", read_text(node / "properties"), re.MULTILINE))
        values = {key: int(value) for key, value in found.items()}
        if values.get("simd_count", 0) and values.get("vendor_id", 0x1002) == 0x1002:
            cards.append(_amd_card(len(cards), node, values, sys))
    return cards


def _amd_card(index: int, node: Path, values: Mapping[str, int], sys: Path) -> Card:
    device = sys / f"class/drm/renderD{values.get('drm_render_minor', 0)}/device"
    version = values.get("gfx_target_version", 0)
    target = f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"  # 110000 -> gfx1100
    banks = [read_text(file) for file in node.glob("mem_banks/*/properties")]
    local = [text for text in banks if re.search(r"^heap_type [12]$", text, re.MULTILINE)]  # 0 is the host's
    memory = sum(
        int(size) for text in local for size in re.findall(r"^size_in_bytes (\d+)", text, re.MULTILINE)
    )
    memory = memory or read_integer(device / "mem_info_vram_total")
    name = (
        AMD_NAMES.get(values.get("device_id", 0)) or read_text(device / "product_name") or f"AMD GPU {target}"
    )
    integrated = is_integrated(target, memory) or values.get("cpu_cores_count", 0) > 0
    return Card("rocm", index, name, memory, f"GPU-{values.get('unique_id', 0):016x}", integrated)


def is_integrated(target: str, memory_bytes: int, flagged: bool = False) -> bool:
    """Return whether an AMD GPU is processor graphics. target: LLVM's name; flagged: the driver's flag."""
    target = target.partition(":")[0]  # gfx942:sramecc+:xnack-
    if target.startswith(("gfx94", "gfx95")):
        return False
    return flagged or target in INTEGRATED or 0 < memory_bytes < LEAST_MEMORY_BYTES


def _amd_driver(sys: Path, proc: Path) -> str:
    version = read_text(sys / "module/amdgpu/version") or f"Linux {read_text(proc / 'sys/kernel/osrelease')}"
    return f"amdgpu {version}"
