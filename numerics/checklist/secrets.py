"""Remove passwords, tokens and keys from what a checklist packs.

A name decides for environment variables, settings and assignments in scripts. The form of a value decides elsewhere.
"""

from __future__ import annotations

import re

REMOVED = "<removed>"

ALWAYS = re.compile(
    r"passw|passphrase|(^|_)pass$|secret|credential|bearer|cookie"
    r"|(api|access|private|auth|ssh|account|license|signing|encryption)_?(key|token)"
)
OFTEN = re.compile(r"(^|_)(token|key|auth|pat)$")
VOCABULARY = re.compile(r"(^|_)(pad|eos|bos|unk|cls|sep|mask|image|video|audio|stop|start|end)_token$")
NUMBER_OR_SWITCH = re.compile(r"-?\d{1,6}(\.\d*)?|true|false|none|null|", re.IGNORECASE)
IN_VARIABLE = re.compile(r"token(?!iz)|key|secret|pass(w|phrase)|credential|auth|cookie", re.IGNORECASE)

SHAPES = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL),
    re.compile(r"(?<=://)[^/\s:@\"']+:[^/\s@\"']+(?=@)"),  # user and password of an address
    re.compile(r"\b(hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|r8_)[\w-]{16,}"),
    re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{16}\b"),
    re.compile(r"\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),  # a signed web token
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]{8,}"),
)
QUOTED = r"[rbfuRBFU]{0,2}(?:\"[^\"\n]*\"|'[^'\n]*')"
ASSIGNED = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)"
    r"(?P<between>[\"']?\]?[ \t]*(?::[ \t]*[\w.\[\]| ]+?(?==))?[ \t]*[:=]=?[ \t]*"  # name = , "name": , name: str =
    r"|[\"'][ \t]*,[ \t]*(?:[^()\n]*?\bdefault[ \t]*=[ \t]*)?)"  # ("name", value), ("--name", default=value)
    rf"(?P<value>{QUOTED}|[^\s\"',;(){{}}\[\]]+)"
)
OPTION = re.compile(
    rf"--(?P<name>[A-Za-z][\w-]*)(?P<between>[ \t]+)(?P<value>{QUOTED}|[^\s\"',;(){{}}-][^\s;]*)"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a setting is secret. A number of few digits is none, a special token of a vocabulary neither."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower().strip("-_").replace("-", "_")
    if ALWAYS.search(name):
        return True
    plain = NUMBER_OR_SWITCH.fullmatch(value.strip("\"'"))
    return bool(OFTEN.search(name)) and not VOCABULARY.search(name) and not plain


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable may be secret."""
    return bool(IN_VARIABLE.search(name))


def redact(text: str, code: bool = False) -> str:
    """Replace secrets in a text by REMOVED. code: Python, where only quoted values are secrets."""

    def replaced(found: re.Match[str]) -> str:
        value = found["value"]
        quoted = value[-1] in "\"'"
        if not is_secret(found["name"], value) or (code and not quoted) or value.startswith("$"):
            return found[0]
        mark = value[-1] if quoted else ""
        return f"{found['name' if found[0][0] != '-' else 0]}{found['between']}{mark}{REMOVED}{mark}"

    def option(found: re.Match[str]) -> str:
        if not is_secret(found["name"], found["value"]) or found["value"].startswith("$"):
            return found[0]
        return f"--{found['name']}{found['between']}{REMOVED}"

    for shape in SHAPES:
        text = shape.sub(REMOVED, text)
    text = ASSIGNED.sub(replaced, text)
    return text if code else OPTION.sub(option, text)
