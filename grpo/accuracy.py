"""Load a language model, answer problems by greedy decoding, and record every response with its reward.

RUN/responses/train-00001.jsonl.gz    rollout of step 1
RUN/responses/test-00020.jsonl.gz     test problems after step 20
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo.gsm8k import Problem, reward
from runtime.errors import UserError
from runtime.files import write_bytes
from runtime.run_record import RESPONSES


def load_model(name: str | Path) -> tuple[Any, Any]:
    """Return the model in float32 and its tokenizer. UserError without a chat template."""
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    if not tokenizer.chat_template:
        raise UserError(f"{name} has no chat template; fix: CONFIG_GRPO_MODEL= an instruction-tuned model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


@torch.no_grad()
def answers(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    tokens: int,
    batch: int,
) -> list[str]:
    """Answer all problems by greedy decoding, `batch` of them at once, with at most `tokens` each."""
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}], tokenize=False, add_generation_prompt=True
        )
        for one in problems
    ]
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    ends = model.generation_config.eos_token_id or []
    ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    greedy = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, repetition_penalty=1.0, temperature=1.0, top_p=1.0, top_k=50,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=ends, disable_compile=True,
    )  # fmt: skip
    responses = [""] * len(texts)
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = tokenizer([texts[number] for number in chosen], return_tensors="pt", padding=True,
                               padding_side="left", add_special_tokens=False).to(model.device)  # fmt: skip
            made = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                generation_config=greedy,
            )
            new = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            for number, text in zip(chosen, new, strict=True):
                responses[number] = text
    finally:
        model.train(training)
    return responses


def rewards_of(responses: Sequence[str], problems: Sequence[Problem]) -> list[float]:
    """Return 1 for each right response, else 0."""
    return [reward(text, one.answer) for text, one in zip(responses, problems, strict=True)]


def write_responses(
    run_dir: Path,
    name: str,
    problems: Sequence[int],
    answers: Sequence[str],
    responses: Sequence[str],
    rewards: Sequence[float],
) -> None:
    """Write a file of responses. problems: their numbers. answers: the published ones."""
    lines = [
        json.dumps({"problem": number, "answer": answer, "response": text, "reward": value}) + "\n"
        for number, answer, text, value in zip(problems, answers, responses, rewards, strict=True)
    ]
    path = run_dir / RESPONSES / f"{name}.jsonl.gz"
    path.parent.mkdir(exist_ok=True)
    write_bytes(path, gzip.compress("".join(lines).encode(), mtime=0))
