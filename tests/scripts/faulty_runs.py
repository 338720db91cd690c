"""Very small runs with a fault, as scripts.train makes them. The faults are custom attentions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2.trainer import TrainingRun
from gpt2.training_step import NotFiniteError
from ra import arms
from ra.variants import variant
from runtime import attention_kernels, ranks, run_record
from runtime.batch_plan import plan_batch
from runtime.dotconfig import read_symbols
from runtime.settings import Config
from runtime.signals import Stop
from tests import small_runs
from tests.checkout import link_project
from tests.kconfig_commands import run as configure

ROOT = Path(__file__).parents[2]
STEPS = 6
SETTINGS = {
    "GPT2_MAX_ITERS": STEPS, "GPT2_BLOCK_SIZE": 16, "EFFECTIVE_BATCH": 4, "MICRO_BATCH": 2, "EVAL_TOKENS": 64,
    "HELLASWAG": "n", "TOKENIZER_BYTES": "y", "DATASET_FILES": "texts/*.txt", "CPU_THREADS": 1,
    "LEARNING_RATE": "1e-3",
}  # fmt: skip
HALF = """
import torch
from gpt2.transformer import CausalSelfAttention


class Half(CausalSelfAttention):
    '''Sums squares in float16 from step 4 on: 64 terms of 2e4 overflow.'''

    layer, first = 0, 10**9

    def begin_step(self, iteration):
        self.wrong = iteration >= self.first

    def attend(self, q, k, v):
        y = super().attend(q, k, v)
        if getattr(self, "wrong", False):
            large = (y * 0 + 140).half()
            y = y * (large.square().sum(-1, keepdim=True) / 2e4 / y.shape[-1]).to(y.dtype)
        return y


def attention(layer, spec):
    module = Half(spec.width, spec.heads, spec.dropout)
    module.first = 3 if layer == 1 else 10**9
    return module
"""


SPIKE = """
import torch
from gpt2.transformer import CausalSelfAttention


class Cancelling(CausalSelfAttention):
    '''In step 20 the last layer scales its result by a difference of large numbers in float16.'''

    wrong = False

    def begin_step(self, iteration):
        self.wrong = self.last and iteration == 19

    def forward(self, x):
        y = super().forward(x)
        if self.wrong:
            quarter = (torch.full((1,), 2048.25).half() - 2048).to(y.dtype)
            y = y + 1e6 * (0.25 - quarter) * torch.linspace(-1, 1, y.shape[-1])
        return y


def attention(layer, spec):
    module = Cancelling(spec.width, spec.heads, spec.dropout)
    module.last = layer == spec.layers - 1
    return module
"""


@contextlib.contextmanager
def workplace(folder: Path, **sources: str) -> Iterator[Path]:
    """A folder with the project, texts and custom variants, in which a test runs. sources: name of a file -> text."""
    patch = pytest.MonkeyPatch()
    link_project(folder)
    small_runs.write_texts(folder / "texts")
    (folder / "custom").mkdir()
    for name, text in sources.items():
        (folder / "custom" / f"{name}.py").write_text(text)
    patch.chdir(folder)
    patch.setenv("RA_DETECTED", "cpu")
    patch.delenv("MAKEFLAGS", raising=False)
    patch.setattr(arms, "CUSTOM_FOLDER", folder / "custom")
    patch.setattr("ra.custom.__path__", [str(folder / "custom")])
    patch.setattr("sys.dont_write_bytecode", True)
    threads = torch.get_num_threads()
    yield folder
    torch.set_num_threads(threads)
    patch.undo()


def train(arm: str, study: str, stop: Stop | None = None, **settings: str) -> Path:
    """Train a run of an arm; it may end where it is not finite. Returns its folder."""
    return train_configured(arm, configured(arm, study, **settings), stop)


def configured(arm: str, study: str, **settings: str) -> Path:
    """Write the configuration of a run. Returns its folder."""
    given = (f"CONFIG_{symbol}={value}" for symbol, value in (SETTINGS | settings).items())
    configure("defconfig", "gpt2-ra-ablation-smoke+cpu", *given)
    run_dir = Path(f"results/{study}/runs") / run_record.run_name(arm, 0)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config").write_text(Path(".config").read_text())
    return run_dir


def train_configured(arm: str, run_dir: Path, stop: Stop | None = None) -> Path:
    """Train a run whose configuration is in its folder; as one of several ranks, if they are joined."""
    symbols = read_symbols(run_dir / "config")
    config = Config.from_symbols(symbols)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    effective = config.batch.effective
    micro = min(2, effective // ranks.world())
    batch = plan_batch(effective, micro, ranks.world(), config.model.block_size)
    plan = small_runs.planned(run_dir, config, arm, batch=batch)
    chosen = variant(arm, config.model, config.alternation)
    with (
        contextlib.suppress(NotFiniteError),
        attention_kernels.attention_context(resolved, config.model.dropout),
    ):
        own = chosen.configure(config)
        TrainingRun(run_dir, plan, own, resolved, chosen.parts, stop or Stop()).train()
    return run_dir
