"""Load an arm that `make export` wrote in the form of this project, since transformers has no class for it.

config              the run's .config
model.safetensors   its weights by their names here, with arm, seed and iteration as metadata
own/                the files of custom variants that the study recorded
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from gpt2.training_step import build_model
from gpt2.transformer import GPT2, restore_step
from ra.hooks import custom_folder
from ra.variants import variant
from runtime.errors import UserError, first_sentences
from runtime.settings import load_config

CONFIG, WEIGHTS, CUSTOM = "config", "model.safetensors", "own"


def load_run(folder: Path | str) -> GPT2:
    """Return the model of an exported arm for evaluation: on the CPU, in float32. Files in own/ are imported.

    UserError for a folder without these files, and for damaged weights.
    """
    from safetensors import SafetensorError, safe_open

    folder = Path(folder)
    config = load_config(folder / CONFIG)
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            facts = file.metadata()
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder / WEIGHTS} cannot be read: {first_sentences(error)}; fix: make export"
        ) from None
    custom = folder / CUSTOM
    with custom_folder(custom) if custom.is_dir() else contextlib.nullcontext():
        chosen = variant(facts["arm"], config.model, config.alternation)
        model = build_model(chosen.model, chosen.parts, int(facts["seed"]))
    model.load_state_dict(state)
    restore_step(model, int(facts["iteration"]))
    return model.eval()
