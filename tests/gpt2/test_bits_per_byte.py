"""Bits per byte of a run equal a computation from the model's probabilities and the decoded text."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2 import dataset, tokenizer
from runtime import run_record
from runtime.run_record import bits_per_byte
from runtime.settings import VOCABULARIES
from tests import small_runs


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("ids", VOCABULARIES.values(), ids=lambda ids: ids.name)
def test_a_run_records_the_bits_of_each_byte_of_its_validation_targets(ids, tmp_path: Path) -> None:
    texts = small_runs.write_texts(tmp_path / "texts", "the café {} – ")  # characters of one to three bytes
    config = small_runs.configuration(texts, 2, ids=ids)
    run = small_runs.start(tmp_path / "run", config)
    run.train()
    validation = run_record.load(tmp_path / "run").validation
    windows = dataset.validation_windows(run.corpus.validation, 16, config.evaluation.tokens).astype(np.int64)
    each = tokenizer.load(ids.name)
    bits, text = 0.0, b""
    with torch.no_grad():
        for window in windows:
            chances = run.stepper.model(torch.from_numpy(window[None, :-1])).double().softmax(-1)[0]
            bits -= sum(math.log2(chances[place, token]) for place, token in enumerate(window[1:]))
            text += b"".join(each.decode_bytes([token]) for token in window[1:] if token != each.eot)
    assert validation.bytes == len(text) > 0
    assert validation.bits_per_byte == pytest.approx(bits / len(text), rel=1e-5)


def test_a_uniform_model_of_bytes_without_an_end_of_text_has_eight_bits_per_byte() -> None:
    assert bits_per_byte(math.log(256), 1000, 1000) == pytest.approx(8)
    assert bits_per_byte(math.log(50257), 250, 1000) == pytest.approx(math.log2(50257) / 4)
