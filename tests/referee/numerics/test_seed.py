"""seed_all makes runs equal, removes dropout, and says what came too late. Its cases run in two other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from referee.numerics.seed import process_environment

ROOT = Path(__file__).parents[3]
END = "----"


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
import os, random, numpy, torch
from referee.numerics import seed_all
seed_all(7)
drawn = [random.random(), numpy.random.rand(), torch.rand(1).item()]
print(*drawn)
random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
cudnn = torch.backends.cudnn
print(drawn == [random.random(), numpy.random.rand(), torch.rand(1).item()], os.environ["PYTHONHASHSEED"] == "7",
      not cudnn.enabled, not cudnn.benchmark, cudnn.deterministic)
"""

DROPOUT = """
import torch
from torch import dropout as torch_dropout
from torch.nn.functional import dropout, scaled_dot_product_attention as attention
recurrent = torch.nn.LSTM(8, 8, 2, dropout=0.5)
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, resolve_name
from referee.numerics import seed_all

def show():
    x, v = torch.ones(1, 64, 64), torch.rand(1, 64, 64)
    layer = torch.nn.TransformerEncoderLayer(64, 2, 64, dropout=0.5, batch_first=True)
    print(torch.equal(F.dropout(x, 0.5), x), torch.equal(torch.nn.Dropout(0.5)(x), x),
          torch.equal(layer(x), layer(x)), torch.equal(torch.dropout(x, 0.5, True), x),
          torch.equal(F.scaled_dot_product_attention(x, x, v, dropout_p=0.5),
                      F.scaled_dot_product_attention(x, x, v, dropout_p=0.5)))
    x, v = torch.ones(3, 2, 8), torch.rand(3, 2, 8)
    print(torch.equal(dropout(x, 0.5), x), torch.equal(torch_dropout(x, 0.5, True), x),
          torch.equal(recurrent(x)[0], recurrent(x)[0]),
          torch.equal(attention(x, x, v, None, 0.5, True), attention(x, x, v, None, 0.5, True)),
          torch.equal(F.dropout(input=x.clone(), p=0.5, inplace=True), x))

seed_all(rm_dropout=False)
show()
seed_all()
seed_all()
show()

class Names(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        print(resolve_name(func))
        return func(*args, **kwargs or {})

x = torch.ones(3, 2, 8)
with Names():
    attention(x, x, x, dropout_p=0.5)
"""

LATE = """
import os, torch
from referee.numerics import seed_all
torch.cuda.is_initialized = torch.distributed.is_initialized = lambda: True
late = seed_all(7, mode=True)
print(torch.are_deterministic_algorithms_enabled(), os.environ["CUBLAS_WORKSPACE_CONFIG"],
      os.environ["HCCL_DETERMINISTIC"], torch.backends.cudnn.deterministic)
print(*late, sep="\\n")
"""


@pytest.fixture(scope="module")
def random_hashes() -> list[list[str]]:
    """Return the lines of DROPOUT, LATE and DRAWS in a process that has none of the variables."""
    unset = dict.fromkeys(("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"), "")
    return outputs(DROPOUT, LATE, DRAWS, PYTHONHASHSEED="random", **unset)


@pytest.fixture(scope="module")
def prepared() -> list[list[str]]:
    """Return the lines of DRAWS and LATE in a process that has the variables of a deterministic one."""
    return outputs(DRAWS, LATE, **process_environment(seed=7))


def outputs(*programs: str, **environment: str) -> list[list[str]]:
    """Run programs one after the other in one process. Returns the lines of each."""
    found = run(f"\nprint({END!r})\n".join(programs), **environment)
    return [part.splitlines() for part in found.split(f"{END}\n")]


def test_two_processes_draw_the_same_numbers_and_every_switch_of_the_guides_table_is_set(
    random_hashes: list[list[str]], prepared: list[list[str]]
) -> None:
    assert random_hashes[2][0] == prepared[0][0]
    assert prepared[0][1].split() == ["True"] * 5


def test_dropout_is_removed_also_where_it_was_imported_by_name_and_attention_keeps_its_name(
    random_hashes: list[list[str]],
) -> None:
    *found, name = random_hashes[0]
    assert [line.split() for line in found] == [["False"] * 5] * 2 + [["True"] * 5] * 2
    assert name == "torch.nn.functional.scaled_dot_product_attention"


def test_what_came_too_late_is_named_and_the_mode_selects_deterministic_algorithms(
    random_hashes: list[list[str]], prepared: list[list[str]]
) -> None:
    switches, *late = random_hashes[1]
    assert switches.split() == ["True", ":4096:8", "true", "True"]
    names = [line.partition(":")[0] for line in late]
    assert names == ["PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC"]
    assert "fix: start it with PYTHONHASHSEED=7" in late[0]
    switches, *late = prepared[1]
    assert switches.split() == ["True", ":4096:8", "true", "True"]
    assert late == [""]


def test_the_environment_of_a_process_needs_no_torch_and_keeps_a_deterministic_workspace() -> None:
    code = "import sys; from referee.numerics.seed import process_environment; print('torch' in sys.modules)"
    assert run(code).strip() == "False"
    name = "CUBLAS_WORKSPACE_CONFIG"
    assert process_environment({name: ":16:8"})[name] == ":16:8"
    assert process_environment({name: ":0:0"})[name] == ":4096:8"
