"""No password, token or key enters a zip, and what is not a secret stays."""

import string
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from referee.numerics.setup.config_checker import ConfigChecker
from referee.numerics.setup.script_settings import redact

VALUE = st.text(string.ascii_letters + string.digits, min_size=8, max_size=40).map(lambda text: f"q{text}7")
NAME = st.sampled_from(
    ["HF_TOKEN", "hf_token", "WANDB_API_KEY", "wandb_key", "api_key", "apiKey", "password", "DB_PASSWORD", "passwd",
     "aws_secret_access_key", "client_secret", "token", "auth_token", "access-token", "credentials", "GITHUB_PAT"]
)  # fmt: skip
SHELL = (
    "export {n}={v}",
    "{n}='{v}' python a.py",
    "python a.py --{n} {v}",
    "run --{n}={v}",
    '{n}: "{v}"',
    "{n}: {v}",
)
PYTHON = (
    '{p} = "{v}"', "{p}: str = '{v}'", 'login({p}="{v}")', 'os.environ["{n}"] = "{v}"', '{{"{n}": "{v}"}}',
    'os.environ.setdefault("{n}", "{v}")', 'parser.add_argument("--{n}", default="{v}")', "config.{p} = r'{v}'",
    'parser.add_argument("--{n}", type=str, default="{v}")',
)  # fmt: skip


@given(NAME, VALUE)
def test_no_secret_in_any_form_of_assignment_survives(name: str, value: str) -> None:
    for form in SHELL:
        assert value not in redact(form.format(n=name, v=value)), form
    for form in PYTHON:
        line = form.format(n=name, p=name.replace("-", "_"), v=value)
        assert value not in redact(line, code=True), form


@pytest.mark.parametrize(
    "text",
    [
        "login('hf_abcdefghijklmnopqrstuv')",
        "git clone https://me:hunter22@host/x",
        "curl -H 'Authorization: Bearer abcdefgh12345678'",
        "AKIAABCDEFGHIJKLMNOP",
        "x = 'ghp_abcdefghijklmnopqrstuvwxyz0123'",
        "-----BEGIN RSA PRIVATE KEY-----\nabcdefgh12345678\n-----END RSA PRIVATE KEY-----",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0abc.abc",
    ],
)
def test_known_forms_of_secrets_are_removed_without_a_name(text: str) -> None:
    for code in (False, True):
        assert "<removed>" in redact(text, code)
        for part in ("hunter22", "abcdefgh", "AKIAABCD", "eyJhbGci"):
            assert part not in redact(text, code)


@pytest.mark.parametrize(
    "text",
    [
        "LR=3e-4",
        "python a.py --max-tokens 512 --num_key_value_heads 8",
        "tokenizer: gpt2",
        "pad_token = '<pad>'",
        "eos_token: x, keys: x",
        "--token $HF_TOKEN",
        "https://example.org/a:b",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert redact(text) == text


def test_code_without_quoted_secrets_stays() -> None:
    code = "key = self.k_proj(x)\nquery, key = f(token=token_ids, key=key)\nscore(key, value)\nd['key'] = x\n"
    code += "if key == 'boxes': a = {key: 'x1'}\nbase_config_key = 'text_config'\n"
    assert redact(code, code=True) == code


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
    assert content.count(b"<removed>") >= 9
