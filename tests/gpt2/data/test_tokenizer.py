import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2.data import tokenizer
from tests.published import published


@given(st.text())
def test_decoding_restores_the_encoded_text(text: str) -> None:
    encoding = tokenizer.load()
    assert encoding.decode(encoding.encode_ordinary(text)) == text


def test_known_texts_have_the_tokens_of_gpt2() -> None:
    encoding = tokenizer.load()
    assert encoding.encode_ordinary("Hello world") == [15496, 995]
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [tokenizer.EOT]
    assert encoding.n_vocab == 50257


def test_every_token_has_the_published_id() -> None:
    theirs = json.loads(published("gpt2_bpe/encoder.json").read_text())
    byte_of = tokenizer._printable_bytes()
    ours = tokenizer.ranks(tokenizer.VOCABULARY_FILE.read_text(encoding="utf-8"))
    del theirs["<|endoftext|>"]
    assert ours == {bytes(byte_of[c] for c in token): number for token, number in theirs.items()}


def test_the_pattern_is_that_of_tiktoken() -> None:
    from tiktoken_ext import openai_public

    assert openai_public.r50k_pat_str == tokenizer.PATTERN


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "vocab.bpe"
    other.write_text("#version: 0.2\na b\n")
    monkeypatch.setattr(tokenizer, "VOCABULARY_FILE", other)
    with pytest.raises(tokenizer.TokenizerError, match="fix: git checkout"):
        tokenizer.fingerprint()
