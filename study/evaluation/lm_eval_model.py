"""A trained model as a model of lm-evaluation-harness (Gao et al., github.com/EleutherAI/lm-evaluation-harness).

The class answers the three kinds of request: `loglikelihood`, `loglikelihood_rolling` and `generate_until`. Its numbers
are those of the harness's class HFLM on the exported model, within float32 rounding. HFLM fails where a continuation
alone exceeds the block size, and where it joins the context in one token ("Ans" and "wer"). Here the first is truncated
from the left, and the second is encoded alone, as gpt2.hellaswag does.

Shapes: B rows, T tokens, C channels, N scored tokens, V vocabulary.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from gpt2 import tokenizer
from gpt2.loss import CHUNK_ROWS, IGNORED
from gpt2.platform_arithmetic import Autocast, on_platform
from gpt2.platforms import parse_platform
from gpt2.sampling import Cache, CacheError, Drawing, sample
from gpt2.tokenizer import Tokenizer
from gpt2.transformer import GPT2
from gpt2.validation import batches, evaluating, evaluation_tokens, pad_rows
from referee.numerics.describe import to_float64
from runtime import attention_kernels, run_record
from runtime.errors import UserError, out_of_memory
from study.evaluation.loaded_runs import load_run

NAME = "ablation-run"
MAX_NEW_TOKENS = 256  # of a task that names no number, as in HFLM
SAMPLING = {"do_sample", "temperature", "top_k", "top_p"}
Request = tuple[Any, list[int], list[int]]  # texts, ids of the context, ids of the continuation
Progress = Callable[[int, int], None]  # (finished rows, all rows)
Scored = TypeVar("Scored")


class ScoredModel(TemplateLM):  # type: ignore[misc]
    """A GPT2 and its tokenizer for the harness. The context of an empty prompt is the end of text.

    device: of the model. autocast: context of a forward pass. batch_tokens: padded tokens of a batch. It is halved when
    memory runs out; results do not depend on it but for rounding. truncated: scored rows that were longer than the
    block size and lost tokens on the left. progress: called after each batch.
    """

    def __init__(
        self, model: GPT2, encoding: Tokenizer, device: str, autocast: Autocast, batch_tokens: int = 0
    ) -> None:
        super().__init__()
        self.model, self.encoding, self.autocast = model.eval(), encoding, autocast
        self._device = torch.device(device)
        self.batch_tokens = batch_tokens or evaluation_tokens(device)
        self.truncated = 0
        self.progress: Progress = lambda finished, rows: None

    @property
    def max_length(self) -> int:
        return self.model.block_size

    @property
    def eot_token_id(self) -> int:
        return self.encoding.eot

    @property
    def tokenizer_name(self) -> str:
        return self.encoding.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text. There are no special tokens to add."""
        return self.encoding.encode(string)

    # --- log-likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Return (nats, whether greedy decoding gives the continuation) of each (context, continuation).

        UserError names an item whose continuation is empty: there is nothing to score, and HFLM stops, too.
        """
        for request in requests:
            context, continuation = request.args
            if not continuation and context == context.rstrip():  # spaces at the end are scored
                raise UserError(
                    f"item {request.doc_id} of {request.task_name} has an empty continuation after {context[-40:]!r}; "
                    "fix: correct the item, or leave the task out of TASKS"
                )
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, divided as in HFLM; a continuation without a token of that is encoded alone."""
        given, scored = super()._encode_pair(context, continuation)
        return given, scored or self.tok_encode(context[len(context.rstrip()) :] + continuation)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Return the log-likelihood of each text in nats, over windows of the block size."""
        windows: list[Request] = []
        counts = []
        for (text,) in (request.args for request in requests):
            rolled = get_rolling_token_windows(
                self.tok_encode(text), self.prefix_token_id, self.max_length, context_len=1
            )
            found = [(None, *make_disjoint_window(window)) for window in rolled]
            windows += found
            counts.append(len(found))
        scores = iter(self._loglikelihood_tokens(windows))
        return [sum(next(scores)[0] for _ in range(count)) for count in counts]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = True, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = [self._row(context, continuation) for _, context, continuation in requests]
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        finished = 0
        with evaluating(self.model):
            for indices in batches([len(tokens) - 1 for tokens, _ in rows], self.batch_tokens):
                part = [rows[index] for index in indices]
                for index, score in zip(indices, self._halving(self._score, part), strict=True):
                    found[index] = score
                finished += len(indices)
                self.progress(finished, len(rows))
        return found

    def _row(self, context: list[int], continuation: list[int]) -> tuple[list[int], int]:
        """Return (ids of at most block size + 1 tokens, number of scored tokens at their end)."""
        tokens = [*(context or [self.prefix_token_id]), *continuation]
        self.truncated += len(tokens) > self.max_length + 1
        tokens = tokens[-(self.max_length + 1) :]
        return tokens, min(len(continuation), len(tokens) - 1)

    def _halving(self, work: Callable[[Any], list[Scored]], rows: Any) -> list[Scored]:
        """Call work(rows); divide the rows in two while memory runs out."""
        try:
            return work(rows)
        except Exception as error:
            if len(rows) < 2 or not out_of_memory(error):
                raise
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()
        self.batch_tokens //= 2
        middle = len(rows) // 2
        return self._halving(work, rows[:middle]) + self._halving(work, rows[middle:])

    def _score(self, rows: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Score rows in one batch."""
        ids_BT, targets_BT = (padded.to(self._device) for padded in pad_rows(rows))
        chunk = CHUNK_ROWS["cpu" if self._device.type == "cpu" else "card"]  # rows of logits held at once
        with self.autocast():
            x_NC, targets_N = (
                self.model.hidden(ids_BT)[targets_BT != IGNORED],
                targets_BT[targets_BT != IGNORED],
            )
            parts = [
                _token_scores(x, self.model.head[: self.model.vocabulary], target)
                for x, target in zip(*(one.split(chunk) for one in (x_NC, targets_N)), strict=True)
            ]
        scores_N, greedy_N = (torch.cat(each).tolist() for each in zip(*parts, strict=True))
        found, start = [], 0
        for _, scored in rows:
            found.append((sum(scores_N[start : start + scored]), all(greedy_N[start : start + scored])))
            start += scored
        return found

    # --- texts

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        """Return the text after each context, up to the first stop text, end of text or number of tokens.

        Sampling draws from a generator of the request's number. UserError for a setting that is not known here, and
        where the new tokens leave no place for a context.
        """
        found = [""] * len(requests)
        groups: dict[tuple[str, int], list[tuple[int, list[int]]]] = defaultdict(list)
        for number, (context, given) in enumerate(request.args for request in requests):
            settings = self._generation(given)
            ids = self.tok_encode(context)[-(self.max_length - settings["max_gen_toks"]) :]
            ids = ids or [self.prefix_token_id]
            groups[json.dumps(settings, sort_keys=True), len(ids)].append((number, ids))
        finished = 0
        with evaluating(self.model):
            for (text, _), members in groups.items():
                settings = json.loads(text)
                total = len(members[0][1]) + settings["max_gen_toks"]
                for indices in batches([total] * len(members), self.batch_tokens):
                    part = [members[index] for index in indices]
                    texts = self._halving(functools.partial(self._generate, settings=settings), part)
                    for (number, _), continued in zip(part, texts, strict=True):
                        found[number] = continued
                    finished += len(part)
                    self.progress(finished, len(requests))
        return found

    def _generation(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the settings of a request in the harness's normal form."""
        settings = dict(normalize_gen_kwargs(given, MAX_NEW_TOKENS))
        unknown = sorted(settings.keys() - SAMPLING - {"until", "max_gen_toks"})
        if unknown:
            raise UserError(
                f"the task sets {unknown[0]}={settings[unknown[0]]} for its texts, which is not known here; fix: leave "
                "the task out of TASKS"
            )
        if not 0 < settings["max_gen_toks"] < self.max_length:
            raise UserError(
                f"the task asks for {settings['max_gen_toks']} new tokens and the block size is {self.max_length}; "
                "fix: leave the task out of TASKS"
            )
        return settings

    def _generate(self, members: Sequence[tuple[int, list[int]]], settings: dict[str, Any]) -> list[str]:
        """Continue contexts of one length."""
        sampled = settings.get("do_sample", False)
        drawing = Drawing(
            float(settings.get("temperature", 1.0)) if sampled else 0.0,
            int(settings.get("top_k", 0)) if sampled else 0,
            float(settings.get("top_p", 1.0)) if sampled else 1.0,
        )
        stops = handle_stop_sequences(list(settings.get("until") or []), tokenizer.END_OF_TEXT)
        prompt_BT = torch.tensor([ids for _, ids in members], device=self._device)

        def texts(tokens_BN: Tensor) -> list[str]:
            return [tokenizer.decode(self.encoding, ids) for ids in tokens_BN.tolist()]

        def stopped(tokens_BN: Tensor) -> bool:
            return all(any(stop in text for stop in stops) for text in texts(tokens_BN))

        def drawn(cache: Cache | None) -> Tensor:
            generators = [torch.Generator().manual_seed(number) for number, _ in members]
            new = settings["max_gen_toks"]
            with self.autocast():
                return sample(self.model, prompt_BT, new, generators, cache, drawing, stopped).tokens

        try:
            tokens_BN = drawn(Cache())
        except CacheError:
            tokens_BN = drawn(None)
        return [postprocess_generated_text(text, stops, None) for text in texts(tokens_BN)]


def _token_scores(x_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log-probability of each target in nats, float64; whether it is the most probable token)."""
    logits_NV = F.linear(x_NC, head_VC).float()
    log_N = -F.cross_entropy(logits_NV, targets_N, reduction="none")
    return to_float64(log_N), logits_NV.argmax(-1) == targets_N


@register_model(NAME)
class RunModel(ScoredModel):
    """The last weights of a trained run, in the number format of its training evaluations.

    run: the folder. It runs on this machine's accelerator, or on the CPU. batch_size: sequences of the block size.
    """

    def __init__(self, run: str | Path, batch_size: int | None = None) -> None:
        record = run_record.load(Path(run))
        trained = load_run(Path(run))
        target = replace(trained.config.target, name="auto", dtype="auto", scale_cpu=True)
        resolved = attention_kernels.prepare_device(target, trained.config.model)
        number_format = record.target.dtype if record.target else "float32"
        trained.model.to(resolved.device)
        model, autocast = on_platform(
            trained.model,
            parse_platform("bf16" if number_format == "bfloat16" else "fp32"),
            resolved.device,
            number_format,
        )
        encoding = tokenizer.load(trained.config.data.tokenizer)
        super().__init__(
            model, encoding, resolved.device, autocast, (batch_size or 0) * trained.config.model.block_size
        )
        self.run, self.number_format, self.device_name = trained, number_format, resolved.device_name
