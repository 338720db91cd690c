"""Weights, configuration and tokenizer files agree with transformers in both directions."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import tokenizer
from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from gpt2.transformers_config import model_config, tokenizer_files
from gpt2.transformers_files import from_transformers, to_transformers
from runtime.settings import BYTES, GPT2, ModelConfig

transformers = pytest.importorskip("transformers")
CONFIG = ModelConfig("test", 2, 4, 32, 24, 0.0, BYTES.size, BYTES.padded)
IDS = torch.randint(0, BYTES.size, (3, 24), generator=torch.Generator().manual_seed(0))


def a_model(seed: int = 0, config: ModelConfig = CONFIG):
    model = build_model(config)
    initialise(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms are not at their initial values either
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model.eval()


def test_the_exported_weights_have_our_logits_in_transformers() -> None:
    model = a_model()
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**model_config(CONFIG, BYTES.size - 1), attn_implementation="eager")
    ).eval()
    missing, unexpected = theirs.load_state_dict(
        to_transformers(model.state_dict(), CONFIG.vocabulary), strict=False
    )
    assert missing == ["lm_head.weight"]
    assert unexpected == []
    theirs.tie_weights()
    with torch.no_grad():
        ours, other = model(IDS), theirs(IDS).logits
    assert other.shape == ours.shape
    assert (ours - other).abs().max() < 1e-5 * ours.abs().max()


def test_weights_of_transformers_are_read_with_and_without_prefix_and_come_back_unchanged() -> None:
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**model_config(CONFIG, BYTES.size - 1))
    ).eval()
    model = a_model()
    for state in (theirs.state_dict(), theirs.transformer.state_dict()):
        model.load_state_dict(from_transformers(state, model.state_dict()))
        with torch.no_grad():
            ours, other = model(IDS), theirs(IDS).logits
        assert (ours - other).abs().max() < 1e-5 * other.abs().max()
    back = to_transformers(model.state_dict(), CONFIG.vocabulary)
    assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in back.items())


@pytest.fixture(scope="module", params=[GPT2.name, BYTES.name])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    ours, folder = tokenizer.load(request.param), tmp_path_factory.mktemp("tokenizer")
    for name, content in tokenizer_files(ours, 64).items():
        (folder / name).write_text(json.dumps(content))
    return ours, transformers.AutoTokenizer.from_pretrained(folder)


@given(text=st.text(max_size=60))
@settings(max_examples=150, deadline=None)
def test_the_tokenizer_files_give_our_ids_and_texts(both, text: str) -> None:
    ours, theirs = both
    ids = theirs(text)["input_ids"]
    assert ids == ours.encode(text)
    assert theirs.decode(ids) == tokenizer.decode(ours, ids)
