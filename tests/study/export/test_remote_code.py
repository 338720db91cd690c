"""An exported arm computes in transformers, without this project, what the run computes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpt2.interop.flatten import FlattenError
from gpt2.model.init import initial_value, names_to_set
from gpt2.model.sampling import Cache, Drawing, sample
from gpt2.system.errors import UserError
from ra import names
from ra.hooks import custom_folder
from study.attention.inspect import TrainedRun, load_run
from study.export import check, export
from study.export.check import run_script, write_reference
from tests.study.export.conftest import changed, trained_run
from tests.study.export.custom_files import MINE, UNCACHED

transformers = pytest.importorskip("transformers")
loading_check = pytest.importorskip("study.export.loading_check")  # imports transformers

pytestmark = pytest.mark.slow
SCORE = {"ALTERNATION_MIX_OUTPUT": "n", "ALTERNATION_MIX_SCORE": "y"}
HARD = {"ALTERNATION_MIX_OUTPUT": "n", "ALTERNATION_MIX_HARD": "y", "ALTERNATION_GATE_EVERY": "2"}
ARMS: dict[str, tuple[str, dict[str, str]]] = {  # folder -> name of the arm, settings
    "learned": ("RALEARN", {}),
    "score": ("RALEARN", SCORE),
    "hard": ("RALEARN", HARD),
    "recompute": ("RALEARN", {"ALTERNATION_RECOMPUTE": "y"}),
    **{
        name.lower(): (name, {})
        for name in ("GATED", "QKNORM", "WINDOW", "DIFFERENTIAL", "VALUERES", "DOUBLE")
    },
    **{name.lower(): (name, {}) for name in ("LENS", "NOPE", "RABETA", "RMS", "ROTARY", "SWIGLU")},
    "combined": ("RALEARN+NORM=rms+MLP=swiglu+POSITION=rotary", {}),
    "fixed": ("RA:1+NORM=rms", {}),
    "wide": ("GATED+WIDTH=match+NORM=rms", {}),
    "noisy": ("RMS+AQN=mild+LR=1e-3", {}),
    "mine": ("MINE", {}),
    "uncached": ("UNCACHED", {}),
    "mixed": ("VALUERES+NORM=mine+MLP=mine+POSITION=mine", {}),
}
WITHOUT_CACHE = {"window", "uncached"}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory, config_file: Path) -> dict[str, tuple[Path, Path]]:
    """Return arm -> run folder and exported folder. The checkout's custom variants differ from the recorded ones."""
    folder = tmp_path_factory.mktemp("study") / "x"
    own = folder / "own"
    own.mkdir(parents=True)
    (own / "mine.py").write_text(MINE)
    (own / "uncached.py").write_text(UNCACHED)
    found = {}
    patch = pytest.MonkeyPatch()
    patch.setattr(export, "check_folder", lambda folder, model: 0.0)  # `checked` does it for all at once
    patch.setattr(names, "CUSTOM_FOLDER", folder / "custom")
    patch.setattr("ra.custom.__path__", [str(folder / "custom")])
    (folder / "custom").mkdir()
    (folder / "custom/mine.py").write_text(MINE.replace("k_BHTD.abs()", "k_BHTD"))
    for key, (name, symbols) in ARMS.items():
        with custom_folder(own):
            run_dir = trained_run(
                folder / "runs", changed(config_file.read_text(), **symbols), name, folder=key
            )
        found[key] = run_dir, export.export_run(run_dir).folder
    patch.undo()
    return found


def run_of(study: dict[str, tuple[Path, Path]], key: str) -> TrainedRun:
    with custom_folder(study[key][0].parents[1] / "own"):
        run = load_run(study[key][0])
    run.model.eval()
    return run


@pytest.fixture(scope="module")
def checked(study: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Load all folders in one process that cannot import this project. Returns arm -> its line."""
    place, arguments = tmp_path_factory.mktemp("elsewhere"), []
    for key, (_, folder) in study.items():
        write_reference(place / f"{key}.safetensors", run_of(study, key).model)
        arguments += [str(place / f"{key}.safetensors"), str(folder)]
    lines = [json.loads(line) for line in run_script(arguments, place)]
    return {Path(line["folder"]).name: line for line in lines}


@pytest.mark.parametrize("key", ARMS)
def test_without_this_project_transformers_computes_what_the_run_computes(
    key: str, checked: dict[str, Any]
) -> None:
    line = checked[key]
    assert line["project"] == []
    found = line["differences"]
    assert set(found) >= {"logits", "loss", "without use_cache", "padded", "generate", "saved and loaded"}
    assert ("cache" in found) is (key not in WITHOUT_CACHE)
    assert {check: value for check, value in found.items() if not value < 1e-5} == {}


def loaded(study: dict[str, tuple[Path, Path]], key: str, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(study[key][1], trust_remote_code=True, **options)


@pytest.mark.parametrize("key", ARMS)
def test_greedy_texts_are_those_of_make_sample(key: str, study: dict[str, tuple[Path, Path]]) -> None:
    run, theirs = run_of(study, key), loaded(study, key)
    prompt = torch.randint(0, 256, (2, 5), generator=torch.Generator().manual_seed(1))
    cache = None if key in WITHOUT_CACHE else Cache()
    ours = sample(run.model, prompt, 20, [torch.Generator(), torch.Generator()], cache, Drawing(0.0)).tokens
    for options in ({}, {"use_cache": False}, {"num_beams": 1, "use_cache": True}):
        found = theirs.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=20, **options
        )
        width = found.shape[1] - 5  # transformers stops where all sequences have ended
        for row, expected in zip(found[:, 5:].tolist(), ours.tolist(), strict=True):
            end = row.index(256) + 1 if 256 in row else width
            assert row[:end] == expected[:end]


@pytest.mark.parametrize("key", ["learned", "window", "valueres", "rotary"])
def test_a_padded_batch_generates_what_each_prompt_alone_does(
    key: str, study: dict[str, tuple[Path, Path]]
) -> None:
    theirs = loaded(study, key)
    tokens = transformers.AutoTokenizer.from_pretrained(
        study[key][1], padding_side="left", trust_remote_code=True
    )
    tokens.pad_token = tokens.eos_token
    texts = ["def f(x):", "a", "import"]
    batch = tokens(texts, return_tensors="pt", padding=True)
    assert not batch["attention_mask"].all()
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 256}
    together = theirs.generate(**batch, **options)[:, batch["input_ids"].shape[1] :]
    for text, found in zip(texts, together, strict=True):
        alone = tokens(text, return_tensors="pt")
        assert torch.equal(theirs.generate(**alone, **options)[0, alone["input_ids"].shape[1] :], found)


def test_beam_search_with_and_without_a_cache_finds_the_same(study: dict[str, tuple[Path, Path]]) -> None:
    theirs = loaded(study, "valueres")
    prompt = torch.tensor([[10, 20, 30], [40, 50, 60]])
    options = {
        "attention_mask": torch.ones_like(prompt),
        "num_beams": 3,
        "max_new_tokens": 8,
        "do_sample": False,
    }
    assert torch.equal(
        theirs.generate(prompt, use_cache=True, **options),
        theirs.generate(prompt, use_cache=False, **options),
    )


@pytest.mark.parametrize("key", ["learned", "hard", "combined", "mine"])
def test_the_loss_and_its_gradients_are_ours(key: str, study: dict[str, tuple[Path, Path]]) -> None:
    run, theirs = run_of(study, key), loaded(study, key).train()
    ids = torch.randint(0, 257, (3, 32), generator=torch.Generator().manual_seed(2))
    ours = run.model.train()
    loss = ours.loss(ids[:, :-1].contiguous(), ids[:, 1:])
    loss.backward()
    found = theirs(input_ids=ids, labels=ids)
    found.loss.backward()
    torch.testing.assert_close(found.loss, loss)
    expected = {f"model.{name}": parameter.grad for name, parameter in ours.named_parameters()}
    assert set(expected) == {name for name, _ in theirs.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-6, rtol=1e-4, msg=name)
    before = float(found.loss.detach())
    torch.optim.SGD(theirs.parameters(), lr=0.05).step()
    assert float(theirs(input_ids=ids, labels=ids).loss.detach()) < before


def test_labels_of_padding_and_of_minus_100_are_not_scored(study: dict[str, tuple[Path, Path]]) -> None:
    theirs = loaded(study, "qknorm")
    ids = torch.randint(0, 257, (2, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    single = [theirs(ids[:1], labels=ids[:1]).loss * 11, theirs(ids[1:, 5:], labels=ids[1:, 5:]).loss * 6]
    torch.testing.assert_close(theirs(ids, attention_mask=mask, labels=ids).loss, sum(single) / 17)
    labels = ids.clone()
    labels[0, 4:] = -100
    torch.testing.assert_close(
        theirs(ids[:1], labels=labels[:1]).loss, theirs(ids[:1, :4], labels=ids[:1, :4]).loss
    )
    torch.testing.assert_close(
        theirs(ids, labels=ids, num_items_in_batch=44).loss, theirs(ids, labels=ids).loss / 2
    )


def test_what_has_no_meaning_is_refused(study: dict[str, tuple[Path, Path]]) -> None:
    theirs, ids = loaded(study, "learned"), torch.tensor([[1, 2, 3, 4]])
    cache = transformers.DynamicCache(config=theirs.config)
    static = transformers.StaticCache(config=theirs.config, max_cache_len=9)
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: theirs(ids, attention_mask=torch.tensor([[1, 0, 1, 1]])), "padding between tokens"),
        (lambda: theirs(ids, past_key_values=cache), "a cache is for evaluation mode"),
        (lambda: theirs(torch.zeros(1, 33, dtype=torch.long)), "33 tokens exceed the block size 32"),
        (lambda: theirs(ids, past_key_values=static), "StaticCache is not a DynamicCache"),
        (
            lambda: loaded(study, "window")(ids, past_key_values=cache),
            "WINDOW cannot be computed with a cache",
        ),
        (
            lambda: theirs(ids, past_key_values=cache, attention_mask=torch.tensor([[0, 1, 1, 1]])),
            "a padded batch",
        ),
    ]
    calls += [
        (
            lambda: theirs(ids, output_hidden_states=True),
            "logits and loss only; fix: leave out output_hidden_states",
        ),
        (
            lambda: theirs(ids, output_attentions=True),
            "logits and loss only; fix: leave out output_attentions",
        ),
        (lambda: theirs(inputs_embeds=torch.zeros(1, 4, 64)), "takes no inputs_embeds; fix: give input_ids"),
        (lambda: theirs(ids, position_ids=ids), "takes no position_ids; fix: give input_ids"),
        (theirs.gradient_checkpointing_enable, "no gradient checkpointing; fix"),
        (lambda: loaded(study, "learned", output_hidden_states=True)(ids), "leave out output_hidden_states"),
    ]
    for call, problem in calls:
        with pytest.raises(ValueError, match=problem):
            call()
    plain = theirs(ids).logits
    assert torch.equal(theirs(ids, position_ids=None, output_attentions=False).logits, plain)
    with pytest.raises(NotImplementedError, match="vocabulary of an exported arm is fixed"):
        theirs.resize_token_embeddings(300)


@pytest.mark.parametrize("key", ["learned", "combined", "differential", "lens", "rabeta", "mine"])
def test_another_number_format_gives_about_the_same_logits(
    key: str, study: dict[str, tuple[Path, Path]]
) -> None:
    ids = torch.randint(0, 257, (2, 24), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        exact = loaded(study, key)(ids).logits
        for other in (loaded(study, key, dtype=torch.bfloat16), loaded(study, key).to(torch.bfloat16)):
            assert {parameter.dtype for parameter in other.parameters()} == {torch.bfloat16}
            assert (other(ids).logits.float() - exact).abs().max() < 0.05 * exact.abs().max()
        double = loaded(study, key).double()(ids).logits
    torch.testing.assert_close(double.float(), exact, atol=1e-5 * float(exact.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("key", ["combined", "mine"])
def test_a_model_from_its_configuration_has_the_initial_weights_of_the_run(
    key: str, study: dict[str, tuple[Path, Path]]
) -> None:
    config = transformers.AutoConfig.from_pretrained(study[key][1], trust_remote_code=True)
    fresh = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    run = run_of(study, key)
    expected = names_to_set(run.model) & dict(run.model.named_parameters()).keys()
    assert {"token.weight", "blocks.0.attention.qkv.weight"} <= expected
    for name in expected:
        parameter = fresh.get_parameter(f"model.{name}")
        value = initial_value(3, name, parameter.shape, 2)
        if name == "token.weight":
            value[257:] = 0.0
        assert torch.equal(parameter, value), name
    assert torch.isfinite(fresh(torch.tensor([[1, 2, 3]])).logits).all()


def test_the_configuration_has_the_settings_of_the_arm(study: dict[str, tuple[Path, Path]]) -> None:
    config = transformers.AutoConfig.from_pretrained(study["hard"][1], trust_remote_code=True)
    assert (config.arm, config.seed, config.alternation["mix"], config.alternation["gate_every"]) == (
        "RALEARN",
        3,
        "hard",
        2,
    )
    assert config.parts == {"attention": "ra.builders.learned"}
    wide = transformers.AutoConfig.from_pretrained(study["wide"][1], trust_remote_code=True)
    assert wide.hidden_size == run_of(study, "wide").config.model.width != config.hidden_size
    fixed = transformers.AutoConfig.from_pretrained(study["fixed"][1], trust_remote_code=True)
    assert fixed.parts == {"attention": "ra.builders.fixed([1])", "norm": "ra.published.rms.norm"}


@pytest.mark.parametrize("key", ["learned", "mixed"])
def test_the_modelling_file_imports_every_other_file_itself(
    key: str, study: dict[str, tuple[Path, Path]]
) -> None:
    """transformers 5.0 copies no file that only another file imports."""
    folder = study[key][1]
    text = (folder / "modeling_arm.py").read_text()
    direct = set(re.findall(r"^from \.(\w+) import ", text, flags=re.MULTILINE))
    assert direct == {path.stem for path in folder.glob("*.py")} - {"modeling_arm"}


@pytest.mark.parametrize("key", ["learned", "window", "mine"])
def test_every_file_names_its_origin_and_the_card_what_is_computed(
    key: str, study: dict[str, tuple[Path, Path]]
) -> None:
    folder = study[key][1]
    for path in folder.glob("*.py"):
        first, second = path.read_text().split("\n")[:2]
        assert first.startswith("# Exported: ")
        if path.name != "ra_custom_mine.py":
            assert " commit " in first
            assert second == "# MIT License. Copyright (c) 2026 the authors of this project. See LICENSE."
    card = (folder / "README.md").read_text()
    assert "trust_remote_code=True)" in card
    formulas = {"learned": "y_standard + p", "window": "last W positions", "mine": "Absolute keys"}
    assert formulas[key] in card
    assert ("use_cache is false" in card) is (key in WITHOUT_CACHE)
    assert ("alternation_probability, by layer: " in card) is (key == "learned")


def test_an_arm_that_transformers_cannot_run_is_one_line_and_leaves_nothing(
    tmp_path: Path, config_file: Path
) -> None:
    config, own = config_file.read_text(), tmp_path / "x/own"
    own.mkdir(parents=True)
    reads = UNCACHED.replace(
        "from torch import nn", "from torch import nn\nfrom pathlib import Path"
    ).replace(
        "def attention(layer, spec):",
        "def attention(layer, spec):\n    Path(__file__).with_name('table.txt').read_text()",
    )
    (own / "reads.py").write_text(reads)
    (own / "table.txt").write_text("1")
    (own / "dotted.py").write_text("import gpt2.model.transformer\n" + UNCACHED)
    for name in ("READS", "DOTTED"):
        with custom_folder(own):
            trained_run(tmp_path / "x/runs", config, name)
    with pytest.raises(
        UserError, match=r"cannot run the exported folder: FileNotFoundError.*table\.txt.*; fix: "
    ):
        export.export_run(tmp_path / "x/runs/READS3")
    with pytest.raises(
        FlattenError, match=r"ra\.custom\.dotted, line 1: .* has no relative form; fix: from gpt2"
    ):
        export.export_run(tmp_path / "x/runs/DOTTED3")
    assert not list((tmp_path / "x/export").glob("*"))


def load_here(arguments: Sequence[str], place: Path) -> list[str]:
    """Load one folder in this process, which has loaded transformers."""
    reference, folder = arguments
    return [json.dumps({"differences": loading_check.differences(folder, load_file(reference))})]


def test_another_function_is_found_before_anything_is_written(
    tmp_path: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "run_script", load_here)
    run_dir = trained_run(tmp_path / "x/runs", config_file.read_text(), "DOUBLE")
    files = export.python_files

    def wrong(name: str, parts: dict[str, Any]) -> dict[str, str]:
        found = files(name, parts)
        double = found["ra_published_double.py"]
        found["ra_published_double.py"] = double.replace(
            "self.fused(k_BHTD, q_BHTD", "self.fused(q_BHTD, k_BHTD"
        )
        assert found["ra_published_double.py"] != double
        return found

    monkeypatch.setattr(export, "python_files", wrong)
    with pytest.raises(
        UserError, match=r"computes something else with the exported folder: \w+ .*; fix: report"
    ):
        export.export_run(run_dir)
    assert not list((tmp_path / "x/export").glob("*"))
