"""Name the platforms on which a trained model is evaluated. Needs no torch.

fp32 | bf16 | fp16 | tf32           the number format of matrix products
int8 | int4 | int3 | int2           weights of all linear layers but the head, symmetric; int8 has one scale for
int4:64 | int4:row                  each output (row), the others one for each group of 32 inputs
dynamic-int8                        weights and activations in int8, scaled for each token
foreign:1e-3                        emulated foreign arithmetic of that strength, by KINDS
foreign.sums:64
bf16@w7900                        the same on another machine than that of training, which has that name
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runtime.dotconfig import number_in
from runtime.errors import UserError

FORMATS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "tf32": "float32 with TF32 products"}
WEIGHTS = {"int8": (8, 0), "int4": (4, 32), "int3": (3, 32), "int2": (2, 32)}  # bits, inputs with one scale
DYNAMIC = "dynamic-int8"
ROW = "row"
KINDS = {  # kind -> what its strength is, and its interval
    "error": ("relative standard deviation of a random error of every result", "[0, 1]"),
    "bias": ("relative error toward zero of every result", "[0, 1)"),
    "sums": ("inputs of a linear layer between two roundings of its sum to bfloat16; 0: none", "[0, 65536]"),
    "exp": ("relative error of the exponential in the softmax, a function of its argument", "[0, 1)"),
    "flush": ("size below which a result becomes zero", "[0, 1]"),
}
LONGEST_NAME = 64  # of a platform without its machine: it is part of a file's name
MACHINE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,47}")
GRAMMAR = (
    "fp32, bf16, fp16, tf32, int8, int4, int3, int2, int4:64, int4:row, dynamic-int8, foreign:1e-3 or "
    "foreign.KIND:1e-3"
)


class PlatformError(UserError, ValueError):
    """A platform is unknown, or this machine does not have it."""


@dataclass(frozen=True)
class Platform:
    """A platform. format: of matrix products. bits: of the weights, None: those of training.

    group: inputs with one scale; 0: all. dynamic: activations in int8 as well. kind, strength: of foreign arithmetic;
    kind "" is the machine's own. machine: where it is evaluated; "": the machine of training.
    """

    name: str
    format: str = "float32"
    bits: int | None = None
    group: int = 0
    dynamic: bool = False
    kind: str = ""
    strength: float = 0.0
    machine: str = ""

    @property
    def label(self) -> str:
        """The name with the machine: bf16@w7900."""
        return f"{self.name}@{self.machine}" if self.machine else self.name

    @property
    def text(self) -> str:
        """The platform in words."""
        return self._arithmetic + (f", on {self.machine}" if self.machine else "")

    @property
    def _arithmetic(self) -> str:
        if self.kind:
            return f"foreign arithmetic, {KINDS[self.kind][0]}: {self.strength:g}"
        if self.dynamic:
            return "int8 weights and activations, scaled for each output and each token"
        if self.bits:
            scales = f"groups of {self.group} inputs" if self.group else "one scale for each output"
            return f"int{self.bits} weights, {scales}"
        return FORMATS[self.name]


def machine_name(text: str) -> str:
    """Return a name of a machine, such as MACHINE=w7900. PlatformError for a malformed one."""
    if not MACHINE_NAME.fullmatch(text):
        raise PlatformError(
            f"MACHINE={text or '(empty)'} is not a machine name; fix: up to 48 letters, digits, dots and dashes: "
            "MACHINE=w7900"
        )
    return text


def name_of_device(device: str) -> str:
    """Derive a machine's name from that of its device: "NVIDIA H200" gives nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")[:48].rstrip("-") or "unnamed"


def parse_platform(label: str) -> Platform:
    """Parse a platform, with @machine for another machine than that of training.

    PlatformError for an unknown name, kind, group, strength or machine.
    """
    name, at, machine = label.partition("@")
    return replace(_parse(name), machine=machine_name(machine) if at else "")


def local_platforms(names: Sequence[str], variable: str) -> None:
    """Refuse names that are malformed or name a machine. variable: of make's command line. PlatformError."""
    for name in names:
        platform = parse_platform(name)
        if platform.machine:
            raise PlatformError(
                f"{variable}: {name} names a machine; fix: on that machine, {variable}={platform.name} "
                f"MACHINE={platform.machine}"
            )


def _parse(name: str) -> Platform:
    if len(name) > LONGEST_NAME:
        raise PlatformError(
            f"{name[:LONGEST_NAME]}... has {len(name)} characters, more than {LONGEST_NAME}; fix: a shorter number"
        )
    head, separator, value = name.partition(":")
    if head in FORMATS and not separator:
        return Platform(name, FORMATS[head].split()[0])
    if name == DYNAMIC:
        return Platform(name, bits=8, dynamic=True)
    if head in WEIGHTS:
        bits, group = WEIGHTS[head]
        return Platform(name, bits=bits, group=_group(name, value) if separator else group)
    if head.partition(".")[0] == "foreign":
        return _foreign(name, head, value)
    raise PlatformError(f"there is no platform {name or '(empty)'}; fix: use {GRAMMAR}")


def _group(name: str, value: str) -> int:
    if value == ROW:
        return 0
    if not re.fullmatch(r"[1-9][0-9]{0,5}", value):
        fix = f"use {name.partition(':')[0]}:32"
        raise PlatformError(f"{name}: {value or '(empty)'} is not a group size; fix: {fix}")
    return int(value)


def _foreign(name: str, head: str, value: str) -> Platform:
    kind = head.partition(".")[2] or ("" if "." in head else "error")
    if kind not in KINDS:
        known = ", ".join(KINDS)
        raise PlatformError(
            f"{name}: there is no kind {kind or '(empty)'}; fix: foreign.KIND with one of {known}"
        )
    meaning, interval = KINDS[kind]
    strength = number_in(interval, value)
    if strength is None or (kind == "sums" and strength != int(strength)):
        raise PlatformError(
            f"{name}: {value or '(empty)'} is not a number in {interval} ({meaning}); fix: foreign:1e-3"
        )
    return Platform(name, kind=kind, strength=strength)
