"""A random Qwen2 of 29,000 weights with a tokenizer, and problems like GSM8K's.

python -m tests.grpo.tiny FOLDER    writes the example of docs/grpo.md: FOLDER/train.jsonl, test.jsonl and model
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SETTINGS = {  # of a study of this model, in the folder with it and its problems
    "VARIANTS": "B B+AQN=strong", "SEEDS": "1", "EFFECTIVE_BATCH": "16", "GRPO_GROUP": "4", "MICRO_BATCH": "8",
    "GRPO_RESPONSE_TOKENS": "8", "GPT2_MAX_ITERS": "10", "GRPO_EVALUATE_STEPS": "5", "CHECKPOINT_SECONDS": "1",
    "LEARNING_RATE": "1e-3", "CPU_THREADS": "1", "GRPO_TRAIN_FILE": "train.jsonl", "GRPO_TEST_FILE": "test.jsonl",
    "GRPO_MODEL": "./model",
}  # fmt: skip
NAMES = ("Ada", "Ben", "Cleo", "Dan")
THINGS = ("apples", "books", "coins", "eggs")


def write_problems(path: Path, count: int, answers: Sequence[int] = range(10)) -> Path:
    """Write short problems whose answers take turns."""
    lines = []
    for number in range(count):
        name, thing, answer = NAMES[number % 4], THINGS[number // 4 % 4], answers[number % len(answers)]
        question = f"{name} has {answer + number} {thing} and gives away {number}. How many are left?"
        lines.append(json.dumps({"question": question, "answer": f"{answer}\n#### {answer}"}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def write_model(folder: Path, texts: Sequence[str], vocabulary: int = 160) -> Path:
    """Write a random Qwen2 and a byte-level BPE tokenizer that was trained on the texts."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([*texts, "0123456789 \n#system user assistant"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=TEMPLATE
    )
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(fast), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, initializer_range=0.5, eos_token_id=fast.eos_token_id, bos_token_id=None,
        pad_token_id=fast.pad_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    fast.save_pretrained(folder)
    return folder


def responses_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Return the recorded responses of a step, such as test-00020."""
    content = gzip.decompress((run_dir / f"responses/{name}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in content.splitlines()]


def files_of(run_dir: Path) -> dict[str, Any]:
    """Return the content of a run that must not depend on interruptions: all but times, phases and names."""
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["event"] != "phase"]
    found: dict[str, Any] = {path.name: path.read_bytes() for path in (run_dir / "responses").iterdir()}
    found["metrics"] = [{key: line[key] for key in line if key != "train_seconds"} for line in steps]
    found["rows"] = [json.loads(line)["value"] for line in (run_dir / "rows.jsonl").read_text().splitlines()]
    return found | {"model": (run_dir / "model/model.safetensors").read_bytes()}


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [write_problems(folder / f"{split}.jsonl", 64, answers=(4, 7)) for split in ("train", "test")]
    write_model(folder / "model", [files[0].read_text(encoding="utf-8")])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
