import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from gpt2.initial_weights import initialise
from gpt2.training_step import build_model
from ra import attention_maps
from ra.control import swap_query_and_key
from ra.variants import variant
from runtime import checkpoint, run_record
from runtime.dotconfig import read_symbols
from runtime.errors import UserError
from runtime.settings import Config
from study.evaluation import attention_page as inspect
from study.evaluation.attention_page import (
    FILE,
    InputText,
    RunAttention,
    early_late_means,
    even_spread,
    map_figure,
    ratios,
)
from study.evaluation.loaded_runs import load_run
from tests.checked_files import write_checked
from tests.checkout import link_project

ROOT = Path(__file__).parents[3]
SETTINGS = (
    "GPT2_MAX_ITERS=1",
    "GPT2_BLOCK_SIZE=32",
    "EVAL_TOKENS=256",
    "HELLASWAG=n",
    "DATASET_FILES=nowhere/*.txt",
)


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workplace = tmp_path_factory.mktemp("workplace")
    link_project(workplace)
    assignments = [f"CONFIG_{setting}" for setting in SETTINGS]
    command = [
        sys.executable,
        "-m",
        "scripts.kconfig",
        "defconfig",
        "gpt2-ra-ablation-smoke+cpu",
        *assignments,
    ]
    environment = {
        name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")
    }
    subprocess.run(
        command, cwd=workplace, env=environment | {"RA_DETECTED": "cpu"}, check=True, capture_output=True
    )
    return workplace / ".config"


def a_run(folder: Path, config_file: Path, name: str, swap: tuple[int, ...] = (), seed: int = 0) -> Path:
    """A run folder whose checkpoint holds initial weights, drawn wide so that attention is far from even."""
    symbols = read_symbols(config_file)
    config = Config.from_symbols(symbols)
    model = build_model(config.model, variant(name, config.model, config.alternation).parts)
    initialise(model, seed)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight *= 15
    swap_query_and_key(model, swap)
    run_dir = folder / run_record.run_name(name, seed)
    run_dir.mkdir(parents=True)
    (run_dir / "config").write_text(config_file.read_text())
    write_checked(run_dir / "run.json", run_record.blank(run_dir.name, name, seed).to_json())
    checkpoint.save(run_dir / "checkpoint", 7, {"model": model.state_dict()}, {})
    return run_dir


def text_of(words: str, folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text(words)
    return path


def inspected(run_dir: Path, words: Path | None = None) -> tuple[RunAttention, InputText]:
    run = load_run(run_dir)
    text = inspect.choose_text([run], words)
    return inspect.inspect_run(run, text, [0], [1]), text


def near(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_a_swapped_reciprocal_run_has_the_maps_of_the_baseline_with_paths_exchanged(
    tmp_path: Path, config_file: Path
) -> None:
    base, _ = inspected(a_run(tmp_path, config_file, "B"))
    swapped, _ = inspected(a_run(tmp_path, config_file, "RAALL", swap=tuple(base.layers)))
    assert {*base.run.shares} == {0.0}
    assert {*swapped.run.shares} == {1.0}
    for layer, values in base.layers.items():
        other = swapped.layers[layer]
        near(values.standard.entropy, other.reciprocal.entropy)
        near(values.total_variation, other.total_variation)
        assert values.total_variation.min() > 0.05
        assert [*values.pictures] == ([1] if layer == 0 else [])
    near(base.layers[0].pictures[1][0], swapped.layers[0].pictures[1][1])


def test_early_and_late_values_are_means_over_their_layers(tmp_path: Path, config_file: Path) -> None:
    run_attention, text = inspected(a_run(tmp_path, config_file, "RALEARN"))
    depth = len(run_attention.run.model.blocks)
    middle = depth // 2
    assert len(run_attention.layers) == depth
    early, late = early_late_means(run_attention, "entropy", "reciprocal")
    means = [float(maps.reciprocal.entropy.mean()) for maps in run_attention.layers.values()]
    assert (early, late) == (pytest.approx(np.mean(means[:middle])), pytest.approx(np.mean(means[middle:])))
    assert run_attention.run.shares == [0.5] * depth
    assert (run_attention.run.iteration, text.tokens) == (7, 32)


def test_the_text_is_the_start_of_the_file_or_a_sentence_without_data(
    tmp_path: Path, config_file: Path
) -> None:
    run = load_run(a_run(tmp_path, config_file, "B"))
    words = inspect.choose_text([run], text_of("one two three", tmp_path))
    assert (words.tokens, words.pieces) == (13, tuple("one two three"))
    assert inspect.choose_text([run], text_of("word " * 500, tmp_path)).tokens == 32
    assert inspect.choose_text([run], None).source.startswith("a built-in sentence")


def test_runs_with_several_tokenizers_are_refused(tmp_path: Path, config_file: Path) -> None:
    run = load_run(a_run(tmp_path, config_file, "B"))
    data = dataclasses.replace(run.config.data, tokenizer="gpt2")
    other = dataclasses.replace(run, config=dataclasses.replace(run.config, data=data))
    assert inspect.choose_text([other], text_of("one two three", tmp_path)).pieces == (
        "one",
        " two",
        " three",
    )
    with pytest.raises(UserError, match=r"several tokenizers \(bytes, gpt2\)"):
        inspect.choose_text([run, other], None)


def test_an_error_is_one_line_with_the_problem(tmp_path: Path, config_file: Path) -> None:
    run_dir = a_run(tmp_path, config_file, "B")
    run = load_run(run_dir)
    empty = tmp_path / "RAALL0"
    empty.mkdir()
    write_checked(empty / "run.json", run_record.blank("RAALL0", "RAALL", 0).to_json())
    (empty / "config").write_text(config_file.read_text())
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    other = a_run(tmp_path / "other", config_file, "RALEARN")
    write_checked(other / "run.json", run_record.blank("B0", "B", 0).to_json())
    for wrong, message in (
        (lambda: load_run(tmp_path / "nowhere"), "is not a folder"),
        (lambda: load_run(empty), "has no checkpoint"),
        (lambda: load_run(other), "does not fit the model"),
        (lambda: inspect.choose_text([run], tmp_path / "nowhere"), "does not exist"),
        (lambda: inspect.choose_text([run], fifo), "is not a file; fix: TEXT="),
        (lambda: inspect.choose_text([run], text_of("", tmp_path)), "has 0 tokens"),
        (
            lambda: inspect.select_indices([9], 4, "layer", [0]),
            "layer 9 does not exist; fix: LAYERS=0 .. 3",
        ),
    ):
        with pytest.raises(UserError, match=message) as raised:
            wrong()
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("tokens", "pixels"), [(41, 8), (7, 64)])
def test_uniform_attention_has_the_neutral_colour(tokens: int, pixels: int) -> None:
    """Compare with the picture that `ra.attention_maps` draws of equal queries and keys."""
    even = even_spread(tokens, attention_maps.pixel_tokens(tokens, pixels))
    nothing_HTD = torch.zeros(1, tokens, 1)
    drawn, _ = attention_maps.layer_maps(nothing_HTD, nothing_HTD, [0], pixels).pictures[0]
    torch.testing.assert_close(torch.tensor(even), drawn)
    assert abs(ratios(drawn.numpy(), even)).max() < 1e-12
    assert abs(np.tril(ratios(2 * drawn.numpy(), even) - 1)).max() < 1e-12


def test_a_map_has_no_cells_of_the_future(tmp_path: Path, config_file: Path) -> None:
    run, text = inspected(a_run(tmp_path, config_file, "B"))
    spec, _ = map_figure([run], 0, 1, text)
    for option in spec["choices"][0]["options"]:
        for trace in option["data"]:
            assert [len(row) for row in trace["z"]] == list(range(1, len(trace["z"]) + 1))


def test_the_command_writes_the_numbers_of_each_run_and_one_page(tmp_path: Path, config_file: Path) -> None:
    runs = [a_run(tmp_path, config_file, name) for name in ("B", "RAALL")]
    command = [sys.executable, "-m", "scripts.attention", *map(str, runs), "--layers", "1", "--heads", "0 1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (runs[0] / "attention.html").is_file()
    assert "B0 (variant B, seed 0, iteration 7): " in done.stdout
    assert [json.loads((run / FILE).read_text())["variant"] for run in runs] == ["B", "RAALL"]
    wrong = subprocess.run([*command[:4], "--layers", "one"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr == 'error: LAYERS="one" is not a list of whole numbers; fix: LAYERS="0 3"\n'
