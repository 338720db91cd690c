"""Hyperparameters of scripts: each form of file gives the same settings, and a difference has a grade."""

import pytest

from referee.numerics.setup.checklist_rows import FATAL, HARMLESS, SUSPECT
from referee.numerics.setup.compared_checklists import setting_meaning
from referee.numerics.setup.script_settings import normal_value, script_settings

FORMS = {
    "a.sh": "LR=1e-3\npython t.py --lr $LR \\\n  --batch-size=8 --use-bias --name 'a b' --shift -2 # --no 1\n",
    "a.json": '{"lr": 0.001, "batch_size": 8, "use_bias": true, "name": "a b", "shift": -2}',
    "a.toml": 'lr = 1e-3\nbatch_size = 8\nuse_bias = true\nname = "a b"\nshift = -2\n',
    "a.yaml": "lr: 1e-3  # rate\nbatch_size: 8\nuse_bias: True\nname: 'a b'\nshift: -2\n",
}
EXPECTED = {"learning_rate": "0.001", "batch_size": "8", "use_bias": "true", "name": "a b", "shift": "-2"}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_gives_the_same_settings(name: str) -> None:
    found = script_settings(name, FORMS[name])
    assert found == {key: {value} for key, value in EXPECTED.items()}


def test_nested_settings_have_a_path() -> None:
    expected = {"optim.learning_rate": {"0.1"}, "optim.betas": {"[0.9, 0.95]"}, "seed": {"1"}}
    assert script_settings("a.json", '{"optim": {"lr": 0.1, "betas": [0.9, 0.95]}, "seed": 1}') == expected
    assert script_settings("a.yaml", "optim:\n  lr: 0.1\n  betas: [0.9, 0.95]\nseed: 1\n") == expected
    assert script_settings("a.sh", "train optim.lr=0.1 optim.betas='[0.9, 0.95]' +seed=1\n") == expected


def test_two_values_of_a_name_are_both_there() -> None:
    assert script_settings("a.sh", "a --lr 1\na --lr 2\n") == {"learning_rate": {"1", "2"}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "[" * 100_000),
        ("a.toml", "="),
        ("a.py", "lr = 1"),
        ("a.sh", 'echo "open\n'),
        ("a.bin", "\x00\ufffd"),
        ("a.yaml", ":\n - x\n\t:"),
    ],
)
def test_a_file_that_cannot_be_parsed_gives_no_settings(name: str, text: str) -> None:
    assert script_settings(name, text) == {}


def test_equal_values_have_one_text() -> None:
    assert len({normal_value(value) for value in ("1e-3", "0.001", 0.001, "'0.001'", "1.0E-3")}) == 1
    assert normal_value("1e-3") != normal_value("1.0000001e-3")
    assert normal_value((0.9, 1)) == normal_value([0.9, 1.0]) == normal_value("(.9,1)") == "[0.9, 1]"
    assert normal_value("(1") == "(1"
    assert normal_value(True) == normal_value("true") == "true"


@pytest.mark.parametrize(
    ("name", "grade"),
    [
        ("learning_rate", FATAL),
        ("optimizer.group0.betas", FATAL),
        ("per_device_train_batch_size", FATAL),
        ("tensor_model_parallel_size", FATAL),
        ("min_lr", FATAL),
        ("num_layers", FATAL),
        ("use_flash_attn", FATAL),
        ("log_interval", HARMLESS),
        ("save_steps", HARMLESS),
        ("output_dir", HARMLESS),
        ("master_port", HARMLESS),
        ("data_path", SUSPECT),
        ("foo", SUSPECT),
    ],
)
def test_a_name_decides_the_grade(name: str, grade: str) -> None:
    assert setting_meaning(name)[0] == grade
