"""Evaluate a trained model on the held-out texts of CONFIG_EVAL_SETS."""

from __future__ import annotations

from collections.abc import Callable

from gpt2.data.eval_texts import EvalText, read_text
from gpt2.eval import rolling
from gpt2.eval.evaluator import Evaluator
from runtime import ranks
from runtime.errors import UserError
from runtime.eval_set_records import EvaluatedText
from runtime.resolve import ResolvedTarget
from runtime.settings import Config


def evaluate_sets(
    config: Config,
    evaluator: Evaluator,
    resolved: ResolvedTarget,
    announce: Callable[[str], None],
    note: Callable[[str], None],
) -> dict[str, EvaluatedText]:
    """Return the result of each set by name. A set that cannot be read on any rank is left out, with a note.

    announce: called with the work that begins.
    """
    found = {}
    for one in config.evaluation.sets:
        announce(f"evaluating {one.name}")
        text: EvalText | None = None
        problem = "another rank could not read it"
        try:
            text = read_text(one, config.data, config.model.block_size, report=announce)
        except (UserError, OSError) as error:
            problem = " ".join(f"{error}".split())
        if any(ranks.agree(text is None)) or text is None:
            note(f"{one.name} is not evaluated: {problem}")
            continue
        score = evaluator.score_text(text)
        found[one.name] = EvaluatedText(
            rolling.entry(text, score),
            resolved.device_name,
            resolved.dtype,
            tuple(score.window_tokens),
            tuple(score.window_nats),
        )
    return found
