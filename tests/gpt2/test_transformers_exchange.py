"""Weights, configuration and tokenizer files agree with transformers in both directions."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpt2 import tokenizer
from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from gpt2.transformers_config import model_config, tokenizer_files
from gpt2.transformers_files import WeightsError, from_transformers, to_transformers
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


def test_what_does_not_fit_is_named() -> None:
    model = a_model()
    state = to_transformers(model.state_dict(), CONFIG.vocabulary)
    expected = model.state_dict()
    name = "transformer.h.1.mlp.c_fc.weight"
    with pytest.raises(WeightsError, match=r"h\.1\.mlp\.c_fc\.weight is missing"):
        from_transformers({key: value for key, value in state.items() if key != name}, expected)
    with pytest.raises(WeightsError, match=r"h\.1\.mlp\.c_fc\.weight has shape \(128, 31\), not \(128, 32\)"):
        from_transformers(state | {name: state[name][:31]}, expected)
    with pytest.raises(WeightsError, match="other is unknown"):
        from_transformers(state | {"other": torch.zeros(1)}, expected)
    with pytest.raises(WeightsError, match="not tied"):
        from_transformers(state | {"lm_head.weight": torch.zeros(1)}, expected)
    with pytest.raises(WeightsError, match=r"alternation_logit is not a parameter of GPT-2"):
        to_transformers(
            expected | {"blocks.0.attention.alternation_logit": torch.zeros(())}, CONFIG.vocabulary
        )


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


def test_the_end_of_text_is_one_token(both) -> None:
    ours, theirs = both
    assert theirs("a<|endoftext|>b")["input_ids"][1] == ours.eot == theirs.eos_token_id
    assert len(theirs) == ours.eot + 1


def test_real_source_text_has_our_ids(both) -> None:
    ours, theirs = both
    text = Path(json.__file__).read_text()
    assert theirs(text)["input_ids"] == ours.encode(text)
