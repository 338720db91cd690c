"""seed_all makes runs equal, removes dropout, and says what came too late. Each case has a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

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
