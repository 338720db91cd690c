import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2 import checkpoint, record
from gpt2.config import Config, read_symbols
from gpt2.model import GPT2, initialise
from gpt2.step import build_model
from ra import maps
from ra.control import swap_query_and_key
from ra.settings import AlternationSettings
from ra.variants import variant
from study import attention
from study.attention import AttentionError
from study.attention_html import even_spread, page, picture, ratios

ROOT = Path(__file__).parents[2]
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
    for part in ("Kconfig", "gpt2", "ra", "study", "scripts", "defconfigs"):
        (workplace / part).symlink_to(ROOT / part)
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
    model = build_model(
        config.model, variant(name, config.model, AlternationSettings.from_symbols(symbols)).attention
    )
    initialise(model, seed)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight *= 15
    swap_query_and_key(model, swap)
    run_dir = folder / record.run_name(name, seed)
    run_dir.mkdir(parents=True)
    (run_dir / "config").write_text(config_file.read_text())
    record.write_json(run_dir / "run.json", record.blank(run_dir.name, name, seed))
    checkpoint.save(run_dir / "checkpoint", 7, {"model": model.state_dict()}, {})
    return run_dir


def text_of(words: str, folder: Path) -> Path:
    path = folder / "words.txt"
    path.write_text(words)
    return path


def seen_of(run_dir: Path, words: Path | None = None) -> tuple[attention.Seen, attention.Text]:
    run = attention.load(run_dir)
    text = attention.choose_text([run], words)
    return attention.look(run, text, [0], [1]), text


def test_a_swapped_reciprocal_run_is_the_baseline_with_its_paths_exchanged(
    tmp_path: Path, config_file: Path
) -> None:
    base, _ = seen_of(a_run(tmp_path, config_file, "B"))
    layers = base.run.config.model.layers
    swapped, _ = seen_of(a_run(tmp_path, config_file, "RAALL", swap=tuple(range(layers))))
    assert base.run.reciprocal == [0.0] * layers
    assert swapped.run.reciprocal == [1.0] * layers
    for layer in range(layers):
        one, other = base.layers[layer], swapped.layers[layer]
        torch.testing.assert_close(one.standard.entropy, other.reciprocal.entropy, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(one.total_variation, other.total_variation, atol=1e-4, rtol=1e-4)
        assert float(one.total_variation.min()) > 0.05
    pairs = base.layers[0].pictures[1], swapped.layers[0].pictures[1]
    torch.testing.assert_close(pairs[0][0], pairs[1][1], atol=1e-4, rtol=1e-4)


def test_the_halves_are_means_over_the_layers_of_each(tmp_path: Path, config_file: Path) -> None:
    seen, text = seen_of(a_run(tmp_path, config_file, "RALEARN"))
    told = attention.as_json(seen, text)
    assert len(told["layers"]) == seen.run.config.model.layers
    middle = len(told["layers"]) // 2
    for key, half in told["halves"].items():
        means = [sum(layer[key]) / len(layer[key]) for layer in told["layers"]]
        assert half["early"] == pytest.approx(sum(means[:middle]) / middle)
        assert half["late"] == pytest.approx(sum(means[middle:]) / len(means[middle:]))
    assert [layer["reciprocal_share"] for layer in told["layers"]] == pytest.approx(
        [0.5] * len(told["layers"])
    )
    assert (told["iteration"], told["text"]["tokens"]) == (7, 32)


def test_the_text_is_the_files_beginning_and_else_a_sentence_where_there_are_no_data(
    tmp_path: Path, config_file: Path
) -> None:
    run = attention.load(a_run(tmp_path, config_file, "B"))
    words = attention.choose_text([run], text_of("one two three", tmp_path))
    assert (len(words.ids), words.pieces()) == (3, ["one", " two", " three"])
    assert len(attention.choose_text([run], text_of("word " * 500, tmp_path)).ids) == 32
    assert attention.choose_text([run], None).source.startswith("a sentence")


def test_what_is_not_there_is_one_line_that_says_what_would_be_right(
    tmp_path: Path, config_file: Path
) -> None:
    run_dir = a_run(tmp_path, config_file, "B")
    run = attention.load(run_dir)
    empty = tmp_path / "RAALL0"
    empty.mkdir()
    record.write_json(empty / "run.json", record.blank("RAALL0", "RAALL", 0))
    (empty / "config").write_text(config_file.read_text())
    other = a_run(tmp_path / "other", config_file, "RALEARN")
    record.write_json(other / "run.json", record.blank("B0", "B", 0))
    for wrong, told in (
        (lambda: attention.load(tmp_path / "nowhere"), "is no folder"),
        (lambda: attention.load(empty), "has no checkpoint"),
        (lambda: attention.load(other), "is not of the model"),
        (lambda: attention.choose_text([run], tmp_path / "nowhere"), "cannot be read"),
        (lambda: attention.choose_text([run], text_of("", tmp_path)), "has 0 tokens"),
        (lambda: attention.pick([9], 4, "layer", [0]), "there is no layer 9; right: 0 to 3"),
    ):
        with pytest.raises(AttentionError, match=told) as raised:
            wrong()
        assert "\n" not in str(raised.value)


def test_an_even_spread_is_no_colour_and_the_future_is_left_out() -> None:
    even = even_spread(40)
    assert float(ratios(even, even).abs().max()) == 0
    torch.testing.assert_close(even.sum(1), torch.ones(40, dtype=torch.float64))
    assert [round(float(value), 6) for value in even[3, :5]] == [0.25, 0.25, 0.25, 0.25, 0]


def test_the_page_shows_every_run_and_trusts_none(tmp_path: Path, config_file: Path) -> None:
    words = text_of("<script>alert(1)</script> is what was written", tmp_path)
    runs = [a_run(tmp_path, config_file, name) for name in ("B", "RALEARN")]
    shown = [seen_of(run_dir, words) for run_dir in runs]
    shown[0][0].run.notes.append("<b>note</b>")
    made = page([seen for seen, _ in shown], shown[0][1])
    assert "<script>alert" not in made
    assert "<b>note" not in made
    assert all(name in made for name in ("B0 at iteration 7", "RALEARN0 at iteration 7", "map0-1"))
    figure: dict[str, Any] = picture(
        [seen for seen, _ in shown], 0, 1, shown[0][1], even_spread(len(shown[0][1].ids)), 3
    )
    assert len(figure["data"]) == 4
    for trace in figure["data"]:
        for i, row in enumerate(trace["z"]):
            assert all((value is None) == (j > i) for j, value in enumerate(row))
    json.dumps(figure, allow_nan=False)


def test_a_layer_of_another_kind_is_left_out_and_the_rest_is_shown(tmp_path: Path, config_file: Path) -> None:
    run = attention.load(a_run(tmp_path, config_file, "B"))
    assert isinstance(run.model, GPT2)
    run.model.blocks[0].attention = torch.nn.Identity()  # type: ignore[union-attr]
    text = attention.choose_text([run], None)
    seen = attention.look(run, text, [0, 1], [0])
    assert 0 not in seen.layers
    assert "map1-0" in page([seen], text)
    assert isinstance(seen.layers[1], maps.LayerMaps)


def test_the_command_writes_the_numbers_of_each_run_and_one_page(tmp_path: Path, config_file: Path) -> None:
    runs = [a_run(tmp_path, config_file, name) for name in ("B", "RAALL")]
    command = [sys.executable, "-m", "scripts.attention", *map(str, runs), "--layers", "1", "--heads", "0 1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (runs[0] / "attention.html").is_file()
    assert [json.loads((run / "attention.json").read_text())["variant"] for run in runs] == ["B", "RAALL"]
    wrong = subprocess.run([*command[:4], "--layers", "one"], cwd=ROOT, capture_output=True, text=True)
    assert wrong.returncode == 1
    assert wrong.stderr == 'error: LAYERS="one" is no list of numbers; right: such as LAYERS="0 3"\n'
