"""Which tensors a monitor watches, "grad:blocks.3" or "actv:blocks.*.mlp", and the words of its triggers, "spike:8"."""

from __future__ import annotations

import fnmatch
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numerics.errors import NumericsError
from numerics.monitor.tables import ALL, GRADIENTS, KINDS, MOMENTS

GROUPS: dict[str, tuple[str, ...]] = {
    "grad": GRADIENTS[:2],
    "adam": MOMENTS,
    "update": ("update_ratio",),
    "all": ALL,
}
# trigger (numerics.monitor.triggers) -> its limit by default
TRIGGERS: Mapping[str, float] = {"nan": 0.0, "spike": 8.0, "grad_norm": 8.0}
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module")  # of DistributedDataParallel, torch.compile, FSDP


@dataclass(frozen=True)
class MonitorTarget:
    """A kind or group, and a path: its module or parameter, everything within it, or a pattern with * and ?."""

    group: str
    path: str = ""

    @property
    def kinds(self) -> tuple[str, ...]:
        return GROUPS.get(self.group, (self.group,))

    def wants(self, kind: str, name: str) -> bool:
        """Whether the target includes a row of the tables."""
        if kind not in self.kinds:
            return False
        path = self.path
        if not path or name == path or name.startswith(f"{path}."):
            return True
        return any(sign in path for sign in "*?[") and (
            fnmatch.fnmatchcase(name, path) or fnmatch.fnmatchcase(name, f"{path}.*")
        )

    def __str__(self) -> str:
        return f"{self.group}:{self.path}" if self.path else self.group


def parse_targets(words: Iterable[str]) -> tuple[MonitorTarget, ...]:
    """Parse KIND or KIND:PATH. NumericsError names an unknown kind."""
    found = []
    for word in words:
        group, _, path = word.partition(":")
        if group not in GROUPS and group not in KINDS:
            known = ", ".join([*GROUPS, *(kind for kind in KINDS)])
            raise NumericsError(
                f"{word!r} has the unknown kind {group!r}; fix: use KIND or KIND:PATH, KIND one of {known}"
            )
        found.append(MonitorTarget(group, path))
    return tuple(found)


def plain_name(name: str, most: int | None = None) -> str:
    """Return the name of a module or parameter without the wrappers around the model, of "module" at most as many."""
    parts = [part for part in name.split(".") if part not in WRAPPERS[1:]]
    while parts and parts[0] == WRAPPERS[0] and most != 0:
        parts, most = parts[1:], None if most is None else most - 1
    return ".".join(parts)


def model_names(model: Any) -> Callable[[str], str]:
    """Return the function from the name of a module or parameter to its plain one, for a torch module.

    A module named "module" is in a wrapper where it is the only one, and the module around it has no parameters.
    """
    count = 0
    while model is not None:
        children = dict(model.named_children())
        name = next(iter(children), "")
        if len(children) != 1 or name not in WRAPPERS or (name == WRAPPERS[0] and model._parameters):
            break
        count += name == WRAPPERS[0]
        model = children[name]
    return functools.partial(plain_name, most=count)


def parse_triggers(words: Sequence[str]) -> dict[str, float]:
    """Parse NAME or NAME:K. NumericsError names one that cannot be used."""
    found = {}
    for word in words:
        name, colon, factor = word.partition(":")
        if name not in TRIGGERS:
            raise NumericsError(f"{word!r} is not a trigger; fix: use {', '.join(TRIGGERS)}, or NAME:K")
        try:
            found[name] = float(factor) if colon else TRIGGERS[name]
        except ValueError:
            found[name] = math.nan
        if not (found[name] > 0 or name == "nan") or math.isinf(found[name]):
            raise NumericsError(f"{word!r} has no number above 0 after the colon; fix: such as {name}:8")
    return found
