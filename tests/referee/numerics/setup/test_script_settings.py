"""Hyperparameters of scripts: each form of file gives the same settings, and a difference has a grade."""

import pytest

from referee.numerics.setup.checklist_rows import FATAL, HARMLESS, SUSPECT
from referee.numerics.setup.compared_checklists import setting_grade
from referee.numerics.setup.script_settings import script_settings

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


@pytest.mark.parametrize(
    ("name", "grade"),
    [
        ("learning_rate", FATAL),
        ("optimizer.group0.betas", FATAL),
        ("use_flash_attn", FATAL),
        ("log_interval", HARMLESS),
        ("output_dir", HARMLESS),
        ("data_path", SUSPECT),
        ("foo", SUSPECT),
    ],
)
def test_a_name_decides_the_grade(name: str, grade: str) -> None:
    assert setting_grade(name) == grade
