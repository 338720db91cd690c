"""From the target that .config asks for to the device that a study runs on.

The table is gpt2.hardware.gpu_specs, what the machine has is seen by gpt2.hardware.detect (without torch)
and by torch itself; this
module brings the three together and refuses contradictions. Importing it does not import torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt2.hardware import cpu
from gpt2.hardware.detect import Hardware, detect_hardware, detected_target_name
from gpt2.hardware.gpu_specs import GIB, TARGETS, Target, TargetError, match
from gpt2.hardware.torch_devices import BFLOAT16_CAPABILITY, TorchDevice, TorchDevices, list_torch_devices

if TYPE_CHECKING:
    from gpt2.config.config import TargetConfig

NAMELESS = (
    "",
    "amd radeon graphics",
    "amd radeon(tm) graphics",
)  # ROCm's names where it lacks a list of names


@dataclass(frozen=True)
class ResolvedTarget:
    """A row of the table and the device that stands for it.

    device: torch's name ("cuda:0", "cpu"). memory_bytes: its total. attention_backend: the fused kernel expected, or
    after check_attention the one that ran. driver and torch are None where a plan needed no machine.
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
        """torch's name of the kind of device: "cpu", or "cuda", which ROCm's cards are as well."""
        return self.device.partition(":")[0]


def resolve(
    config: TargetConfig,
    planning: bool = False,
    *,
    seen: TorchDevices | None = None,
    hardware: Hardware | None = None,
) -> ResolvedTarget:
    """The device of a study on this machine, or with `planning` the row alone, which needs no machine.

    "auto" takes the first discrete GPU, or the CPU where there is none. TargetError where a named card is not here,
    and where a GPU is here that torch cannot use, unless .config was scaled to a CPU. `seen` and `hardware` replace
    what torch and the system report.
    """
    hardware = detect_hardware() if hardware is None else hardware
    if planning:
        return _plan(config, hardware)
    asked = config.name
    if asked == "cpu":
        return _resolve_cpu(config, hardware, [], (seen or list_torch_devices()).torch)
    select = seen is None
    seen = seen or list_torch_devices()
    discrete = [device for device in seen.devices if not device.integrated]
    if not discrete:
        if hardware.kind != "cpu" and not (asked == "auto" and config.scale_cpu):
            raise TargetError(_unusable(hardware, seen))
        if asked != "auto":
            raise TargetError(
                f"{_symbol(asked)}=y, but no GPU is here: {_ignored_gpus(hardware) or hardware.name}; {_AUTO}"
            )
        return _resolve_cpu(config, hardware, [_why_cpu(hardware, config)], seen.torch)
    rows = [_row_of(device, seen.kind, hardware) for device in discrete]
    fits = [(device, row) for device, row in zip(discrete, rows, strict=True) if asked in ("auto", row.name)]
    if not fits:
        here = ", ".join(f"{device.name} with {device.memory_bytes / GIB:.1f} GiB" for device in discrete)
        raise TargetError(
            f"{_symbol(asked)}=y ({TARGETS[asked].title}), but this machine has {here}; {_AUTO}"
        )
    device, row = fits[0]
    if select and device.index:  # what torch does without a device named should be done on this one
        import torch

        torch.cuda.set_device(device.index)
    return _resolve_gpu(config, device, row, seen, hardware)


_ON_CPU = "to train on the CPU, make the .config anew with CONFIG_TARGET_CPU=y"
_AUTO = "right: CONFIG_TARGET_AUTO=y, or start where that card is"


def _symbol(name: str) -> str:
    return f"CONFIG_TARGET_{name.upper().replace('-', '_')}"


def _row_of(device: TorchDevice, kind: str, hardware: Hardware) -> Target:
    """The row by torch's name, or by the kernel's where ROCm has no name for the card."""
    name = device.name
    if hardware.kind == kind and " ".join(name.lower().split()) in NAMELESS:
        name = hardware.name
    return match(name, device.memory_bytes, kind)


def _unusable(hardware: Hardware, seen: TorchDevices) -> str:
    """The message where a GPU is here and torch cannot use it, with the remedy."""
    found = f"{hardware.name} is here, but torch {seen.torch} cannot use it"
    if seen.kind != hardware.kind:
        built = {"cuda": "for NVIDIA GPUs", "rocm": "for AMD GPUs", "cpu": "for CPUs only"}[seen.kind]
        need = {"cuda": "CUDA", "rocm": "ROCm"}[hardware.kind]
        remedy = f"it was built {built}; install torch's {need} build into .venv, or name an interpreter that has it"
        return f"{found}: {remedy} (make PYTHON=...); {_ON_CPU}"
    reason = seen.trouble or f"it was built with {seen.runtime}"
    driver = f" (driver {hardware.driver})" if hardware.driver else ""
    fix = (
        "may this user open /dev/kfd and /dev/dri/renderD*?"
        if seen.kind == "rocm"
        else "is the driver new enough?"
    )
    return f"{found}{driver}: {reason}; {fix} Otherwise, {_ON_CPU}"


def _ignored_gpus(hardware: Hardware) -> str:
    return f"{hardware.name}; passed over: {', '.join(hardware.ignored)}" if hardware.ignored else ""


def _why_cpu(hardware: Hardware, config: TargetConfig) -> str | None:
    if hardware.kind != "cpu":
        return f"on the CPU as .config was scaled to one, although {hardware.name} is here, which torch cannot use"
    if not config.scale_cpu:
        here = _ignored_gpus(hardware) or hardware.name
        return f".config was scaled to {config.detected}, but no GPU is here ({here})"
    return _ignored_gpus(hardware) or None


def _resolve_cpu(
    config: TargetConfig, hardware: Hardware, notes: list[str | None], torch: str | None
) -> ResolvedTarget:
    row = TARGETS["cpu"]
    dtype = row.dtype if config.dtype == "auto" else config.dtype
    if dtype == "bfloat16":
        notes = [*notes, "bfloat16 is tens of times slower than float32 on a CPU without instructions for it"]
    name, memory = (hardware.name, hardware.memory_bytes) if hardware.kind == "cpu" else (cpu.cpu_name(), 0)
    memory = memory or cpu.memory_bytes()
    return ResolvedTarget(row, "cpu", name, memory, dtype, row.attention_backend, None, torch, _join(notes))


def _resolve_gpu(
    config: TargetConfig, device: TorchDevice, row: Target, seen: TorchDevices, hardware: Hardware
) -> ResolvedTarget:
    discrete = [other for other in seen.devices if not other.integrated]
    dtype, backend, notes = _precision(config, device, row, seen.kind)
    if row.memory_bytes is None:
        notes.append(
            f"{device.name} has no row in the table: its memory is as reported, {device.memory_bytes / GIB:.1f} GiB; "
            "its peak is unknown, so no utilisation is reported"
        )
    if len(discrete) > 1:
        notes.append(f"{len(discrete)} GPUs are here; a run uses one: {device.name}, cuda:{device.index}")
    ignored = [other.name for other in seen.devices if other.integrated]
    if ignored:
        notes.append(f"integrated GPU ignored: {', '.join(ignored)}")
    driver = hardware.driver if hardware.kind == seen.kind else ""
    driver = f"{driver} ({seen.runtime})" if driver else seen.runtime
    where = f"cuda:{device.index}"
    return ResolvedTarget(
        row, where, device.name, device.memory_bytes, dtype, backend, driver, seen.torch, _join(notes)
    )


def _precision(
    config: TargetConfig, device: TorchDevice, row: Target, kind: str
) -> tuple[str, str, list[str | None]]:
    """dtype, the fused kernel expected, and notes."""
    able = kind != "cuda" or device.capability >= BFLOAT16_CAPABILITY
    if config.dtype == "bfloat16" and not able:
        major, minor = device.capability
        raise TargetError(
            f"CONFIG_DTYPE_BFLOAT16=y, but {device.name} (compute capability {major}.{minor}) has no bfloat16; "
            "right: CONFIG_DTYPE_AUTO=y, which takes float32 there"
        )
    notes: list[str | None] = []
    dtype = row.dtype if able else "float32"
    if config.dtype != "auto":
        dtype = config.dtype
    if dtype == "float32":
        reason = "as asked for" if able else "as the card has no bfloat16"
        notes.append(
            f"float32 {reason}: flash attention takes half precision only, so the efficient kernel is used"
        )
        return dtype, "efficient", notes
    return dtype, row.attention_backend, notes


def _plan(config: TargetConfig, hardware: Hardware) -> ResolvedTarget:
    """The row that .config names, or the one it was scaled to, whatever machine this is."""
    name = config.detected if config.name == "auto" else config.name
    row = TARGETS.get(name)
    if row is None:
        raise TargetError(f"CONFIG_DETECTED={name} is no target; right: one of {', '.join(TARGETS)}")
    if row.kind == "cpu":
        return _resolve_cpu(config, hardware, [], None)
    memory, title = row.memory_bytes, row.title
    if memory is None:
        if hardware.kind != row.kind or not hardware.memory_bytes:
            raise TargetError(
                f"{name} has no memory size to plan with on a machine without that card; "
                "right: name a card, such as CONFIG_TARGET_A100_40G=y"
            )
        memory, title = hardware.memory_bytes, hardware.name
    dtype = row.dtype if config.dtype == "auto" else config.dtype
    backend = "efficient" if dtype == "float32" else row.attention_backend
    return ResolvedTarget(
        row, "cuda:0", title, memory, dtype, backend, None, None, "planned without the card"
    )


def _join(notes: list[str | None]) -> str | None:
    return "; ".join(note for note in notes if note) or None


def environment_for(name: str, detected: str | None = None) -> dict[str, str]:
    """What a parent must export before the training process starts. "auto": for `detected`, or what is here."""
    if name == "auto":
        name = detected or detected_target_name()
    if name not in TARGETS:
        raise TargetError(f"{name} is no target; right: auto or one of {', '.join(TARGETS)}")
    return dict(TARGETS[name].environment)


def export_environment(name: str = "auto", detected: str | None = None) -> None:
    """Set environment_for(name) in this process and in those that it starts; every command does, before it loads torch.

    A card whose fused kernels torch holds for experimental would otherwise have none.
    """
    os.environ.update(environment_for(name, detected))


def target_record(resolved: ResolvedTarget) -> dict[str, Any]:
    """The `target` object of run.json."""
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
    """What to say where .config's scale does not suit the machine that it starts on; None where it does.

    detected: the row of this machine. A target that .config names was the user's choice and is not remarked upon.
    """
    if config.name != "auto":
        return None
    detected = detected or detected_target_name()
    if config.scale_cpu == (detected == "cpu"):
        return None
    titles = {name: row.title for name, row in TARGETS.items()}
    here = titles.get(detected, detected)
    if config.scale_cpu:
        found = f"notice: .config was scaled to a CPU study, but {here} is here"
    else:
        found = f"notice: .config was scaled to {titles.get(config.detected, config.detected)}, but no GPU is here"
    return f"{found}; to scale it to this machine apply your defconfig again, such as make defconfig-gpt2-ra-ablation"
