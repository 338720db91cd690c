import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt2 import shards, tokenizer
from gpt2.tokenizer import ALL, decode
from runtime.settings import VOCABULARIES
from tests.published import published

ANY = st.one_of(
    st.text(st.characters(), max_size=40),  # with surrogates
    st.lists(st.sampled_from(["\ud83d", "\ude00", "\udc80", "é", "€", "😀", " ", "a"])).map("".join),
)
names = pytest.mark.parametrize("name", sorted(ALL))


def joined(text: str) -> str:
    """Join pairs of surrogates and replace the others, by the UTF-16 codec alone."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


@names
@given(text=ANY)
def test_decoding_restores_the_encoded_text_with_its_surrogates_joined_or_replaced(
    name: str, text: str
) -> None:
    each = tokenizer.load(name)
    ids = each.encode(text)
    assert all(0 <= token < each.eot for token in ids)
    assert each.decode_bytes(ids) == joined(text).encode()
    assert decode(each, ids) == joined(text)


@given(st.binary())
def test_bytes_restore_any_bytes(raw: bytes) -> None:
    assert tokenizer.load("bytes").decode_bytes(raw) == raw


@names
@given(texts=st.lists(ANY))
def test_documents_are_separated_by_an_end_of_text_also_empty_ones(name: str, texts: list[str]) -> None:
    each = tokenizer.load(name)
    train, validation, count, _ = shards.encode(texts, 0, name)
    ids = np.frombuffer(train, "<u2").tolist()
    expected = [joined(text) for text in texts]
    assert (validation, count, ids.count(each.eot)) == (b"", len(texts), len(texts))
    assert decode(each, ids) == "".join(text + tokenizer.END_OF_TEXT for text in expected)
    assert each.decode_bytes(ids) == "".join(expected).encode()


@names
def test_a_tokenizer_has_the_ids_of_its_configuration(name: str) -> None:
    each = tokenizer.load(name)
    (ids,) = [ids for ids in VOCABULARIES.values() if ids.name == name]
    assert each.eot == ids.size - 1 < ids.padded < 2**16  # shards are uint16
    assert tokenizer.find(each.fingerprint) is each


def test_every_token_has_the_published_id() -> None:
    theirs = json.loads(published("gpt2_bpe/encoder.json").read_text())
    byte_of = tokenizer.printable_bytes()
    ours = tokenizer.ranks(tokenizer.VOCABULARY_FILE.read_text(encoding="utf-8"))
    del theirs["<|endoftext|>"]
    assert ours == {bytes(byte_of[c] for c in token): number for token, number in theirs.items()}


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "vocab.bpe"
    other.write_text("#version: 0.2\na b\n")
    monkeypatch.setattr(tokenizer, "VOCABULARY_FILE", other)
    with pytest.raises(tokenizer.TokenizerError, match="fix: git checkout"):
        _ = tokenizer.Gpt2Tokenizer().fingerprint
