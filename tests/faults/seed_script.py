"""What a user's training script does with numerics: python tests/faults/seed_script.py TASK WORDS [KEY=VALUE]."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import referee.numerics


def model(approximate: str = "none") -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.GELU(approximate=approximate), nn.Dropout(0.5), nn.LayerNorm(16))
    return nn.Sequential(*layers)


def loss_of(net: nn.Module) -> Tensor:
    loss: Tensor = net(torch.linspace(-2, 2, 128).view(8, 16)).square().mul(torch.arange(16)).mean()
    torch.autograd.backward(loss)
    return loss.detach()


def record(out: str, approximate: str = "none", **settings: Any) -> None:
    """Record two steps as msProbe's configuration says."""
    referee.numerics.seed_all(1234)
    inner = {name: settings.pop(name) for name in ("summary_mode", "list", "data_mode") if name in settings}
    task = settings.get("task", "statistics")
    Path(f"{out}.json").write_text(json.dumps({"task": task, "dump_path": out, task: inner} | settings))
    debugger = referee.numerics.PrecisionDebugger(config_path=f"{out}.json")
    net = model(approximate)
    for _ in range(2):
        debugger.start(net)
        loss_of(net)
        debugger.stop()
        debugger.step()


def pack(out: str, approximate: str = "none", beta: float = 0.95, shift: float = 0.0) -> None:
    net = model(approximate)
    optimizer = torch.optim.AdamW(net.parameters(), betas=(0.9, beta))
    referee.numerics.ConfigChecker(net, [__file__], out, optimizer=optimizer)
    net(torch.ones(8, 16) + shift)


def monitor(out: str, **switches: Any) -> None:
    Path("monitor.json").write_text(json.dumps({"targets": {}, "ops": ["norm"]} | switches))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    watch = referee.numerics.TrainerMon("monitor.json", params_have_main_grad=False)
    watch.set_monitor(net, optimizer=optimizer, grad_acc_steps=1)
    with open(out, "w") as losses:
        print("step,loss", file=losses)
        for step in range(4):
            print(f"{step},{loss_of(net).item()}", file=losses)
            optimizer.step()
            optimizer.zero_grad()


def fixed(words: str) -> None:
    net = model()
    with referee.numerics.fix(net, words) as fixes:
        loss_of(net)
        fixes.require_used()
    print(*fixes.changes, sep="\n")


def operation(approximate: str) -> None:
    """Check GELU against the GELU of this approximation in float64."""
    reference = functools.partial(nn.functional.gelu, approximate=approximate)
    checks = referee.numerics.check_operation(
        nn.functional.gelu, [torch.linspace(-3, 3, 99)], reference=reference
    )
    print("wrong" if any(check.wrong for check in checks) else "within rounding")


def seeds() -> None:
    """Print what seed_all leaves behind."""
    referee.numerics.seed_all(mode=True)
    first, net = torch.rand(1), model()
    referee.numerics.seed_all(mode=True)
    print("drawn again:", torch.equal(first, torch.rand(1)), "seed:", torch.initial_seed())
    print("deterministic:", torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    print("without dropout:", torch.equal(loss_of(net), loss_of(net)))


def step() -> tuple[Callable[[], Tensor], dict[str, nn.Module]]:
    """Return a step for `referee repeat` that reads one row more than was written."""
    net = model()

    def run() -> Tensor:
        buffer = torch.empty(9, 16)
        buffer[:8] = 1.0
        loss: Tensor = (net(buffer).mean() * buffer.mean()).square()
        torch.autograd.backward(loss)
        return loss.detach()

    return run, {"model": net}


class Half(nn.Module):
    """Overflows in float16."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.half() * 1e6).float()


def overflowing() -> tuple[Callable[[], Tensor], list[nn.Module]]:
    """Return a step for `referee bisect`."""
    net = nn.Sequential(model(), Half(), nn.Linear(16, 16))
    return functools.partial(loss_of, net), [net]


def main(task: str, *words: str) -> None:
    given = [word for word in words if "=" not in word]
    named = (word.split("=", 1) for word in words if "=" in word)
    {
        "record": record,
        "pack": pack,
        "monitor": monitor,
        "fixed": fixed,
        "operation": operation,
        "seeds": seeds,
    }[task](*given, **{name: json.loads(text) for name, text in named})


if __name__ == "__main__":
    main(*sys.argv[1:])
