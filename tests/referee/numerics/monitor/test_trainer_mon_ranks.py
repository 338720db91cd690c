"""TrainerMon under DistributedDataParallel: gradients before and after the reduction are those computed by hand."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from referee.numerics.monitor.invariants import invariants
from referee.numerics.monitor.monitor_tables import table_files
from tests.referee.numerics.monitor.table_rows import read_rows

ROOT = Path(__file__).parents[4]
RANKS, STEPS, MICRO_BATCHES = 2, 3, 2
COLUMNS = ("norm", "mean", "min", "max")
SCRIPT = """
import contextlib, os, sys
from pathlib import Path

import torch
import torch._dynamo  # DistributedDataParallel loads it
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from referee.numerics import TrainerMon
from tests.referee.numerics.monitor.test_trainer_mon_ranks import MICRO_BATCHES, STEPS, build, data

folder, child = Path(sys.argv[1]), os.fork()  # of a process that has loaded torch
rank = 0 if child else 1
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
for bucket_view in (False, True):
    for synchronised in (False, True):
        os.environ["MONITOR_OUTPUT_DIR"] = str(folder / f"out-{bucket_view}-{synchronised}")
        model, optimizer = build()
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view, bucket_cap_mb=0.0001)
        monitor = TrainerMon(folder / "config.json")
        monitor.set_monitor(wrapped if bucket_view == synchronised else model, optimizer, grad_acc_steps=MICRO_BATCHES)
        for step in range(STEPS):
            for micro in range(MICRO_BATCHES):
                last = micro == MICRO_BATCHES - 1
                with contextlib.nullcontext() if last or synchronised else wrapped.no_sync():
                    (wrapped(data(rank, step, micro)).square().mean() / MICRO_BATCHES).backward()
            optimizer.step()
            optimizer.zero_grad()
        monitor.close()
distributed.destroy_process_group()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def data(rank: int, step: int, micro: int) -> Tensor:
    draw = torch.Generator().manual_seed(100 * rank + 10 * step + micro)
    return torch.randn(3, 4, generator=draw) * (1 + rank)


Expected = dict[tuple[str, int, str, int], Tensor]


def by_hand(synchronised: bool) -> Expected:
    """Return (kind, rank, parameter, step) -> gradient of a training without DistributedDataParallel."""
    model, optimizer = build()
    named = dict(model.named_parameters())
    found: Expected = {}
    for step in range(STEPS):
        before: list[dict[str, Tensor]] = [
            {name: torch.zeros_like(p) for name, p in named.items()} for _ in range(RANKS)
        ]
        for micro in range(MICRO_BATCHES):
            for rank in range(RANKS):
                optimizer.zero_grad()
                (model(data(rank, step, micro)).square().mean() / MICRO_BATCHES).backward()
                for name, parameter in named.items():
                    assert parameter.grad is not None
                    before[rank][name] = before[rank][name] + parameter.grad
            reduced = {name: sum(one[name] for one in before) / RANKS for name in named}
            if micro == MICRO_BATCHES - 1:
                for name in named:
                    for rank in range(RANKS):
                        found["grad_unreduced", rank, name, step] = before[rank][name]
                        found["grad_reduced", rank, name, step] = reduced[name]  # type: ignore[assignment]
            elif synchronised:  # each micro-batch is reduced, and the next one is added to the mean
                before = [dict(reduced) for _ in range(RANKS)]  # type: ignore[arg-type]
        for name, parameter in named.items():
            parameter.grad = reduced[name]  # type: ignore[assignment]
        optimizer.step()
    return found


def test_each_rank_writes_its_gradients_before_and_after_the_reduction(tmp_path: Path) -> None:
    config = {"wg_distribution": True, "ops": list(COLUMNS), "ndigits": 9, "step_count_per_record": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for bucket_view in (False, True):
        for synchronised in (False, True):
            exact = by_hand(synchronised)
            folder = tmp_path / f"out-{bucket_view}-{synchronised}"
            assert sorted(path.name for path in folder.iterdir()) == ["rank0", "rank1"]
            seen = 0
            for rank in range(RANKS):
                assert {*table_files(folder / f"rank{rank}")} >= {kind for kind, *_ in exact}
                for kind in ("grad_unreduced", "grad_reduced"):
                    for row in read_rows(folder / f"rank{rank}", kind):
                        tensor = exact[kind, rank, row.name, row.step]
                        values = [tensor.norm(), tensor.mean(), tensor.min(), tensor.max()]
                        wanted = list(map(float, values))
                        assert list(row.values) == pytest.approx(wanted, rel=1e-4, abs=1e-6), (kind, row)
                        seen += 1
            assert seen == len(exact)
            assert invariants(folder) == []
