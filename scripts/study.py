"""`make`: run the study that .config describes, resume what was cut off, and report.

The first line says what it was scaled to; torch is loaded only after .config was found right.
"""

from __future__ import annotations

from pathlib import Path

from runtime.dotconfig import Symbols, read_symbols, read_text
from runtime.errors import UserError, run_command
from runtime.gpu_specs import TARGETS
from runtime.settings import Config, TargetConfig
from study.kconfig_rules import load_strictly
from study.make_arguments import refuse_assignments
from study.preconditions import locked
from study.report.method import seeds_text
from study.study_settings import StudySettings

CONFIG = Path(".config")


def first_line(config: Config, settings: StudySettings) -> str:
    """Describe the study in one line."""
    scale = f"GPT-2 {config.model.size}"
    if config.target.scale_cpu:
        scale = f"CPU study ({why_cpu(config.target)}): {config.model.size} model"
    rates, tuning = len(settings.rates), settings.tuning_seeds
    tuned = f"{rates} learning rates x {tuning} tuning seeds, " if rates else ""
    data = f"{config.data.dataset} data"
    if config.grpo:
        scale, data = f"GRPO of {config.grpo.model}", config.grpo.train_file or "GSM8K"
    return (
        f"{settings.name}: {scale}, {len(settings.variants)} variants x {seeds_text(settings.seeds)}, {tuned}"
        f"at most {config.budget.text} a run, {data}"
    )


def why_cpu(target: TargetConfig) -> str:
    """Why .config is scaled to a CPU: nothing larger was there when it was made, or it was chosen."""
    if target.detected == "cpu":
        return "no GPU was found when .config was made, so it is scaled to one"
    seen = TARGETS[target.detected].title if target.detected in TARGETS else target.detected
    return f"CONFIG_TARGET_CPU=y, although {seen} was found when .config was made"


def load() -> tuple[Symbols, Config, StudySettings]:
    """.config, read strictly; UserError where it is missing, wrong, or not what the command line says."""
    refuse_assignments()
    if not CONFIG.exists():
        raise UserError("there is no .config; fix: make defconfig-gpt2-ra-ablation (make help lists others)")
    load_strictly(read_text(CONFIG), str(CONFIG))  # an edited one follows Kconfig's rules, too
    symbols = read_symbols(CONFIG)
    return symbols, Config.from_symbols(symbols), StudySettings.from_symbols(symbols)


def main() -> int:
    symbols, config, settings = load()
    print(first_line(config, settings), flush=True)
    if (folder := settings.results_dir / settings.name).exists():
        with locked(folder):  # a running study is refused before torch is loaded
            pass
    from study.study import run_study

    return run_study(symbols, read_text(CONFIG))


if __name__ == "__main__":
    run_command(main)
