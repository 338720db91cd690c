"""Resolve the target of .config to the device of the study.

Compares the target table (gpu_specs), the hardware (detect) and torch's devices (torch_devices), and refuses
contradictions. Importing this module does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runtime import detected_hardware, ranks
from runtime.detected_hardware import Hardware, detect_hardware, detected_target_name
from runtime.gpu_specs import DEVICE_TYPES, GIB, TARGETS, Target, TargetError, match_target
from runtime.torch_devices import BFLOAT16_CAPABILITY, TorchDevice, TorchDevices, list_in_child

if TYPE_CHECKING:
    from runtime.settings import TargetConfig

ALLOCATOR_VARIABLES = {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"}
BUILDS = {
    "cuda": "for NVIDIA GPUs",
    "rocm": "for AMD GPUs",
    "npu": "for NPUs",
    "cpu": "for CPUs only",
}
# ROCm's names for cards that it does not know
NAMELESS = ("", "amd radeon graphics", "amd radeon(tm) graphics")


@dataclass(frozen=True)
class ResolvedTarget:
    """A row of the table and its device.

    device: torch's name ("cuda:0", "npu:0", "cpu"). memory_bytes: total. attention_backend: the expected
    kernel, after check_attention the one that ran. driver and torch are None in a plan without the machine.
    """

    target: Target
    device: str
    device_name: str
    memory_bytes: int
    dtype: str
    attention_backend: str
    driver: str | None
    torch: str | None
    note: str | None = None

    @property
    def device_type(self) -> str:
        """Return torch's device type: "cpu", "npu", or "cuda" for NVIDIA and AMD cards."""
        return self.device.partition(":")[0]

    @property
    def device_class(self) -> str:
        """Return "cpu", or "card" for every GPU and NPU: the key of tables of sizes."""
        return "cpu" if self.device_type == "cpu" else "card"


def resolve(
    config: TargetConfig,
    planning: bool = False,
    *,
    devices: TorchDevices | None = None,
    hardware: Hardware | None = None,
) -> ResolvedTarget:
    """Return the device of a study on this machine, or with `planning` the row alone.

    "auto" selects the first discrete GPU, else the CPU. TargetError where this machine lacks the named card, and where
    torch cannot use its GPU, unless .config was scaled to a CPU. devices, hardware: the reports of torch and the
    system; by default torch reports from another process, so that this one needs no memory of the GPU.
    """
    hardware = detect_hardware() if hardware is None else hardware
    if planning:
        return _plan(config, hardware)
    asked = config.name
    if asked == "cpu":
        return _resolve_cpu(config, hardware, None, devices.torch if devices else _torch_version())
    devices = devices or list_in_child()
    discrete = [device for device in devices.gpus if not device.integrated]
    if not discrete:
        if hardware.kind != "cpu" and not (asked == "auto" and config.scale_cpu):
            raise TargetError(_unusable(hardware, devices))
        if asked != "auto":
            raise TargetError(
                f"{_symbol(asked)}=y, but this machine has no GPU: {_ignored_gpus(hardware) or hardware.name}; {_AUTO}"
            )
        return _resolve_cpu(config, hardware, _why_cpu(hardware, config), devices.torch)
    rows = [_row_of(device, devices.kind, hardware) for device in discrete]
    fits = [(device, row) for device, row in zip(discrete, rows, strict=True) if asked in ("auto", row.name)]
    if not fits:
        here = ", ".join(f"{device.name} with {device.memory_bytes / GIB:.1f} GiB" for device in discrete)
        raise TargetError(
            f"{_symbol(asked)}=y ({TARGETS[asked].title}), but this machine has {here}; {_AUTO}"
        )
    number, needed = ranks.local("LOCAL_RANK", 0), ranks.local("LOCAL_WORLD_SIZE", config.ranks)
    if needed > len(fits):
        raise TargetError(
            f"CONFIG_RANKS={config.ranks} needs a card for each of {needed} processes on this machine, which has "
            f"{len(fits)}: {', '.join(device.name for device, _ in fits)}; fix: set CONFIG_RANKS={len(fits)}"
        )
    device, row = fits[number]
    return _resolve_gpu(config, device, row, devices, hardware)


_USE_CPU = "to train on the CPU, set CONFIG_TARGET_CPU=y: make defconfig-gpt2-ra-ablation+cpu"
_AUTO = "fix: set CONFIG_TARGET_AUTO=y, or start on a machine with that card"


def _torch_version() -> str:
    import torch

    return str(torch.__version__)


def _symbol(name: str) -> str:
    return f"CONFIG_TARGET_{name.upper().replace('-', '_')}"


def _row_of(device: TorchDevice, kind: str, hardware: Hardware) -> Target:
    """Return the row by torch's device name, or by the kernel's where ROCm has no name for the card."""
    name = device.name
    if hardware.kind == kind and " ".join(name.lower().split()) in NAMELESS:
        name = hardware.name
    return match_target(name, device.memory_bytes, kind)


def _unusable(hardware: Hardware, devices: TorchDevices) -> str:
    """Explain why torch cannot use the GPU, with the fix."""
    found = f"{hardware.name} is present, but torch {devices.torch} cannot use it"
    if devices.kind != hardware.kind:
        built = BUILDS[devices.kind]
        need = {"cuda": "CUDA", "rocm": "ROCm"}[hardware.kind]
        fix = f"install torch's {need} build into .venv, or name a Python that has it (make PYTHON=...)"
        return f"{found}: it was built {built}; fix: {fix}; {_USE_CPU}"
    reason = devices.trouble or f"it was built with {devices.runtime}"
    driver = f" (driver {hardware.driver})" if hardware.driver else ""
    if devices.kind == "rocm":
        fix = "give this user access to /dev/kfd and /dev/dri/renderD*"
    else:
        fix = "install a driver that supports this torch"
    return f"{found}{driver}: {reason}; fix: {fix}; {_USE_CPU}"


def _ignored_gpus(hardware: Hardware) -> str:
    return f"{hardware.name}; ignored: {', '.join(hardware.ignored)}" if hardware.ignored else ""


def _why_cpu(hardware: Hardware, config: TargetConfig) -> str | None:
    if hardware.kind != "cpu":
        return f".config is scaled to a CPU, so this is a CPU study; torch cannot use {hardware.name}"
    if not config.scale_cpu:
        here = _ignored_gpus(hardware) or hardware.name
        return f".config is scaled to {config.detected}, but this machine has no GPU ({here})"
    return _ignored_gpus(hardware) or None


def _resolve_cpu(
    config: TargetConfig, hardware: Hardware, note: str | None, torch: str | None
) -> ResolvedTarget:
    row = TARGETS["cpu"]
    dtype = row.dtype if config.dtype == "auto" else config.dtype
    slow = "bfloat16 is tens of times slower than float32 on a CPU without bfloat16 instructions"
    note = _join([note, slow if dtype == "bfloat16" else None])
    name, memory = (
        (hardware.name, hardware.memory_bytes)
        if hardware.kind == "cpu"
        else (detected_hardware.cpu_name(), 0)
    )
    memory = memory or detected_hardware.memory_bytes()
    return ResolvedTarget(row, "cpu", name, memory, dtype, row.attention_backend, None, torch, note)


def _resolve_gpu(
    config: TargetConfig, device: TorchDevice, row: Target, devices: TorchDevices, hardware: Hardware
) -> ResolvedTarget:
    discrete = [other for other in devices.gpus if not other.integrated]
    dtype, backend, notes = _precision(config, device, row)
    where = f"{DEVICE_TYPES[devices.kind]}:{device.index}"
    if row.memory_bytes is None:
        notes.append(
            f"the target table lacks {device.name}: torch reports {device.memory_bytes / GIB:.1f} GiB; the peak is "
            "unknown, so no utilisation is reported"
        )
    if len(discrete) > 1 and config.ranks == 1:
        notes.append(f"a run uses one of {len(discrete)} cards: {device.name}, {where}")
    ignored = [other.name for other in devices.gpus if other.integrated]
    if ignored:
        notes.append(f"integrated GPU ignored: {', '.join(ignored)}")
    driver = hardware.driver if hardware.kind == devices.kind else ""
    driver = f"{driver} ({devices.runtime})" if driver else devices.runtime
    return ResolvedTarget(
        row, where, device.name, device.memory_bytes, dtype, backend, driver, devices.torch, _join(notes)
    )


def _precision(config: TargetConfig, device: TorchDevice, row: Target) -> tuple[str, str, list[str | None]]:
    """Return dtype, the expected fused kernel, and notes."""
    able = device.capability >= BFLOAT16_CAPABILITY
    if config.dtype == "bfloat16" and not able:
        major, minor = device.capability
        raise TargetError(
            f"CONFIG_DTYPE_BFLOAT16=y, but {device.name} (compute capability {major}.{minor}) has no bfloat16; "
            "fix: set CONFIG_DTYPE_AUTO=y, which selects float32 there"
        )
    dtype = config.dtype if config.dtype != "auto" else row.dtype if able else "float32"
    if dtype != "float32" or "efficient" not in row.attention:
        return dtype, row.attention_backend, []
    reason = "is configured" if able else "is used, since the card has no bfloat16"
    note = f"float32 {reason}; flash attention supports half precision only, so the efficient kernel is used"
    return dtype, "efficient", [note]


def _plan(config: TargetConfig, hardware: Hardware) -> ResolvedTarget:
    """Return the row that .config names or was scaled to, on any machine."""
    name = config.detected if config.name == "auto" else config.name
    row = TARGETS.get(name)
    if row is None:
        raise TargetError(f"CONFIG_DETECTED={name} is not a target; fix: use one of {', '.join(TARGETS)}")
    if row.kind == "cpu":
        return _resolve_cpu(config, hardware, None, None)
    memory, title = row.memory_bytes, row.title
    if memory is None:
        if hardware.kind != row.kind or not hardware.memory_bytes:
            raise TargetError(
                f"the memory size of {name} is unknown on a machine without that card; "
                "fix: name a card, such as CONFIG_TARGET_A100_40G=y"
            )
        memory, title = hardware.memory_bytes, hardware.name
    dtype = row.dtype if config.dtype == "auto" else config.dtype
    backend = "efficient" if dtype == "float32" and "efficient" in row.attention else row.attention_backend
    device = f"{DEVICE_TYPES[row.kind]}:0"
    return ResolvedTarget(row, device, title, memory, dtype, backend, None, None, "planned without the card")


def _join(notes: list[str | None]) -> str | None:
    return "; ".join(note for note in notes if note) or None


def export_environment(
    name: str = "auto", detected: str | None = None, deterministic: bool = False, launched: bool = False
) -> None:
    """Set a target's variables in this process and its children. "auto": those of `detected`, or of this machine.

    Call before torch is loaded. Without them, a card with experimental fused kernels has none. torch.compile's cache of
    autograd graphs is disabled: its key lacks the selected attention kernel, so a graph with another one could run. The
    cache of compiled kernels remains. On NVIDIA cards the allocator's segments grow, which avoids fragmentation; any
    setting of the allocator by the user replaces that. deterministic: with the variables of CONFIG_DETERMINISTIC.
    launched: this process may be one of several of torchrun. Else the variables of a launcher, which a shell can have,
    are removed.
    """
    if not launched:
        for variable in os.environ.keys() - ranks.without_launcher(os.environ).keys():
            del os.environ[variable]
    if deterministic:
        from referee.numerics.seed import process_environment

        os.environ.update(process_environment())
    os.environ.setdefault("TORCHINDUCTOR_AUTOGRAD_CACHE", "0")
    if name == "auto":
        name = detected or detected_target_name()
    os.environ.update(TARGETS[name].environment)
    if TARGETS[name].kind == "cuda" and not ALLOCATOR_VARIABLES & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def target_record(resolved: ResolvedTarget) -> dict[str, Any]:
    """Return the `target` object of run.json."""
    return {
        "name": resolved.target.name,
        "device": resolved.device_name,
        "memory_bytes": resolved.memory_bytes,
        "dtype": resolved.dtype,
        "attention_backend": resolved.attention_backend,
        "torch": resolved.torch,
        "driver": resolved.driver,
    }


def scale_notice(config: TargetConfig, detected: str | None = None) -> str | None:
    """Return a notice where .config's scale does not fit this machine, else None.

    detected: the row of this machine. A target that .config names gives no notice, since the user chose it.
    """
    if config.name != "auto":
        return None
    detected = detected or detected_target_name()
    if config.scale_cpu == (detected == "cpu"):
        return None
    titles = {name: row.title for name, row in TARGETS.items()}
    here = titles.get(detected, detected)
    if config.scale_cpu:
        found = f"notice: .config is scaled to a CPU study, but this machine has {here}"
    else:
        scale = titles.get(config.detected, config.detected)
        found = f"notice: .config is scaled to {scale}, but this machine has no GPU"
    return f"{found}; to scale it to this machine: make defconfig-gpt2-ra-ablation, or your defconfig"
