"""`make memory [TARGET="a100-40g w7900"] [VARIANTS="B RALEARN"]`: predicted and measured peak memory.

With TARGET nothing is measured and no card is needed: .config is taken as if that target had been named in it.
Without, the target is .config's; on that machine each kind of variant is measured as well, in a process of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from gpt2.config.config import Config
from gpt2.config.dotconfig import Entry, Symbols, parse_lines, read_symbols, read_text
from gpt2.hardware import attention_kernels
from gpt2.hardware import resolve as target
from gpt2.system.errors import UserError, run_command
from gpt2.system.files import write_json, write_text
from kconfig import commands, files
from kconfig import rules as rules
from pages.document import render_terminal
from pages.page import render_html
from ra.naive import NaiveAttention, naive_loss
from ra.settings import AlternationSettings
from ra.variants import Variant, variant
from study.memory.micro_batch import MARGIN, Predictions
from study.memory.page import MemoryRow, as_json, heading, memory_document
from study.runner.child_process import EXACT_HEAP
from study.runner.settings import StudySettings

CONFIG, STUDY = Path(".config"), Path("defconfigs/gpt2-ra-ablation")
MICRO_2025 = 32
NOTES = (
    "Predicted: one optimizer step in its steady state and one evaluation batch of the real model, attention, loss and "
    "optimizer on tensors without memory; nothing is extrapolated.",
    "The step is not compiled. torch.compile fuses elementwise operations and keeps fewer tensors.",
    "On a GPU the fused attention kernels are taken to keep what flash attention keeps: q, k, v, the output in its own "
    "format and float32 statistics of a number a row and head.",
    "Peak allocated is compared. What the allocator reserves beyond it and the CUDA context come out of the margin.",
    "Rows '2025 report' are not runnable variants: logits in full, and for RALEARN two T x T score matrices.",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.memory")
    parser.add_argument("--target", default="")
    parser.add_argument("--variants", default="")
    parser.add_argument("--measure", default="", help="measure this variant here and print JSON")
    parser.add_argument("--micro", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.measure:
        return measure_one(arguments.measure, arguments.micro)
    for name in arguments.target.split() or [""]:
        show(name, arguments.variants)
    return 0


def symbols_for(name: str) -> Symbols:
    """.config, or the study's own defconfig where there is none; with a name, as if that target were chosen in it."""
    if not name:
        if not CONFIG.exists():
            raise UserError(
                "there is no .config; right: make defconfig-gpt2-ra-ablation, or make memory TARGET=NAME"
            )
        return read_symbols(CONFIG)
    fragment, *more = commands.resolve(f"{STUDY.name}+{name}")[1:]
    if more:
        raise UserError(
            f'TARGET={name} is one machine of several kinds; right: TARGET="{name.replace("+", " ")}"'
        )
    base: dict[str, Entry] = {}
    if CONFIG.exists():
        loaded = files.load_strictly(read_text(CONFIG), str(CONFIG))
        base = parse_lines(rules.render(loaded.tree, minimal=True), str(CONFIG))
    else:
        base = parse_lines(read_text(commands.resolve(STUDY.name)[0]), str(STUDY))
    base = {key: entry for key, entry in base.items() if not key.startswith("TARGET_") and key != "DETECTED"}
    tree = rules.load_kconfig(name)
    entries = rules.merge(tree, [base, parse_lines(read_text(fragment), commands.display_name(fragment))])
    rules.check_tree(tree, {entry.name: entry.where for entry in entries})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config"
        path.write_text(rules.render(tree))
        return read_symbols(path)


def show(name: str, only: str) -> None:
    """One target: plan, predict, measure where it is here, print, and write the page."""
    symbols = symbols_for(name)
    config, settings = Config.from_symbols(symbols), StudySettings.from_symbols(symbols)
    resolved, here = resolve(config, planning=bool(name))
    alternation = AlternationSettings.from_symbols(symbols)
    names = only.split() or list(settings.variants)
    variants = [variant(each, config.model, alternation) for each in names]
    predictions = Predictions(config, resolved)
    # the study's plan, whatever variants are shown
    batch = predictions.choose_batch(variant(each, config.model, alternation) for each in settings.variants)
    reasons = {each.name: predictions.unpredictable(each, batch.micro) for each in variants}
    for reason in filter(None, reasons.values()):
        print(reason)
    variants = [each for each in variants if not reasons[each.name]]
    rows = [predicted_row(predictions, each, variants, batch.micro) for each in variants]
    head = heading(resolved, batch, config.model.size, MARGIN)
    print(head, flush=True)
    if here:
        target.export_environment(config.target.name)  # for the processes that measure
        for row in rows:
            if not row.same_as:
                row.measured = measured(row.name, row.micro)
    if resolved.target.kind != "cpu":
        rows += as_in_2025(predictions, alternation)
    document = memory_document(rows, head, NOTES)
    print(render_terminal(dataclasses.replace(document, title="", subtitle="")))
    folder = settings.results_dir / "memory"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / f"{resolved.target.name}.json", as_json(rows, head))
    write_text(folder / f"{resolved.target.name}.html", render_html(document))
    print(f"\ncharts: {folder / resolved.target.name}.html\n", flush=True)


def resolve(config: Config, planning: bool) -> tuple[target.ResolvedTarget, bool]:
    """The target, and whether it is this machine."""
    if planning:
        return target.resolve(config.target, planning=True), False
    try:
        return target.resolve(config.target), True
    except target.TargetError as error:
        print(f"predicted only: {error}")
        return target.resolve(config.target, planning=True), False


def predicted_row(predictions: Predictions, each: Variant, variants: list[Variant], micro: int) -> MemoryRow:
    first = next(other.name for other in variants if other.cost_class == each.cost_class)
    return MemoryRow(
        each.name,
        micro,
        predictions.of(each, micro),
        predictions.largest_micro(each),
        predictions.fits(each, micro),
        "" if first == each.name else first,
    )


def as_in_2025(predictions: Predictions, alternation: AlternationSettings) -> list[MemoryRow]:
    """The same model as the 2025 study trained it: all logits at once, and RALEARN from written-out scores."""
    from gpt2.memory.prediction import predict

    model = predictions.config.model
    micro = min(MICRO_2025, predictions.config.batch.effective)
    rows = []
    for name in ("B", "RALEARN"):
        chosen = variant(name, model, alternation)
        work = predictions.work_at(chosen, micro)
        work = dataclasses.replace(work, loss=naive_loss)
        if name == "RALEARN":
            work = dataclasses.replace(
                work,
                attention=lambda layer: NaiveAttention(
                    model.width,
                    model.heads,
                    model.dropout,
                    initial_probability=alternation.initial_probability,
                    learning_rate_multiplier=alternation.learning_rate_multiplier,
                ),
            )
        prediction = predict(work)
        fits = prediction.peak_bytes <= predictions.room_bytes
        rows.append(MemoryRow(f"{name}, 2025 report", micro, prediction, None, fits))
    return rows


# ---- measuring


def measured(name: str, micro: int) -> dict[str, dict[str, int]] | None:
    """What a process of its own measures; None where it fails, which is told."""
    print(f"measuring {name} ...", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "scripts.memory", "--measure", name, "--micro", str(micro)],
        env=os.environ | {"GLIBC_TUNABLES": EXACT_HEAP},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given")
        print(f"measuring {name} failed: {last}")
        return None
    found: dict[str, dict[str, int]] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure_one(name: str, micro: int) -> int:
    """Measure a variant in this process; on a GPU also write a snapshot for pytorch.org/memory_viz."""
    from gpt2.memory.measure import measure

    symbols = symbols_for("")
    config, settings = Config.from_symbols(symbols), StudySettings.from_symbols(symbols)
    resolved = attention_kernels.prepare_device(config.target, config.model)
    chosen = variant(name, config.model, AlternationSettings.from_symbols(symbols))
    work = Predictions(config, resolved).work_at(chosen, micro)
    path = settings.results_dir / "memory" / f"{resolved.target.name}-{name}.pickle"
    with attention_kernels.attention_context(resolved, config.model.dropout):
        found = measure(work, resolved.device, path)
    print(json.dumps(dataclasses.asdict(found)))
    return 0


if __name__ == "__main__":
    run_command(main)
