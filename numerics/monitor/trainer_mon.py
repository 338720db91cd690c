"""The monitor with the names of msProbe's TrainerMon, as in section 4.6 of the guide.

monitor = TrainerMon("config.json", params_have_main_grad=False)
monitor.set_monitor(model, optimizer, grad_acc_steps=4)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from numerics.monitor.monitor import Monitor
from numerics.monitor.settings import read_settings


class TrainerMon:
    """Monitor a script as config.json says.

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
        self.monitor: Monitor | None = None

    def set_monitor(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        grad_acc_steps: int = 1,
        dp_group: Any = None,
        tp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Install the hooks. grad_acc_steps: micro-batches of a step. start_iteration: steps before this process.

        dp_group: the ranks that hold the same weights, by default all. tp_group: accepted.
        """
        if not isinstance(model, nn.Module):
            model = nn.ModuleList(model) if len(model) > 1 else model[0]
        replicas = torch.distributed.get_process_group_ranks(dp_group) if dp_group else ()
        self.monitor = Monitor.attach(
            model,
            optimizer,
            self.path,
            micro_batches=grad_acc_steps,
            start=start_iteration,
            replicas=replicas,
        )

    def close(self) -> None:
        """Remove every hook. The rows of a step that the optimizer skipped are written."""
        if self.monitor:
            self.monitor.close()
