"""No password, token or key enters a zip, and what is not a secret stays."""

import string
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.numerics.setup.config_checker import ConfigChecker
from referee.numerics.setup.script_settings import is_secret, relevant_variables, script_settings

VALUE = st.text(string.ascii_letters + string.digits, min_size=8, max_size=40).map(lambda text: f"q{text}7")
NAME = st.sampled_from(
    ["HF_TOKEN", "hf_token", "WANDB_API_KEY", "wandb_key", "api_key", "apiKey", "password", "DB_PASSWORD", "passwd",
     "aws_secret_access_key", "client_secret", "token", "auth_token", "access-token", "credentials", "GITHUB_PAT"]
)  # fmt: skip
FORMS = {
    "a.sh": ("export {n}={v}", "{n}='{v}' python a.py", "python a.py --{n} {v}", "run --{n}={v}"),
    "a.yaml": ('{n}: "{v}"', "a:\n  {n}: {v}"),
    "a.json": ('{{"{n}": "{v}"}}',),
    "a.py": ('{n} = "{v}"',),
}


@given(NAME, VALUE)
def test_no_secret_in_any_form_of_assignment_survives(name: str, value: str) -> None:
    for file, forms in FORMS.items():
        for form in forms:
            assert value not in str(script_settings(file, form.format(n=name, v=value))), form


@pytest.mark.parametrize(
    "value",
    [
        "hf_abcdefghijklmnopqrstuv",
        "https://me:hunter22@host/x",
        "-----BEGIN RSA PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.abc",
    ],
)
def test_known_forms_of_secrets_are_removed_without_a_name(value: str) -> None:
    assert is_secret("x", value)
    assert relevant_variables({"TORCH_X": value}) == {"TORCH_X": "<removed>"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lr", "3e-4"),
        ("max_tokens", "512"),
        ("pad_token", "<pad>"),
        ("token", "$HF_TOKEN"),
        ("host", "https://example.org/a:b"),
    ],
)
def test_what_is_no_secret_stays(name: str, value: str) -> None:
    assert not is_secret(name, value)


def test_no_secret_is_in_the_zip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "open-sesame-1")
    monkeypatch.setenv("TORCH_SECRET", "open-sesame-2")
    monkeypatch.setattr("sys.argv", ["a.py", "--hf_token", "open-sesame-3", "--lr", "1"])
    files = {
        "run.sh": "export WANDB_API_KEY=open-sesame-4\ntrain --password=open-sesame-5\n",
        "a.json": '{"hub": {"token": "open-sesame-6"}, "lr": 1}',
        "a.yaml": "hub:\n  token: open-sesame-7\n",
        "a.py": "TOKEN = 'open-sesame-8'\nHub(api_key='open-sesame-9')\n",
        "a.toml": "password = 'open-sesame-0'\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    ConfigChecker(
        shell_path=[str(tmp_path / name) for name in files],
        output_zip_path=tmp_path / "a.zip",
        hyperparameters={"hub": {"x": 1}, "secret": "open-sesame-a"},
    )
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        content = b"".join(archive.read(name) for name in archive.namelist())
    assert b"sesame" not in content
    assert content.count(b"<removed>") >= 5
