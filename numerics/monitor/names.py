"""The names of a model's modules and parameters, and targets that match none of them. Needs no torch."""

from __future__ import annotations

import difflib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from numerics.dump_files import read_json, write_json, writing
from numerics.errors import NumericsError
from numerics.monitor.targets import MonitorTarget, model_names

FILE = "names.json"
SIDES = {"actv": ("input", "output"), "actv_grad": ("input_grad", "output_grad"), "attention": ("sdpa",)}
MOST_NAMES = 3  # in a message


@dataclass(frozen=True)
class ModelNames:
    """Paths without the wrappers around the model. parameters: those that are trained. modules: without the root."""

    parameters: tuple[str, ...]
    modules: tuple[str, ...]

    @classmethod
    def of(cls, model: Any) -> ModelNames:
        """Return the names of a torch module."""
        plain = model_names(model)
        parameters = (plain(name) for name, one in model.named_parameters() if one.requires_grad)
        modules = (plain(name) for name, _ in model.named_modules())
        return cls(tuple(parameters), tuple(dict.fromkeys(filter(None, modules))))

    def matches(self, target: MonitorTarget) -> bool:
        """Whether the model has a tensor that the target can name."""
        ending = re.search(r"\.?([0-9]+)$", target.path)
        number = ending[1] if ending else "0"  # of a tensor among a module's inputs or outputs
        for kind in target.kinds:
            names = list(self.parameters)
            if kind in SIDES:
                paths = ["", *(f"{path}." for path in self.modules)]
                names = [f"{path}{side}.{number}" for path in paths for side in SIDES[kind]]
            if any(target.wants(kind, name) for name in names):
                return True
        return False

    def problem(self, target: MonitorTarget) -> str:
        """Return the line on a target without a match, with near names; "" where it matches."""
        if self.matches(target):
            return ""
        kinds = {"module" if kind in SIDES else "trained parameter" for kind in target.kinds}
        known = sorted({*self.modules, *self.parameters} - {target.path})
        near = difflib.get_close_matches(target.path, known, n=MOST_NAMES, cutoff=0.5)
        fix = (
            f"did you mean {', '.join(near)}" if near else f"use a path such as {known[0] if known else '*'}"
        )
        return f"{target} matches no {' and no '.join(sorted(kinds))} of the model; fix: {fix}"


def write_names(folder: Path, names: ModelNames) -> None:
    """Write the names into the folder of a monitor. NumericsError where it cannot be written."""
    with writing(folder / FILE, "check the permissions of the folder"):
        write_json(folder / FILE, asdict(names))


def read_names(folder: Path) -> ModelNames | None:
    """Return the names that the monitor of a run wrote; None where it wrote none."""
    if not (folder / FILE).exists():
        return None
    content = read_json(folder / FILE, "move it away")
    try:
        return ModelNames(tuple(content["parameters"]), tuple(content["modules"]))
    except (KeyError, TypeError) as error:
        raise NumericsError(f"{folder / FILE} has no names; fix: move it away") from error
