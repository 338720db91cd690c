"""Accuracy on test problems by greedy decoding."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from rl.gsm8k import Problem, reward, standard_error
from rl.records import AccuracyEvaluation, Response, write_responses


@torch.no_grad()
def evaluate(
    model: Any,
    tokenizer: Any,
    problems: Sequence[Problem],
    run_dir: Path,
    step: int,
    tokens: int,
    batch: int,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> AccuracyEvaluation:
    """Answer all problems by greedy decoding, record the responses, return the accuracy. The model has no noise."""
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
        pad_token_id=tokenizer.pad_token_id, eos_token_id=ends,
        disable_compile=True,
    )  # fmt: skip
    responses = [""] * len(texts)
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = tokenizer([texts[number] for number in chosen], return_tensors="pt", padding=True,
                               padding_side="left", add_special_tokens=False).to(model.device)  # fmt: skip
            with autocast():
                made = model.generate(
                    input_ids=inputs["input_ids"],
                    attention_mask=inputs["attention_mask"],
                    generation_config=greedy,
                )
            answers = tokenizer.batch_decode(
                made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            for number, text in zip(chosen, answers, strict=True):
                responses[number] = text
    finally:
        model.train(training)
    rewards = [reward(text, one.answer) for text, one in zip(responses, problems, strict=True)]
    rows = [
        Response(number, one.answer, text, value)
        for number, (one, text, value) in enumerate(zip(problems, responses, rewards, strict=True))
    ]
    write_responses(run_dir, f"test-{step:05}", rows)
    accuracy = sum(rewards) / len(rewards)
    return AccuracyEvaluation(step, accuracy, standard_error(accuracy, len(rewards)), len(rewards))
