"""Configure and prepare studies in temporary folders, as `make defconfig-NAME` would, without running them."""

from __future__ import annotations

from pathlib import Path

from gpt2.config.dotconfig import parse_lines, read_symbols, read_text
from gpt2.data import dataset
from gpt2.hardware.detect import detected_target_name
from kconfig import commands, rules
from kconfig.arguments import parse_assignments
from study.runner.study import Study


def configure_study(folder: Path, specification: str, **values: str) -> Study:
    """Configure `NAME+FRAGMENT...` with these symbols and results in `folder`. The user's .config stays unchanged."""
    tree = rules.load_kconfig(detected_target_name())
    layers = [
        parse_lines(read_text(path), commands.display_name(path))
        for path in commands.find_files(specification)
    ]
    values = {"RESULTS_DIR": str(folder / "results")} | values
    layers.append(parse_assignments(tree, [f"CONFIG_{name}={value}" for name, value in values.items()]))
    entries = rules.merge(tree, layers)
    rules.check_tree(tree, {entry.name: entry.where for entry in entries})
    text = rules.render(tree)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config").write_text(text, encoding="utf-8")
    return Study(read_symbols(folder / "config"), text)


def prepare_study(study: Study) -> None:
    """Do everything that comes before the first run: data, HellaSwag, the plan."""
    directory = dataset.prepare(study.config.data, report=lambda line: None)
    dataset.check_corpus(directory, study.config.model.block_size, report=lambda line: None)
    study.directory.mkdir(parents=True, exist_ok=True)
    study.find_hellaswag()
    study.plan()
