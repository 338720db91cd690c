"""Remove passwords, tokens and keys from what a checklist packs."""

from __future__ import annotations

import re

REMOVED = "<removed>"
NAME = re.compile(
    r"passw|passphrase|secret|credential|bearer|(api|access|private|auth|account|ssh)_?(key|token)"
)
OFTEN = re.compile(r"(^|_)(token|key|auth|pat|pass)$")  # names that are secret where the value looks like one
NO_VALUE = re.compile(
    r"(?!.*\d)[a-z_ ]*|-?\d{1,6}(\.\d*)?|\$.*|<.*>", re.IGNORECASE
)  # words, numbers, references
BLOCK = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
SHAPES = (
    re.compile(  # user and password of an address; tokens of services, AWS and the web; Authorization headers
        r"://[^/\s:@\"']+:[^/\s@\"']+@|\b(hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|r8_)[\w-]{16,}"
        r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.[\w-]{10,}|(?i:bearer [\w.~+/=-]{8,})"
    )
)
OPTION = re.compile(r"--([\w-]+)[ \t]+(?=[^-\s])")
ASSIGNED = re.compile(  # a name and a value with =, : or a comma between them, a type or the name default before it
    r"(?P<name>[A-Za-z_][\w.-]*)[\"']?\]?\s*(?::[\w \t.\[\]|]+?(?==))?[:=,]\s*(?:[^()\n]*?default\s*=\s*)?"
    r"[rbfuRBFU]?(?:(?P<quoted>[\"'][^\"'\n]*[\"'])|(?P<bare>[^\s\"',;()]+))"
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a setting is secret: by its name, for names such as token only where the value looks like one."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower().strip("-_").replace("-", "_")
    if NAME.search(name):
        return True
    return bool(OFTEN.search(name)) and not NO_VALUE.fullmatch(value.strip("\"'"))


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable may be secret."""
    return bool(
        re.search(r"token(?!iz)|key|secret|pass(w|phrase)|credential|auth|cookie", name, re.IGNORECASE)
    )


def redact(text: str, code: bool = False) -> str:
    """Replace each line with a secret by REMOVED. code: Python, where only quoted values are secrets."""

    def has_secret(line: str) -> bool:
        found = ASSIGNED.finditer(line if code else OPTION.sub(r"\1=", line))
        values = ((match["name"], match["quoted"] or ("" if code else match["bare"])) for match in found)
        return bool(SHAPES.search(line)) or any(value and is_secret(name, value) for name, value in values)

    return "\n".join(REMOVED if has_secret(line) else line for line in BLOCK.sub(REMOVED, text).split("\n"))
