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
WORD = re.compile(r"[a-z]+(_[a-z]+)*")
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
    r"(?P<between>[\"']?\]?[ \t]*(?::[ \t]*[\w.\[\]| ]+?(?==))?[ \t]*[:=](?!=)[ \t]*)"  # name = , "name": , name: str =
    rf"(?P<value>{QUOTED}|[^\s\"',;(){{}}\[\]]+)"
)
ARGUMENT = re.compile(  # f("name", "value"), f("--name", default="value")
    r"(?<=\()(?P<before>[\"']-{0,2})(?P<name>[A-Za-z_][\w.-]*)"
    r"(?P<between>[\"'][ \t]*,[ \t]*(?:[^()\n]*?\bdefault[ \t]*=[ \t]*)?)"
    rf"(?P<value>{QUOTED})"
)
OPTION = re.compile(
    rf"--(?P<name>[A-Za-z][\w-]*)(?P<between>[ \t]+)(?P<value>{QUOTED}|[^\s\"',;(){{}}-][^\s;]*)"
)


def is_secret(name: str, value: str = "") -> bool:
    """Whether a setting is secret. A number of few digits is none, nor a special token, nor a key that is a word."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower().strip("-_").replace("-", "_")
    if ALWAYS.search(name):
        return True
    value = value.strip("\"'")
    if NUMBER_OR_SWITCH.fullmatch(value) or (name.endswith("key") and WORD.fullmatch(value)):
        return False
    return bool(OFTEN.search(name)) and not VOCABULARY.search(name)


def is_secret_variable(name: str) -> bool:
    """Whether an environment variable may be secret."""
    return bool(IN_VARIABLE.search(name))


def redact(text: str, code: bool = False) -> str:
    """Replace secrets in a text by REMOVED. code: Python, where only quoted values are secrets."""

    def replaced(found: re.Match[str]) -> str:
        value, between = found["value"], found["between"]
        quoted = value[-1] in "\"'"
        literal = quoted and (
            between[0] in "\"'" or "=" in between
        )  # in Python, not the type or key of a name
        if value.startswith("$") or (code and not literal) or not is_secret(found["name"], value):
            return found[0]
        mark = value[-1] if quoted else ""
        return found[0].removesuffix(value) + f"{mark}{REMOVED}{mark}"

    for shape in SHAPES:
        text = shape.sub(REMOVED, text)
    patterns = (ASSIGNED, ARGUMENT) if code else (ASSIGNED, ARGUMENT, OPTION)
    for pattern in patterns:
        text = pattern.sub(replaced, text)
    return text
