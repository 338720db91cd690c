"""Evaluate a language model that was trained by GRPO on platforms: the accuracy on its test problems."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.initial_weights import state_digest
from gpt2.platforms import Platform, on_platform
from grpo.accuracy import answers, load_model, rewards_of
from grpo.gsm8k import Problem, digest, read_problems
from referee.verdict.rows import Row
from runtime import run_plan
from runtime.errors import UserError
from runtime.run_record import WEIGHTS
from runtime.settings import GrpoConfig
from study.evaluation.loaded_runs import refuse_altered
from study.evaluation.transfer_runs import EvaluatedPlatforms, PlatformEvaluation, device_of
from study.runs import FinishedRecord


def evaluate_run(
    run_dir: Path, record: FinishedRecord, names: Sequence[str], machine: str
) -> EvaluatedPlatforms:
    """Evaluate a run as study.evaluation.transfer_runs does. UserError for altered files and other test problems."""
    refuse_altered(run_dir, record)
    plan = run_plan.load(run_dir / run_plan.FILE)
    settings = plan.settings.grpo
    assert settings
    problems = read_problems(settings.test_file, "test")[: settings.evaluate_limit or None]
    if digest(problems) != record.fingerprint.validation:
        raise UserError(
            f"{settings.test_file or 'GSM8K'} has other test problems than those of {run_dir}; fix: restore the file"
        )
    model, tokenizer = load_model(run_dir / WEIGHTS)
    resolved, machine = device_of(plan.settings, record.target.device, machine)
    weights = state_digest(model.to(resolved.device).eval())
    found = _Answers(run_dir, record, resolved, weights, "", "", model, tokenizer, problems, settings)
    return found.on(names, machine, [])


@dataclass(frozen=True)
class _Answers(PlatformEvaluation):
    """A language model on its test problems."""

    model: Any
    tokenizer: Any
    problems: Sequence[Problem]
    settings: GrpoConfig

    def scored(self, platform: Platform, row: Row) -> list[tuple[Row, Sequence[float]]]:
        settings, home = self.settings, self.record.target.dtype
        model, context = on_platform(self.model, platform, self.resolved.device, home)
        with context():
            responses = answers(
                model, self.tokenizer, self.problems, settings.response_tokens, settings.evaluate_batch
            )
        rewards = rewards_of(responses, self.problems)
        return [(row.replace(value=sum(rewards) / len(rewards)), rewards)]
