"""`make data`: prepare the corpus and HellaSwag that .config names, or check what is there and mend it."""

from __future__ import annotations

from gpt2.data import dataset
from gpt2.eval import hellaswag
from gpt2.system.errors import run_command
from scripts.study import load


def main() -> int:
    _, config, _ = load()
    directory = dataset.prepare(config.data, report=print, rebuild=True)
    manifest = dataset.verify(directory)
    tokens = " + ".join(f"{manifest['splits'][split]['tokens']:,} {split}" for split in dataset.SPLITS)
    print(f"data: {directory}: {tokens} tokens of {manifest['documents']} documents")
    if config.evaluation.hellaswag:
        source = hellaswag.obtain(config.evaluation, config.data.directory, report=print)
        reason = f"absent: {source.reason}" if isinstance(source, hellaswag.Absent) else str(source)
        print(f"HellaSwag: {reason}")
    return 0


if __name__ == "__main__":
    run_command(main)
