"""Sample texts from trained runs, with a cache of queries, keys and values where the attention permits one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpt2 import tokenizer
from gpt2.sampling import Cache, CacheError, Drawing, Sample, sample
from referee.numerics.text_files import clean
from referee.pages.document import Block, BulletList, Document, Paragraph, Table
from runtime.errors import UserError
from study.evaluation.loaded_runs import TrainedRun, load_run


@dataclass(frozen=True)
class SampledText:
    """One text of one run. nats_per_token: minus the mean log-probability of its tokens under the model."""

    text: str
    tokens: int
    nats_per_token: float


@dataclass(frozen=True)
class RunSamples:
    """The texts of one run. notes: what its reader needs to know, such as a checkpoint that was skipped."""

    run: str
    variant: str
    seed: int
    iteration: int
    texts: tuple[SampledText, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SamplingSettings:
    """prompt: empty for the end-of-text token alone. tokens: new ones of each text. seed: of the first text."""

    prompt: str
    tokens: int
    count: int
    seed: int
    temperature: float
    top_k: int
    top_p: float


def as_json(runs: list[RunSamples], settings: SamplingSettings) -> dict[str, Any]:
    return {
        "settings": dataclasses.asdict(settings),
        "runs": [dataclasses.asdict(run) for run in runs],
    }


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


NEWLINE, SPACE = "↵", "·"


def samples_document(runs: Sequence[RunSamples], settings: SamplingSettings) -> Document:
    """Return a table with a row for each seed and a column for each run, and one of the runs."""
    rows = [
        [str(settings.seed + n), *(_shown(run.texts[n].text) for run in runs)] for n in range(settings.count)
    ]
    texts = Table(["seed", *(run.run for run in runs)], rows, range(1, len(runs) + 1))
    blocks: list[Block] = [Paragraph(_about(settings)), texts]
    blocks.append(Table.of(runs, {
        "run": lambda run: run.run,
        "variant": lambda run: run.variant,
        "iteration": lambda run: f"{run.iteration:,}",
        "tokens": lambda run: f"{sum(text.tokens for text in run.texts):,}",
        "nats per token": lambda run: f"{mean_nats(run):.3f}",
    }))  # fmt: skip
    blocks.append(BulletList([f"{run.run}: {note}" for run in runs for note in run.notes]))
    blocks.append(Paragraph(
        f"{NEWLINE}: end of a line. {SPACE}: one of several spaces. nats per token: minus the mean log-probability of "
        "the sampled tokens at temperature 1. A few texts are no evidence of which run is better."
    ))  # fmt: skip
    return Document("Samples: " + ", ".join(run.run for run in runs), blocks)


def mean_nats(run: RunSamples) -> float:
    """Mean over all sampled tokens of the run."""
    tokens = sum(text.tokens for text in run.texts)
    return sum(text.nats_per_token * text.tokens for text in run.texts) / tokens


def _shown(text: str) -> str:
    """Return a text for one cell, which keeps no blanks: line ends and repeated spaces become signs."""
    text = text.replace("\r\n", "\n").replace("\n", NEWLINE)
    return re.sub(r" {2,}|^ | $", lambda found: SPACE * len(found[0]), text)


def _about(settings: SamplingSettings) -> str:
    prompt = f'after "{_shown(settings.prompt)}"' if settings.prompt else "from the start of a document"
    limits = f"top_k {settings.top_k or 'off'}, top_p {settings.top_p:g}"
    return f"Texts {prompt}; temperature {settings.temperature:g}, {limits}. Equal seeds draw equal random numbers."
