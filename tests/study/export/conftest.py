"""Runs of every kind of arm, exported without training."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gpt2.artifacts import checkpoint, run_record
from gpt2.config.config import Config
from gpt2.config.dotconfig import read_symbols
from gpt2.model.init import initialise
from gpt2.system import files
from gpt2.train.step import build_model
from ra.settings import AlternationSettings
from ra.variants import variant
from tests.study.attention.test_inspect import config_file

__all__ = ["config_file"]


@pytest.fixture(scope="module", autouse=True)
def modules_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Let transformers copy modelling files to a temporary folder of each test file, and import them from there."""
    dynamic = pytest.importorskip("transformers.dynamic_module_utils")
    folder, before = tmp_path_factory.mktemp("modules"), dynamic.HF_MODULES_CACHE
    dynamic.HF_MODULES_CACHE = str(folder)
    yield folder
    dynamic.HF_MODULES_CACHE = before
    sys.path[:] = [path for path in sys.path if path != str(folder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers_modules"]:
        del sys.modules[name]


def trained_run(runs: Path, config: str, name: str, seed: int = 3, folder: str = "") -> Path:
    """A run folder whose checkpoint has every parameter moved away from its initial value. config: text of .config."""
    run_dir = runs / (folder or run_record.run_name(name, seed))
    run_dir.mkdir(parents=True)
    (run_dir / "config").write_text(config)
    symbols = read_symbols(run_dir / "config")
    settings = Config.from_symbols(symbols)
    chosen = variant(name, settings.model, AlternationSettings.from_symbols(symbols))
    model = build_model(chosen.configure(settings).model, chosen.parts, seed)
    initialise(model, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() < 2 else 0.1
            parameter += spread * torch.randn(parameter.shape, generator=generator)
        model.token.weight[model.vocabulary :] = 0.0
    record = run_record.blank(run_dir.name, name, seed)
    files.write_json(run_dir / "run.json", record.to_json())
    checkpoint.save(run_dir / "checkpoint", 7, {"model": model.state_dict()}, {})
    return run_dir


def changed(config: str, **symbols: str) -> str:
    """Return a .config with other values. A symbol without a line gets one."""
    for name, value in symbols.items():
        line = f"# CONFIG_{name} is not set" if value == "n" else f"CONFIG_{name}={value}"
        pattern = rf"^(CONFIG_{name}=.*|# CONFIG_{name} is not set)$"
        config, count = re.subn(pattern, line, config, flags=re.MULTILINE)
        config += "" if count else f"{line}\n"
    return config
