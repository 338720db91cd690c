"""TRL's trainer with noise: in every forward pass of sampling, in none of training; log-probabilities; evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from grpo.accuracy import answers
from grpo.gsm8k import read_problems
from grpo.rollout import (
    DivergedError,
    RolloutNoiseTrainer,
    TokenLogps,
    draw,
    recorded_rewards,
    rollout_noise,
)
from ra.noise_schedule import NoiseSchedule
from tests.grpo.tiny import responses_of, write_model, write_problems

SCHEDULE = NoiseSchedule(0.1, 0.01, 3)
NORM = "model.layers.1.input_layernorm"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("grpo")
    problems = write_problems(folder / "problems.jsonl", 12)
    write_model(folder / "model", [problems.read_text()])
    return folder


def trainer(place: Path, run_dir: Path, lines: list[dict[str, Any]], **options: Any) -> RolloutNoiseTrainer:
    run_dir.mkdir(exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": one.prompt}], "problem": number, "answer": one.answer}
        for number, one in enumerate(read_problems(str(place / "problems.jsonl"), "train"))
    ]
    return RolloutNoiseTrainer(
        AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32),
        recorded_rewards(run_dir),
        args=GRPOConfig(
            output_dir=str(run_dir), report_to="none", disable_tqdm=True, logging_steps=1, save_strategy="no",
            shuffle_dataset=False, max_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
            num_generations=4, max_completion_length=6, learning_rate=1e-3, bf16=False, use_cpu=True,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(place / "model", padding_side="left"),
        schedule=SCHEDULE, noise_seed=5, on_step=lines.append, **options,
    )  # fmt: skip


def test_sampling_has_the_noise_of_its_step_and_training_has_none(
    place: Path, tmp_path: Path, one_thread: None
) -> None:
    lines: list[dict[str, Any]] = []
    run = trainer(place, tmp_path / "run", lines)
    norm = run.model.get_submodule(NORM)
    trained = norm.weight
    sampling: dict[int, list[torch.Tensor]] = {}
    training = []

    def look(module: torch.nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            training.append(module.weight is trained)
        else:
            sampling.setdefault(run.state.global_step, []).append((module.weight - trained).detach().clone())

    norm.register_forward_hook(look)
    run.train()
    assert training
    assert all(training)
    assert norm.weight is trained
    for step, noises in sampling.items():
        sigma = SCHEDULE.sigma(step, 3)
        expected = draw(NORM, trained.shape, sigma, 5, step)
        assert len(noises) > 3
        assert all(torch.allclose(noise, expected, atol=1e-6) for noise in noises)
    assert list(sampling) == [0, 1, 2]
    assert [line["sigma"] for line in lines] == [0.0, 0.1, pytest.approx(0.01)]
    assert abs(lines[0]["logp_diff"]) < 1e-5
    assert lines[1]["logp_diff_absolute"] > 10 * lines[2]["logp_diff_absolute"] / 5 > 1e-4
    for step, line in enumerate(lines, 1):
        rows = responses_of(tmp_path / "run", f"train-{step:05}")
        assert [row["problem"] for row in rows] == [2 * step - 2] * 4 + [2 * step - 1] * 4
        assert sum(row["reward"] for row in rows) / 8 == pytest.approx(line["reward"])


def test_recorded_log_probabilities_are_those_of_the_noisy_model(
    place: Path, tmp_path: Path, one_thread: None
) -> None:
    run = trainer(place, tmp_path / "run", [])
    run.state.global_step, run.state.max_steps = 1, 3
    tokens = run.processing_class("Ada has 3 apples")["input_ids"]
    (completions, logps) = run._generate_single_turn([tokens] * 3, None, {}, 3)
    assert [len(one) for one in completions] == [len(one) for one in logps]
    for completion, found in zip(completions, logps, strict=True):
        ids = torch.tensor([[*tokens, *completion]])
        with torch.no_grad(), rollout_noise(run.model, SCHEDULE, 5, 1, 3):
            table = run.model(ids).logits.log_softmax(-1)[0, len(tokens) - 1 : -1]
        assert found == pytest.approx(
            [float(row[token]) for row, token in zip(table, completion, strict=True)], abs=1e-4
        )
    assert "generate" not in vars(run.model)


def test_an_infinite_logit_is_a_divergence_and_a_token_that_is_never_sampled_is_none() -> None:
    """torch.multinomial fails for an infinite one with an error that says nothing of a divergence."""
    logps = TokenLogps(1.0)
    scores = torch.tensor([[0.0, -torch.inf, 1.0]])
    assert logps(torch.zeros(1, 1, dtype=torch.int64), scores) is scores
    with pytest.raises(DivergedError, match="a logit of the rollout is inf"):
        logps(torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[0.0, torch.inf, 1.0]]))


def test_answers_are_those_of_greedy_decoding_of_each_problem_alone(place: Path, one_thread: None) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    model.generation_config.repetition_penalty = 1.7  # a model's own settings are not used
    model.train()
    tokenizer = AutoTokenizer.from_pretrained(place / "model", padding_side="left")
    problems = read_problems(str(place / "problems.jsonl"), "test")
    found = answers(model, tokenizer, problems, 6, 5)
    assert model.training
    model.eval()
    for one, response in zip(problems, found, strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": one.prompt}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        start = ids.shape[1]
        while ids.shape[1] < start + 6 and (ids.shape[1] == start or ids[0, -1] != tokenizer.eos_token_id):
            with torch.no_grad():
                ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
        assert response == tokenizer.decode(ids[0, start:], skip_special_tokens=True)
