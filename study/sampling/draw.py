"""Sample texts from trained runs, with a cache of queries, keys and values where the attention permits one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from gpt2 import tokenizer
from gpt2.sampling import Cache, CacheError, Drawing, Sample, sample
from referee.numerics.text_files import clean
from runtime.errors import UserError
from study.attention.inspect import TrainedRun, load_run
from study.sampling.data import RunSamples, SampledText, SamplingSettings

DEFAULT_TOKENS = 200
UNCACHED = "sampled without a cache: {}"


def sample_runs(run_dirs: Sequence[Path], settings: SamplingSettings) -> list[RunSamples]:
    """Sample the same number of texts from each run; text n of every run has the random numbers of seed + n.

    UserError for a prompt or a number of tokens that does not fit, and for what `load_run` refuses.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    return [_sample_run(load_run(path), settings, device) for path in run_dirs]


def _sample_run(run: TrainedRun, settings: SamplingSettings, device: torch.device) -> RunSamples:
    encoding = tokenizer.load(run.config.data.tokenizer)
    prompt = encoding.encode(clean(settings.prompt)) or [encoding.eot]
    room = run.model.block_size - len(prompt)
    if room < 1:
        raise UserError(
            f"{run.name}: PROMPT has {len(prompt)} tokens and the block size is {run.model.block_size}; fix: "
            "a shorter PROMPT"
        )
    if settings.tokens > room:
        raise UserError(
            f"{run.name}: TOKENS={settings.tokens} after a prompt of {len(prompt)} exceed the block size "
            f"{run.model.block_size}; fix: TOKENS={room} or less"
        )
    model = run.model.eval().to(device)
    prompt_BT = torch.tensor([prompt] * settings.count, device=device)
    new = settings.tokens or min(room, DEFAULT_TOKENS)
    drawing = Drawing(settings.temperature, settings.top_k, settings.top_p)
    notes = list(run.notes)

    def drawn(cache: Cache | None) -> Sample:
        generators = [torch.Generator().manual_seed(settings.seed + n) for n in range(settings.count)]
        return sample(model, prompt_BT, new, generators, cache, drawing)

    try:
        found = drawn(Cache())
    except CacheError as error:
        notes.append(UNCACHED.format(str(error).partition(";")[0]))
        found = drawn(None)
    texts = [
        _text(encoding, tokens, log_probs)
        for tokens, log_probs in zip(found.tokens.cpu(), found.log_probs.cpu(), strict=True)
    ]
    return RunSamples(run.name, run.variant, run.seed, run.iteration, tuple(texts), tuple(notes))


def _text(encoding: tokenizer.Tokenizer, tokens_T: Tensor, log_probs_T: Tensor) -> SampledText:
    """Decode up to and with the first end of text: what follows it is another document."""
    ids = tokens_T.tolist()
    length = ids.index(encoding.eot) + 1 if encoding.eot in ids else len(ids)
    text = tokenizer.decode(encoding, ids[:length])
    return SampledText(text, length, -float(log_probs_T[:length].double().mean()))
