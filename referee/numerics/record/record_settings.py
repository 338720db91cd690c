"""The settings of a recorder, with the names of msProbe's config.json (section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from referee.errors import NumericsError

TASKS, LEVELS, MODES = ("statistics", "tensor"), ("L0", "L1", "mix"), ("statistics", "md5")
DATA_MODES = {"all", "forward", "backward", "input", "output"}


@dataclass(frozen=True)
class RecorderConfig:
    """Settings of a recorder; the names are those of msProbe's config.json.

    task: "statistics", or "tensor" for the values as well. level: "L0" (modules), "L1" (functions) or "mix". step,
    rank: to record; empty: all. list: names that contain one of these strings; a module's calls are included.
    data_mode: of "forward", "backward", "input", "output", or "all". summary_mode: "statistics", or "md5" with digests.
    """

    dump_path: str = "dump"
    task: str = "statistics"
    level: str = "L0"
    step: tuple[int, ...] = ()
    rank: tuple[int, ...] = ()
    list: tuple[str, ...] = ()
    data_mode: tuple[str, ...] = ("all",)
    summary_mode: str = "statistics"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("task", self.task, TASKS),
            ("level", self.level, LEVELS),
            ("summary_mode", self.summary_mode, MODES),
        ):
            if value not in allowed:
                raise NumericsError(f'{name} is "{value}"; fix: use {", ".join(allowed)}')
        for name, kind in (("step", int), ("rank", int), ("list", str), ("data_mode", str)):
            given, what = getattr(self, name), "numbers from 0" if kind is int else "strings"
            right = isinstance(given, list | tuple) and all(type(one) is kind for one in given)
            if not right or (kind is int and min(given, default=0) < 0):
                raise NumericsError(f"{name} is {given}; fix: list {what}")
            object.__setattr__(self, name, tuple(given))
        if not self.data_mode or not set(self.data_mode) <= DATA_MODES:
            raise NumericsError(
                f"data_mode is {list(self.data_mode)}; fix: use some of {', '.join(sorted(DATA_MODES))}"
            )
        if not self.dump_path or not isinstance(self.dump_path, str):
            raise NumericsError(f"dump_path is {self.dump_path!r}; fix: name a folder")

    @classmethod
    def from_json(cls, content: Any, **changes: Any) -> RecorderConfig:
        """Read the content of msProbe's config.json. Entries of the task's section count like those beside it.

        NumericsError names an entry that cannot be used. Entries of other tools are ignored. changes: not None.
        """
        if not isinstance(content, dict):
            raise NumericsError("the configuration is not a JSON object; fix: see docs/numerics.md")
        section = content.get(str(changes.get("task") or content.get("task", "statistics")), {})
        values = {**content, **(section if isinstance(section, dict) else {})}
        values |= {name: value for name, value in changes.items() if value is not None}
        if values.get("scope"):
            raise NumericsError("scope is not supported; fix: remove it, and name modules in list")
        known = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        if not known.get("data_mode", True):
            known.pop("data_mode")
        return cls(**known)

    def wants(self, direction: str, side: str) -> bool:
        """Return whether data_mode includes the side ("input", "output") of a direction ("forward", "backward")."""
        chosen = set(self.data_mode)
        if "all" in chosen:
            return True
        return (direction in chosen or not chosen & {"forward", "backward"}) and (
            side in chosen or not chosen & {"input", "output"}
        )
