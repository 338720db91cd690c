"""TrainerMon of msProbe, section 4.6 of the guide: its names and its config.json over a HookedMonitor."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import nn

from referee.errors import NumericsError
from referee.numerics.monitor.monitor import HookedMonitor
from referee.numerics.monitor.targets import (
    STATISTICS,
    ChangedFile,
    ModelNames,
    MonitorConfig,
    MonitorTarget,
    plain_name,
)
from referee.numerics.text_files import read_dump_json

OUTPUT, DYNAMIC = "MONITOR_OUTPUT_DIR", "DYNAMIC_MONITOR"  # environment variables of msProbe
SWITCHES = {  # of config.json -> group of targets
    "wg_distribution": "grad",
    "param_distribution": "param",
    "mv_distribution": "adam",
    "ur_distribution": "update",
    "attention_distribution": "attention",  # not msProbe's
}
# of msProbe, refused where they are switched on
REFUSED = (
    "cc_distribution", "alert", "append_output", "stack_info", "monitor_mbs_grad", "mg_direction",
    "recording_l2_features", "module_ranks", "all_xy", "print_struct",
)  # fmt: skip
IGNORED = ("eps", "squash_name", "sa_order", "ndigits")  # of msProbe; nothing here depends on them


class TrainerMonSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of config.json (docs/monitor.md)."""

    targets: dict[str, Any] = {}  # by path; which tensors of a module are named is not read
    xy_distribution: bool = False
    forward_only: bool = False
    backward_only: bool = False
    wg_distribution: bool = False
    param_distribution: bool = False
    mv_distribution: bool = False
    ur_distribution: bool = False
    attention_distribution: bool = False
    ops: tuple[str, ...] = ("norm", "mean", "max", "min")
    start_step: int = 0
    collect_times: int = 10**8
    step_interval: int = 1
    step_count_per_record: int = 1
    format: Literal["csv"] = "csv"
    dynamic_on: bool = False

    def config(self, paths: Sequence[str] = ("",)) -> MonitorConfig:
        """Return the monitor's configuration. paths: the modules and parameters to watch; "" for all."""
        groups = [group for switch, group in SWITCHES.items() if getattr(self, switch)]
        if self.xy_distribution:
            groups += ["actv"] * (not self.backward_only) + ["actv_grad"] * (not self.forward_only)
        ops = ["nan" if name == "nans" else name for name in self.ops]
        return MonitorConfig(
            targets=tuple(f"{MonitorTarget(group, path)}" for group in groups for path in paths),
            interval=self.step_interval,
            start=self.start_step,
            times=self.collect_times,
            statistics=tuple(sorted(ops, key=lambda name: [*STATISTICS, name].index(name))),
            steps_per_file=self.step_count_per_record,
        )


class TrainerMon:
    """A monitor with the names of msProbe.

    process_group, params_have_main_grad, opt_ty: accepted. Every rank of torch.distributed writes its folder, and a
    gradient is read from main_grad where a parameter has it. NumericsError where config.json cannot be used.
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str],
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: str | None = None,
    ) -> None:
        self.path = Path(config_file_path)
        read_settings(self.path)
        self.dynamic = os.environ.get(DYNAMIC, "").lower() == "true"
        self.file = ChangedFile(self.path)
        self.monitor: HookedMonitor | None = None

    def set_monitor(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
        scheduler: Any = None,
    ) -> None:
        """Install the hooks. NumericsError where the folder has the tables of another run.

        grad_acc_steps: micro-batches of a step. start_iteration: steps before this process. dp_group: the ranks that
        hold the same weights, by default all. scheduler: of torch; its steps are counted. tp_group: accepted.
        """
        if not isinstance(model, nn.Module):
            model = nn.ModuleList(model) if len(model) > 1 else model[0]
        if grad_acc_steps < 1:
            raise NumericsError(f"grad_acc_steps is {grad_acc_steps}; fix: a number from 1")
        self.names = ModelNames.of(model)
        self.monitor = HookedMonitor(
            model,
            optimizer,
            self._config(),
            Path(os.environ.get(OUTPUT) or "monitor_output"),
            micro_batches=grad_acc_steps,
            start=start_iteration,
            replicas=torch.distributed.get_process_group_ranks(dp_group) if dp_group else (),
            scheduler=scheduler,
            prepare=self._reload if self.dynamic else lambda: None,
        )
        if not (self.monitor.targets or self.dynamic):
            self.monitor.say_once(
                f'{self.path} switches no kind on, so nothing is written; fix: "wg_distribution": true'
            )

    def close(self) -> None:
        """Remove every hook. The rows of a step that the optimizer skipped are written."""
        if self.monitor:
            self.monitor.close()

    def _config(self) -> MonitorConfig:
        """Return what config.json says for the model; nothing is watched where dynamic_on is off in dynamic mode."""
        settings, paths = read_settings(self.path), []
        for path in settings.targets or ("",):
            path = re.sub(r"^[0-9]+:", "", path)  # without the number of the pipeline's stage
            is_known = path in (*self.names.modules, *self.names.parameters)
            paths.append(path if is_known else plain_name(path))
            if problem := self.names.problem(MonitorTarget("all", paths[-1])):
                raise NumericsError(f"{self.path}: targets: {problem.removeprefix('all:')}")
        config = settings.config(paths)
        return replace(config, targets=()) if self.dynamic and not settings.dynamic_on else config

    def _reload(self) -> None:
        """Read a changed config.json, as DYNAMIC_MONITOR=True asks for. A file that cannot be used is reported."""
        if self.monitor and self.file.changed():
            try:
                self.monitor.configure(self._config())
            except NumericsError as error:
                line = " ".join(str(error).split())
                self.monitor.say(f"monitor: {line}; the former configuration stays")


def read_settings(path: Path) -> TrainerMonSettings:
    """Return the keys of a config.json, with defaults. NumericsError names an entry that cannot be used."""
    content = read_dump_json(path, "correct it")
    given = content if isinstance(content, dict) else {}
    try:
        for name in REFUSED:
            value = given.get(name)
            if value.get("enable", value.get("rules")) if isinstance(value, dict) else value:
                raise NumericsError(f"{name} is not supported; fix: remove it")
        if given:
            content = {key: value for key, value in given.items() if key not in (*REFUSED, *IGNORED)}
        settings = msgspec.convert(content, TrainerMonSettings)
        settings.config()
    except (NumericsError, msgspec.ValidationError) as error:
        fix = "" if isinstance(error, NumericsError) else "; fix: docs/monitor.md has the keys"
        raise NumericsError(f"{path}: {error}{fix}") from error
    return settings
