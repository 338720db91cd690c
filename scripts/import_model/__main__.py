"""`make import MODEL=gpt2 [OUT=results/imported] [CONFIG_X=v]`: GPT-2 weights of transformers as a run.

python -m scripts.import_model MODEL [--out FOLDER]. MODEL is a folder with config.json and model.safetensors, or a name
on the Hugging Face hub. The settings are those of gpt2-ra-ablation with the shape of the model; CONFIG_X=v of make's
command line changes them, such as the data on which the weights are evaluated.
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from configuration import commands, rules
from configuration.arguments import command_arguments, make_variables
from configuration.targets import STUDY
from gpt2.artifacts.run_record import RunRecord
from gpt2.config.config import Config
from gpt2.config.dotconfig import Symbols, parse_lines, quote
from gpt2.hardware.detect import detected_target_name
from gpt2.hardware.resolve import export_environment
from gpt2.interop.pretrained import Pretrained, find_pretrained
from gpt2.system.errors import UserError, run_command
from ra.settings import AlternationSettings

OUT = Path("results/imported")


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.import_model")
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(command_arguments(("OUT",), path="MODEL", symbols=True))
    if not given.model:
        raise UserError("MODEL names no weights; fix: make import MODEL=gpt2, or MODEL=a folder")
    weights = find_pretrained(given.model)
    print(
        f"{weights.source}: {weights.layers} layers, {weights.heads} heads, width {weights.width}, "
        f"{weights.positions} positions, {weights.vocabulary.size:,} tokens, SHA-256 {weights.sha256[:12]}..."
    )
    for note in weights.notes:
        print(note)
    assigned = [f"{name}={value}" for name, value in make_variables().items() if name.startswith("CONFIG_")]
    text = config_text(weights, assigned)
    symbols = Symbols("config", parse_lines(text, "config"))
    config = Config.from_symbols(symbols)
    target = config.target
    export_environment(target.name, detected_target_name(), target.deterministic)  # before torch is imported
    from study.importing.run import find_imported, import_run

    found = find_imported(weights, given.out)
    found = found or import_run(weights, given.out, config, text, AlternationSettings.from_symbols(symbols))
    if found.present:
        print(f"nothing to do: {found.folder} has these weights")
    else:
        print(f"wrote {found.folder}")
    print("\n".join(scores(found.record)))
    print(f"next: make sample RUN={found.folder}")
    print(
        f"fine-tune variants: make defconfig-{STUDY} CONFIG_INIT_FROM={shlex.quote(weights.source)} "
        f"{' '.join(weights.config_lines)} CONFIG_LEARNING_RATE=3e-5 CONFIG_STUDY_NAME=finetune"
    )
    print(
        f"the model has {weights.positions:,} positions; a smaller CONFIG_GPT2_BLOCK_SIZE needs less time and memory"
    )
    return 0


def config_text(weights: Pretrained, assigned: list[str]) -> str:
    """Return the .config of the run. assigned: CONFIG_X=v of the command line."""
    taken = {line.partition("=")[0] for line in assigned}
    shape = [*weights.config_lines, f"CONFIG_INIT_FROM={quote(weights.source)}", 'CONFIG_VARIANTS="B"']
    shape += ['CONFIG_STUDY_NAME="imported"', "CONFIG_SEEDS=1"]
    tree = rules.load_kconfig(detected_target_name())
    lines = [line for line in shape if line.partition("=")[0] not in taken]
    commands.configure(tree, commands.read_layers(STUDY), [*lines, *assigned])
    return rules.render(tree)


def scores(record: RunRecord) -> list[str]:
    """Return lines on the validation loss and HellaSwag."""
    lines = []
    if record.validation and record.validation.loss is not None:
        seen = record.validation
        lines.append(
            f"validation loss {seen.loss:.4f} nats per token, perplexity {seen.perplexity:.2f}, on {seen.tokens:,} "
            "tokens"
        )
    if record.hellaswag and record.hellaswag.acc is not None:
        lines.append(f"HellaSwag {100 * record.hellaswag.acc:.1f} % of {record.hellaswag.items:,} items")
    elif record.hellaswag and record.hellaswag.absent:
        lines.append(f"HellaSwag was not scored: {record.hellaswag.absent}")
    return lines


if __name__ == "__main__":
    run_command(main)
