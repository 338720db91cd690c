"""`make data`: prepare the corpus, HellaSwag and the held-out texts of .config; check all, rebuild a damaged corpus."""

from __future__ import annotations

from gpt2 import dataset, hellaswag, tokenizer
from gpt2.validation import check_texts
from referee.pages.markup import counted
from runtime.errors import UserError, run_command
from scripts.study import load


def main() -> int:
    _, config, _ = load()
    if config.grpo:
        raise UserError(".config trains by GRPO, whose problems need no preparation; fix: make")
    directory = dataset.prepare(config.data, report=print, rebuild=True)
    manifest = dataset.verify(directory)
    dataset.check_length(manifest, config.model.block_size)
    tokens = " + ".join(f"{manifest.splits[split].tokens:,} {split}" for split in dataset.SPLITS)
    print(f"data: {directory}: {tokens} tokens of {counted(manifest.documents, 'document')}")
    if manifest.marks:
        print(f"data: {tokenizer.describe_marks(tokenizer.load(config.data.tokenizer), manifest.marks)}")
    if config.evaluation.hellaswag:
        source = hellaswag.obtain(config.evaluation, config.data.directory, report=print)
        if isinstance(source, str):
            print(f"HellaSwag: absent: {source}")
        else:
            items = hellaswag.load_items(source, config.evaluation.hellaswag_limit)
            print(f"HellaSwag: {source}: {len(items):,} items")
    check_texts(config, report=print)
    return 0


if __name__ == "__main__":
    run_command(main)
