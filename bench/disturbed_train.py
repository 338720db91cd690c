"""Run one training process with a disturbance: a stop at an iteration, or too little memory.

python -m bench.disturbed_train PLAN --parent PID      started by bench.card_studies
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

VARIABLE = "CARD_DISTURBANCE"  # JSON of a Disturbance
SIGNAL_SECONDS = 1.0  # for the study to pass a signal on


@dataclass(frozen=True)
class Disturbance:
    """stop_at: iteration at which the study gets SIGTERM; -1: none.

    memory_bytes: of each GPU; 0: all. largest_micro: a larger micro-batch is out of memory, for a CPU; 0: none is.
    """

    stop_at: int = -1
    memory_bytes: int = 0
    largest_micro: int = 0


def main() -> int:
    import torch

    from gpt2.training_step import Stepper
    from study import worker

    disturbance = Disturbance(**json.loads(os.environ[VARIABLE]))
    step = Stepper.step

    def disturbed_step(stepper: Stepper, ids_ET: Any, iteration: int, *others: Any) -> Any:
        if 0 < disturbance.largest_micro < stepper.batch.micro:
            raise torch.OutOfMemoryError("forced by make card")
        if iteration == disturbance.stop_at:
            os.kill(os.getppid(), signal.SIGTERM)
            time.sleep(SIGNAL_SECONDS)
        return step(stepper, ids_ET, iteration, *others)

    Stepper.step = disturbed_step  # type: ignore[method-assign,assignment]
    device = torch.accelerator.current_accelerator(check_available=True)
    if device and disturbance.memory_bytes:
        module = torch.get_device_module(device)
        for number in range(module.device_count()):
            total = module.get_device_properties(number).total_memory
            module.set_per_process_memory_fraction(min(disturbance.memory_bytes / total, 1.0), number)
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
