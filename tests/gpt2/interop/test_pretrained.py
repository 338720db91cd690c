"""Weights of transformers are found, checked and read; what does not fit is one line with its fix."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configuration import commands, rules
from gpt2.config.config import ModelConfig
from gpt2.config.dotconfig import parse_lines
from gpt2.config.vocabulary import BYTES, GPT2
from gpt2.data.tokenizer import VOCABULARY_FILE
from gpt2.interop import pretrained
from gpt2.interop.pretrained import PretrainedError, find_pretrained
from gpt2.interop.start import load_start, standard_weights, start_from, started_from
from gpt2.interop.weights import PREFIX
from gpt2.train.step import build_model
from tests.imported_model import SHAPE, a_model, write_model

CONFIG = ModelConfig(*SHAPE, 24, 0.0, BYTES.size, BYTES.padded)
IDS = torch.randint(0, BYTES.size, (2, 24), generator=torch.Generator().manual_seed(0))


def weights_of(folder: Path, block_size: int = 24) -> dict[str, torch.Tensor]:
    return standard_weights(find_pretrained(str(folder)), 2, 16, block_size, BYTES.padded)


def test_a_folder_gives_the_model_that_was_written(tmp_path: Path) -> None:
    model = a_model()
    folder = write_model(tmp_path / "m", model)
    found = find_pretrained(str(folder))
    assert (found.layers, found.heads, found.width, found.positions) == (2, 2, 16, 24)
    assert (found.vocabulary, found.name, found.notes) == (BYTES, "m", ())
    found.check(CONFIG)
    copy = build_model(CONFIG)
    start_from(copy, weights_of(folder))
    assert all(torch.equal(copy.state_dict()[name], value) for name, value in model.state_dict().items())
    shorter = build_model(ModelConfig(*SHAPE, 16, 0.0, BYTES.size, BYTES.padded)).eval()
    start_from(shorter, weights_of(folder, 16))
    assert torch.equal(shorter(IDS[:, :16]), model(IDS[:, :16]))


@pytest.mark.parametrize("kind", ["shards", "bin", "bin shards", "float16", "without prefix"])
def test_every_form_of_the_file_gives_the_same_weights(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    expected = weights_of(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    halves = [dict(list(state.items())[:7]), dict(list(state.items())[7:])]
    if kind == "shards":
        for number, half in enumerate(halves):
            save_file(half, folder / f"model-{number}.safetensors")
        index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    elif kind == "bin shards":
        for number, half in enumerate(halves):
            torch.save(half, folder / f"{number}.bin")
        index = {name: f"{number}.bin" for number, half in enumerate(halves) for name in half}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    elif kind == "bin":
        masks = {
            "transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24),
            "lm_head.weight": state[f"{PREFIX}wte.weight"],
        }
        torch.save(state | masks, folder / "pytorch_model.bin")
    elif kind == "float16":
        expected = {name: value.half().float() for name, value in expected.items()}
        save_file({name: value.half() for name, value in state.items()}, folder / "model.safetensors")
    else:
        save_file(
            {name.removeprefix(PREFIX): value for name, value in state.items()}, folder / "model.safetensors"
        )
    found = weights_of(folder)
    assert found.keys() == expected.keys()
    assert all(
        torch.equal(found[name], value) and value.dtype == torch.float32 for name, value in expected.items()
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_type", "llama"), ("activation_function", "gelu"), ("activation_function", "relu"),
        ("layer_norm_epsilon", 1e-6), ("tie_word_embeddings", False), ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True), ("reorder_and_upcast_attn", True), ("n_inner", 32),
        ("add_cross_attention", True), ("auto_map", {"AutoModel": "m.M"}), ("quantization_config", {"bits": 4}),
        ("n_head", 3), ("n_layer", 0), ("n_embd", "16"), ("vocab_size", 300), ("eos_token_id", 0), ("n_head", True),
    ],
)  # fmt: skip
def test_a_model_that_computes_something_else_is_refused_by_field_and_value(
    field: str, value: Any, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", **{field: value})
    with pytest.raises(PretrainedError, match=r"; fix: ") as caught:
        find_pretrained(str(folder))
    text = str(caught.value)
    assert field in text
    assert any(shown in text for shown in (str(value), repr(value), json.dumps(value))), text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            "eos_token_id",
            50256,
            r"vocab_size is 257; this project needs eos_token_id .*256 with vocab_size 257.*; fix",
        ),
        (
            "activation_function",
            "relu",
            r'"gelu_pytorch_tanh"; fix: a model with activation_function "gelu_new" or',
        ),
        ("auto_map", {"A": "m.M"}, r"this project computes no model with auto_map; fix: a model without it"),
    ],
)
def test_a_refusal_names_the_values_that_are_needed(
    field: str, value: Any, says: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "m", **{field: value})
    with pytest.raises(PretrainedError, match=says):
        find_pretrained(str(folder))


def test_absent_fields_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", activation_function="gelu_pytorch_tanh")
    config = json.loads((folder / "config.json").read_text())
    kept = {name: config[name] for name in ("model_type", *pretrained.SIZES)}
    (folder / "config.json").write_text(json.dumps(kept))
    assert find_pretrained(str(folder)).layers == 2


def test_the_tokenizer_must_be_one_of_ours(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second, *_ = vocabulary
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(PretrainedError, match=r"has other tokens; fix"):
        find_pretrained(str(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(PretrainedError, match=r"vocab_size is 257, and there is no tokenizer.json; fix"):
        find_pretrained(str(folder))


def test_gpt2s_tokenizer_is_known_by_its_merges_or_its_size(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", ids=GPT2)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = [
        merge.split(" ") for merge in content["model"]["merges"]
    ]  # of newer versions
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert (find_pretrained(str(folder)).vocabulary, find_pretrained(str(folder)).notes) == (GPT2, ())
    (folder / "tokenizer.json").unlink()
    assert "GPT-2's is taken" in find_pretrained(str(folder)).notes[0]
    merges = VOCABULARY_FILE.read_text()
    (folder / "merges.txt").write_text(merges)
    assert find_pretrained(str(folder)).notes == ()
    (folder / "merges.txt").write_text(merges.replace("\nh e\n", "\ne h\n"))
    with pytest.raises(PretrainedError, match=r"merges.txt has other merges; fix"):
        find_pretrained(str(folder))


def test_damaged_and_missing_files_are_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(PretrainedError, match=r"model.safetensors cannot be read: .*; fix: copy"):
        find_pretrained(str(folder)).state()
    state = load_file(write_model(tmp_path / "n") / "model.safetensors")
    name = next(iter(state))
    state[name].view(-1)[0] = float("nan")
    save_file(state, path)
    with pytest.raises(PretrainedError, match=f"{name} has values that are not finite; fix"):
        find_pretrained(str(folder)).state()
    del state[name]
    save_file(state, path)
    with pytest.raises(PretrainedError, match=r"is missing; fix"):
        weights_of(folder)
    path.unlink()
    with pytest.raises(PretrainedError, match=r"has no model.safetensors or pytorch_model.bin; fix"):
        find_pretrained(str(folder))
    index = folder / "model.safetensors.index.json"
    for files, text in (
        ({"a": "../x"}, "lists no files"),
        ({"a": "x"}, "x is missing"),
        ([], "lists no files"),
    ):
        index.write_text(json.dumps({"weight_map": files}))
        with pytest.raises(PretrainedError, match=f"{text}; fix"):
            find_pretrained(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(PretrainedError, match=r"has no config.json; fix"):
        find_pretrained(str(folder))
    with pytest.raises(PretrainedError, match=r"safetensors.index.json is not a folder; fix"):
        find_pretrained(str(index))


def test_a_pickle_that_runs_code_is_not_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()

    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "harm",))

    torch.save({"a": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(PretrainedError, match=r"pytorch_model.bin is damaged or holds other objects"):
        find_pretrained(str(folder)).state()
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("layers", "heads", "width", "symbol"),
    [
        (12, 12, 768, "124M"),
        (24, 16, 1024, "350M"),
        (36, 20, 1280, "774M"),
        (48, 25, 1600, "1558M"),
        (3, 2, 48, "CUSTOM"),
    ],
)
def test_the_error_on_another_shape_names_lines_that_kconfig_accepts(
    layers: int, heads: int, width: int, symbol: str, tmp_path: Path
) -> None:
    fields = {"n_layer": layers, "n_head": heads, "n_embd": width, "n_positions": 1024, "vocab_size": 50257}
    folder = write_model(tmp_path / "m", tokens=False, eos_token_id=50256, **fields)
    found = find_pretrained(str(folder))
    with pytest.raises(PretrainedError, match=f"fix: CONFIG_GPT2_MODEL_{symbol}=y .*CONFIG_TOKENIZER_GPT2=y"):
        found.check(CONFIG)
    tree = rules.load_kconfig("cpu")
    commands.configure(tree, commands.read_layers("gpt2-ra-ablation"), found.config_lines)
    values = {name: entry.value for name, entry in parse_lines(rules.render(tree), "x").items()}
    assert values[f"GPT2_MODEL_{symbol}"] == values["TOKENIZER_GPT2"] == "y"
    found.check(ModelConfig("x", layers, heads, width, 512, 0.1))  # fewer positions, GPT-2's tokens
    with pytest.raises(PretrainedError):
        found.check(ModelConfig("x", layers, heads, width, 1025, 0.0))


def fake_hub(
    monkeypatch: pytest.MonkeyPatch, cached: Path | None, remote: Path | Exception
) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, local_files_only: bool = False, **options: Any) -> str:
        calls.append({"name": name, "local": local_files_only, **options})
        if local_files_only and cached is None:
            raise FileNotFoundError("not cached")
        answer = cached if local_files_only else remote
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    hub = types.ModuleType("huggingface_hub")
    hub.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return calls


def test_a_name_of_the_hub_is_read_from_its_cache_then_from_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "models--gpt2/snapshots/607a")
    calls = fake_hub(monkeypatch, folder, RuntimeError("must not be asked"))
    found = find_pretrained("openai-community/gpt2")
    assert (found.name, found.source, len(calls)) == ("gpt2", "openai-community/gpt2", 1)
    calls = fake_hub(monkeypatch, None, folder)
    assert find_pretrained("gpt2").sha256 == found.sha256
    assert [call["local"] for call in calls] == [True, False]
    assert "model.safetensors" in calls[1]["allow_patterns"]
    assert calls[1]["etag_timeout"] <= 10


def test_without_hub_or_network_one_line_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_hub(monkeypatch, None, OSError("Name or service\nnot known"))
    with pytest.raises(
        PretrainedError, match=r"x is not a folder .* \(OSError: Name or service not known\); fix: a"
    ):
        find_pretrained("x")
    long = (
        "We cannot find the snapshot folder of the revision, " + "and we looked for it " * 9 + "everywhere."
    )
    fake_hub(monkeypatch, None, OSError(f"{long} Please check your connection. {'More words. ' * 30}"))
    with pytest.raises(PretrainedError, match=rf"\(OSError: {long} Please check .*[a-z]\); fix: a"):
        find_pretrained("x")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(PretrainedError, match=r"need huggingface_hub; fix: pip install huggingface_hub"):
        find_pretrained("gpt2")
    with pytest.raises(PretrainedError, match=r"is not a folder on this machine; fix"):
        find_pretrained(str(tmp_path / "absent/x"))


def test_changed_files_are_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m")
    wanted, model = started_from(str(folder)), build_model(CONFIG)
    load_start(model, wanted)
    write_model(folder, a_model(seed=1))
    with pytest.raises(PretrainedError, match=r"have changed: SHA-256 .*; fix: restore the files"):
        load_start(model, wanted)
