"""seed_all makes runs equal, removes dropout, and says what came too late. Each case has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from numerics.seed import process_environment, seed_all

ROOT = Path(__file__).parents[2]


def run(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


DRAWS = """
import random, numpy, torch
from numerics import seed_all
late = seed_all(7)
print(random.random(), numpy.random.rand(), torch.rand(2).tolist(), len(late))
"""


def test_two_processes_draw_the_same_numbers() -> None:
    first, second = run(DRAWS), run(DRAWS)
    assert first == second


def test_a_random_hash_seed_is_named_as_too_late_and_a_fixed_one_is_not() -> None:
    code = "from numerics import seed_all; print(*seed_all(7))"
    assert "fix: start it with PYTHONHASHSEED=7" in run(code, PYTHONHASHSEED="random")
    assert run(code, PYTHONHASHSEED="7").strip() == ""


DROPOUT = """
import torch, torch.nn.functional as F
from numerics import seed_all
seed_all(rm_dropout={remove})
x = torch.ones(64, 64)
layer = torch.nn.TransformerEncoderLayer(64, 2, 64, dropout=0.5, batch_first=True)
v = torch.rand(1, 64, 64)
attention = F.scaled_dot_product_attention
print(torch.equal(F.dropout(x, 0.5), x), torch.equal(torch.nn.Dropout(0.5)(x), x),
      torch.equal(layer(x[None]), layer(x[None])), torch.equal(torch.dropout(x, 0.5, True), x),
      torch.equal(attention(x[None], x[None], v, dropout_p=0.5), attention(x[None], x[None], v)))
"""


def test_dropout_is_removed_everywhere() -> None:
    assert run(DROPOUT.format(remove=True)).split() == ["True"] * 5
    assert run(DROPOUT.format(remove=False)).split() == ["False"] * 5


DETERMINISTIC = """
import os, torch
from numerics import seed_all
seed_all(mode=True)
print(torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"],
      os.environ["HCCL_DETERMINISTIC"], torch.backends.cudnn.deterministic)
"""


def test_the_mode_selects_deterministic_algorithms() -> None:
    assert run(DETERMINISTIC, CUBLAS_WORKSPACE_CONFIG="").split()[0] == "True"
    assert run(DETERMINISTIC).split() == ["True", ":4096:8", "true", "True"]


TABLE = """
import os, random, sys, numpy, torch
from numerics import seed_all
seed_all(7)
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
cudnn = torch.backends.cudnn
print(drawn == [random.random(), numpy.random.rand(), torch.rand(1).item()], os.environ["PYTHONHASHSEED"] == "7",
      not cudnn.enabled, not cudnn.benchmark, cudnn.deterministic)
"""


def test_every_switch_of_the_guides_table_is_set() -> None:
    assert run(TABLE).split() == ["True"] * 5


IMPORTED_BEFORE = """
import torch
from torch import dropout as torch_dropout
from torch.nn.functional import dropout, scaled_dot_product_attention as attention
recurrent = torch.nn.LSTM(8, 8, 2, dropout=0.5)
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from numerics import seed_all
seed_all()
seed_all()
x = torch.ones(3, 2, 8)
print(torch.equal(dropout(x, 0.5), x), torch.equal(torch_dropout(x, 0.5, True), x),
      torch.equal(recurrent(x)[0], recurrent(x)[0]), torch.equal(attention(x, x, x, None, 0.5, True), x),
      torch.equal(F.dropout(input=x, p=0.5, inplace=True), x))

class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        print(resolve_name(func))
        return func(*args, **kwargs or {})

with Names():
    attention(x, x, x, dropout_p=0.5)
"""


def test_dropout_is_removed_where_it_was_imported_by_name_and_attention_keeps_its_name() -> None:
    found = run(IMPORTED_BEFORE).split()
    assert found == [*["True"] * 5, "torch.nn.functional.scaled_dot_product_attention"]


LATE = """
import torch
from numerics import seed_all
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.cuda.is_initialized = lambda: True
print(*(line.partition(":")[0] for line in seed_all(mode=True)))
"""


def test_what_came_too_late_is_named() -> None:
    names = ["PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"]
    unset = dict.fromkeys(("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"), "")
    assert run(LATE, PYTHONHASHSEED="random", **unset).split() == names
    assert run(LATE, **process_environment()).split() == []


def test_the_environment_of_a_process_needs_no_torch_and_keeps_a_deterministic_workspace() -> None:
    code = "import sys; from numerics.seed import process_environment; print('torch' in sys.modules)"
    assert run(code).strip() == "False"
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert process_environment({name: ":16:8"})[name] == ":16:8"
    assert process_environment({name: ":0:0"})[name] == ":4096:8"


def test_a_seed_out_of_range_is_refused() -> None:
    for seed in (-1, 2**32, "x", 1.0, True):
        with pytest.raises(ValueError, match="fix: "):
            seed_all(seed)  # type: ignore[arg-type]
