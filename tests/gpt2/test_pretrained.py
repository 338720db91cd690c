"""A GPT-2 that transformers saved is evaluated as a run is; what does not fit is one line with its fix."""

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gpt2 import dataset, tokenizer
from gpt2.transformers_config import tokenizer_files
from gpt2.transformers_files import WEIGHTS, PretrainedError, load_pretrained, read_shape
from runtime.errors import UserError
from runtime.settings import BYTES, Config, load_config
from scripts import evaluate
from study import kconfig_commands as commands
from study import kconfig_rules as rules
from tests.hellaswag_items import FIXTURE
from tests.shared_folder import data_folder

transformers = pytest.importorskip("transformers")
POSITIONS = 24


@functools.cache
def theirs() -> Any:
    """Return a small model of bytes with weights far from their initial values."""
    torch.manual_seed(0)
    end = BYTES.size - 1
    config = transformers.GPT2Config(
        vocab_size=BYTES.size, n_positions=POSITIONS, n_embd=16, n_layer=2, n_head=2, eos_token_id=end,
        bos_token_id=end, initializer_range=0.3,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    theirs().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(path: Path, work: Callable[[Any], None]) -> None:
    content = json.loads(path.read_text())
    work(content)
    path.write_text(json.dumps(content))


@pytest.fixture
def config(tmp_path: Path, texts: Path) -> Config:
    lines = {
        "DATASET_FILES": str(texts / "*.txt"),
        "EVAL_TOKENS": "128",
        "HELLASWAG": "y",
        "HELLASWAG_LIMIT": "3",
    }
    lines["HELLASWAG_FILE"] = str(FIXTURE)
    tree = rules.load_kconfig("cpu")
    assigned = [f"CONFIG_{name}={value}" for name, value in (lines | data_folder()).items()]
    commands.configure(tree, commands.read_layers("gpt2-ra-ablation"), assigned)
    (tmp_path / ".config").write_text(rules.render(tree))
    return load_config(tmp_path / ".config")


def test_perplexity_is_that_of_transformers_and_hellaswag_is_scored(
    folder: Path, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder.parent)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.setattr(sys, "argv", ["scripts.evaluate", str(folder)])
    threads = torch.get_num_threads()
    evaluate.main()
    torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    corpus = dataset.open_corpus(dataset.prepare(config.data, report=print))
    windows = dataset.validation_windows(corpus.validation, POSITIONS, config.evaluation.tokens)
    ids = torch.from_numpy(windows.astype("int64"))
    with torch.no_grad():
        logits = theirs()(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert f"perplexity {float(loss.exp()):.2f}" in printed
    assert "3 items" in printed
    monkeypatch.setattr(sys, "argv", ["scripts.evaluate", str(folder), "--platform", "int4"])
    with pytest.raises(UserError, match="leave out PLATFORM"):
        evaluate.main()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"), ("activation_function", "gelu"), ("layer_norm_epsilon", 1e-6),
        ("tie_word_embeddings", False), ("scale_attn_weights", False), ("scale_attn_by_inverse_layer_idx", True),
        ("n_inner", 32), ("add_cross_attention", True), ("auto_map", {"AutoModel": "m.M"}), ("n_head", 3),
        ("n_layer", 0), ("n_embd", "16"), ("vocab_size", 300), ("eos_token_id", 0), ("n_head", True),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused_by_its_field(
    field: str, value: Any, folder: Path
) -> None:
    change(folder / "config.json", lambda content: content.update({field: value}))
    with pytest.raises(PretrainedError, match=f"{field}.*; fix: "):
        read_shape(folder)


def test_a_tokenizer_must_have_our_tokens(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(tokenizer_files(tokenizer.load(BYTES.name), 1)["tokenizer.json"]))
    assert read_shape(folder)[1] == BYTES
    change(path, lambda content: content["model"]["vocab"].update(a=1, b=2))
    with pytest.raises(PretrainedError, match=r"tokenizer.json has other tokens"):
        read_shape(folder)


def test_damaged_missing_and_other_weights_are_named(folder: Path) -> None:
    path, (shape, _) = folder / WEIGHTS, read_shape(folder)
    content, state = path.read_bytes(), load_file(path)
    path.write_bytes(content[:-100])
    with pytest.raises(PretrainedError, match=r"cannot be read: .*; fix: copy"):
        load_pretrained(folder, shape)
    state.pop("transformer.h.1.mlp.c_fc.bias")
    save_file(state, path)
    with pytest.raises(PretrainedError, match=r"h\.1\.mlp\.c_fc\.bias is missing; fix"):
        load_pretrained(folder, shape)
    path.unlink()
    with pytest.raises(PretrainedError, match=f"has no {WEIGHTS}; fix"):
        load_pretrained(folder, shape)
    (folder / "config.json").write_text("[")
    with pytest.raises(PretrainedError, match=r"config.json.*; fix"):
        read_shape(folder)
