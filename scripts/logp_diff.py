"""`make logp-diff RUN=results/STUDY/runs/NAME`: sample with a KV cache and compare with the pass of training.

python -m scripts.logp_diff RUN_DIR [--out FOLDER] [--threshold X]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from referee.errors import NumericsError
from runtime.errors import UserError, run_command
from runtime.resolved_target import export_environment
from study.make_arguments import command_arguments

PROMPTS, TOKENS = 4, 32  # from the validation text, and sampled after each


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts.logp_diff")
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threshold", default="0.01")
    given = parser.parse_args(command_arguments(("OUT", "THRESHOLD"), paths="RUN"))
    try:
        threshold = float(given.threshold)
    except ValueError:
        raise UserError(f"THRESHOLD={given.threshold} is not a number; fix: THRESHOLD=0.01") from None
    if len(given.runs) != 1:
        raise UserError("RUN names no single run; fix: make logp-diff RUN=results/STUDY/runs/NAME")
    export_environment()  # before torch is imported
    import torch

    from gpt2.sampling import Cache, CacheError, response_log_probs, sample
    from referee.numerics.runs.logp_diff import logp_diff, show
    from study.evaluation.attention_page import choose_text
    from study.evaluation.loaded_runs import load_run

    run = load_run(given.runs[0])
    model = run.model.eval()
    text = choose_text([run], None)
    length = min(text.tokens // PROMPTS, model.block_size // 2)
    if not length:
        raise UserError(f"{text.source} has {text.tokens} tokens, {PROMPTS} are needed; fix: another text")
    new = min(TOKENS, model.block_size - length)
    prompts = torch.tensor(text.ids[: length * PROMPTS]).view(PROMPTS, length)
    cache = Cache()
    rollout, training = [], []
    try:
        for number, prompt in enumerate(prompts.split(1)):
            cache.clear()
            sampled = sample(model, prompt, new, [torch.Generator().manual_seed(number)], cache)
            rollout.append(sampled.log_probs)
            training.append(response_log_probs(model, prompt, sampled.tokens))
        found = logp_diff(torch.cat(rollout), torch.cat(training), threshold=threshold)
    except (CacheError, NumericsError) as error:
        raise UserError(f"{run.name}: {error}") from error
    print(f"{run.name}: {PROMPTS} prompts of {length} tokens ({text.source}), {new} sampled tokens each")
    for note in run.notes:
        print(f"{run.name}: {note}")
    return show(found, given.out)


if __name__ == "__main__":
    run_command(main)
