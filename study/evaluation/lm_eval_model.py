"""A trained run as a model of lm-evaluation-harness (Gao et al., github.com/EleutherAI/lm-evaluation-harness).

The harness's class HFLM scores texts; here it gets the logits of a GPT2 in place of a model of
transformers. HFLM fails where a continuation alone exceeds the block size, and where it joins the context in one token
("Ans" and "wer"). Here the first is truncated from the left, and the second is encoded alone, as gpt2.hellaswag does.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer as FastTokenizer
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedTokenizerFast

from gpt2 import tokenizer
from gpt2.platforms import Autocast, on_platform, parse_platform
from gpt2.sampling import logits
from gpt2.tokenizer import END_OF_TEXT, Tokenizer
from gpt2.transformer import GPT2
from gpt2.transformers_config import tokenizer_files
from runtime import attention_kernels, run_record
from runtime.errors import UserError
from study.evaluation.loaded_runs import load_run

MOST_LOGITS = 2**28  # of a batch: 1 GB
MOST_ROWS = 64
Request = tuple[Any, list[int], list[int]]  # texts, ids of the context, ids of the continuation


class LogitsModel(nn.Module):
    """A GPT2 with what HFLM reads of a model of transformers. autocast: context of a forward pass."""

    def __init__(self, model: GPT2, autocast: Autocast) -> None:
        super().__init__()
        self.gpt2, self.autocast, self.config = model, autocast, GPT2Config()
        self.device = next(model.parameters()).device

    def tie_weights(self) -> None:
        """The head is the embedding already."""

    def forward(self, ids_BT: Tensor) -> Any:
        with self.autocast():
            return SimpleNamespace(logits=logits(self.gpt2, ids_BT))


class ScoredModel(HFLM):  # type: ignore[misc]
    """A GPT2 and its tokenizer for the harness. The context of an empty prompt is the end of text.

    truncated: scored rows that were longer than the block size and lost tokens on the left.
    """

    def __init__(self, model: GPT2, encoding: Tokenizer, autocast: Autocast) -> None:
        block, size = model.block_size, model.vocabulary
        content = json.dumps(tokenizer_files(encoding, block)["tokenizer.json"])
        fast = PreTrainedTokenizerFast(
            tokenizer_object=FastTokenizer.from_str(content), bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
        )
        super().__init__(
            LogitsModel(model, autocast),
            tokenizer=fast,
            max_length=block,
            batch_size=max(1, min(MOST_ROWS, MOST_LOGITS // (block * size))),
            softmax_dtype="float32",
            logits_cache=False,  # with it, windows of a text that repeats itself get the scores of each other
        )
        self.truncated = 0

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return (nats, whether greedy decoding gives the continuation) of each (context, continuation).

        UserError names an item whose continuation is empty: there is nothing to score.
        """
        for request in requests:
            context, continuation = request.args
            if not continuation and context == context.rstrip():  # spaces at the end are scored
                raise UserError(
                    f"item {request.doc_id} of {request.task_name} has an empty continuation after {context[-40:]!r}; "
                    "fix: correct the item, or leave the task out of TASKS"
                )
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scores

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of both, divided as in HFLM; a continuation without a token of that is encoded alone."""
        given, scored = super()._encode_pair(context, continuation)
        return given, scored or self.tok_encode(context[len(context.rstrip()) :] + continuation)

    def _loglikelihood_tokens(self, requests: Sequence[Request], **options: Any) -> list[tuple[float, bool]]:
        most = self.max_length
        self.truncated += sum(len(given) + len(scored) > most + 1 for _, given, scored in requests)
        rows = [
            (texts, scored[-most - 1 : -most] or given, scored[-most:]) for texts, given, scored in requests
        ]
        scores: list[tuple[float, bool]] = super()._loglikelihood_tokens(rows, **options)
        return scores

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Refuse a task that asks for texts: a GPT2 of these sizes answers none."""
        raise UserError(
            f"{requests[0].task_name} scores texts that a model writes; only log-likelihoods are scored here; fix: "
            "leave the task out of TASKS"
        )


class RunModel(ScoredModel):
    """The last weights of a trained run, in the number format of its training evaluations.

    run: the folder. It runs on this machine's accelerator, or on the CPU.
    """

    def __init__(self, run: Path) -> None:
        record = run_record.load(run)
        trained = load_run(run)
        target = replace(trained.config.target, name="auto", dtype="auto", scale_cpu=True)
        resolved = attention_kernels.prepare_device(target, trained.config.model)
        number_format = record.target.dtype if record.target else "float32"
        trained.model.to(resolved.device)
        platform = parse_platform("bf16" if number_format == "bfloat16" else "fp32")
        model, autocast = on_platform(trained.model, platform, resolved.device, number_format)
        super().__init__(model, tokenizer.load(trained.config.data.tokenizer), autocast)
        self.run, self.number_format = trained, number_format
