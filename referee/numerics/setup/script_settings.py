"""Read settings from training scripts and configuration files.

Shell: `--name value`, `name=value`. JSON, TOML and YAML: leaves by dotted path. All names of a side form one table,
because scripts of two machines have different names. Python gives none: its digest is compared.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from referee.numerics.setup.checklist_rows import FATAL, HARMLESS, SUSPECT

REMOVED = "<removed>"
NAME = re.compile(
    r"passw|passphrase|secret|credential|bearer|(api|access|private|auth|account|ssh)_?(key|token)"
)
OFTEN = re.compile(r"(^|_)(token|key|auth|pat|pass)$")  # names that are secret where the value looks like one
NO_VALUE = re.compile(
    r"(?!.*\d)[a-z_ ]*|-?\d{1,6}(\.\d*)?|\$.*|<.*>", re.IGNORECASE
)  # words, numbers, references
FORMS = re.compile(  # user and password of an address; tokens of services, AWS and the web; Authorization headers
    r"://[^/\s:@\"']+:[^/\s@\"']+@|\b(hf_|gh[pousr]_|github_pat_|glpat-|xox[abprs]-|sk-|r8_)[\w-]{16,}"
    r"|\b(AKIA|ASIA)[A-Z0-9]{16}\b|\beyJ[\w-]{10,}\.[\w-]{10,}|(?i:bearer [\w.~+/=-]{8,})|BEGIN [A-Z ]*PRIVATE KEY"
)


def is_secret(name: str, value: str) -> bool:
    """Return whether a setting is secret: by its name or the form of its value.

    Names such as token are secret only where the value is no word, number or reference.
    """
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rsplit(".", 1)[-1]).lower().strip("-_").replace("-", "_")
    if NAME.search(name) or FORMS.search(value):
        return True
    return bool(OFTEN.search(name)) and not NO_VALUE.fullmatch(value.strip("\"'"))


def is_secret_variable(name: str) -> bool:
    """Return whether an environment variable may be secret."""
    return bool(
        re.search(r"token(?!iz)|key|secret|pass(w|phrase)|credential|auth|cookie", name, re.IGNORECASE)
    )


ALIASES = {"lr": "learning_rate", "wd": "weight_decay", "bs": "batch_size"}


def script_settings(name: str, text: str) -> dict[str, set[str]]:
    """Return setting -> values of one file. A file that cannot be parsed gives none."""
    try:
        match name.rpartition(".")[2].lower():
            case "json":
                pairs = list(leaves(json.loads(text)))
            case "toml":
                pairs = list(leaves(tomllib.loads(text)))
            case "yaml" | "yml":
                pairs = list(_yaml(text))
            case "py":
                pairs = []
            case _:
                pairs = list(_shell(text))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return {}
    found: dict[str, set[str]] = {}
    for key, value in pairs:
        add_setting(found, key, value)
    return found


def add_setting(found: dict[str, set[str]], name: str, value: Any) -> None:
    """Add a setting under its normal name: lower case with underscores, abbreviations as the long name."""
    text = normal_value(value)
    key = re.sub(r"(?<=[a-z0-9])(?=[A-Z][a-z])", "_", name.strip().lstrip("-+"))
    head, dot, last = key.lower().replace("-", "_").rpartition(".")
    secret = is_secret(name, text)
    found.setdefault(f"{head}{dot}{ALIASES.get(last, last)}", set()).add(REMOVED if secret else text)


def normal_value(value: Any) -> str:
    """Return one text for equal values: 1e-3 and 0.001, true and True, a list and a tuple."""
    if isinstance(value, str) and value.strip()[:1] in ("[", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            value = ast.literal_eval(value.strip())
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(normal_value, value))}]"
    text = str(value).strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    if text.lower() in ("true", "false", "none", "null"):
        return text.lower().replace("null", "none")
    try:
        return f"{float(text):.15g}"
    except ValueError:
        return text


def leaves(value: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings by dotted path. A list is one leaf."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{place}.{key}" if place else str(key))
    elif place:
        yield place, value


def _yaml(text: str) -> Iterator[tuple[str, str]]:
    """Yield `key: value` lines by their indentation; lists and blocks of text are left out."""
    above: list[tuple[int, str]] = []
    for line in text.splitlines():
        found = re.match(r"^( *)([\w.\-/]+):(?: +(.*))?$", re.sub(r"\s+#.*$", "", line))
        if not found:
            continue
        indent, key, value = len(found[1]), found[2], (found[3] or "").strip()
        above = [entry for entry in above if entry[0] < indent]
        if value:
            yield ".".join([*(name for _, name in above), key]), value
        else:
            above.append((indent, key))


def _shell(text: str) -> Iterator[tuple[str, str]]:
    known: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # a quotation over several lines
            words = line.split()
        for name, value in options(words):
            reference = re.fullmatch(r"\$\{?(\w+)\}?", value)
            known[name] = known.get(reference[1], value) if reference else value
            yield name, known[name]


def options(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield `--name value`, `--name=value`, `--switch` and `name=value`."""
    for number, word in enumerate(words):
        if assigned := re.fullmatch(r"(?:--?)?(\+{0,2}[A-Za-z_][\w.\-/]*)=(.*)", word, re.DOTALL):
            yield assigned[1], assigned[2]
        elif re.fullmatch(r"--[A-Za-z][\w.-]*", word):
            after = words[number + 1] if number + 1 < len(words) else "--"
            has_value = not after.startswith("-") or re.fullmatch(r"-[\d.]+(e-?\d+)?", after)
            yield word, after if has_value else "true"


# The grade of a variable that differs: that of the longest beginning of its name. Ascend's names are the guide's.
GRADES = {
    FATAL: (  # the number format of matrix products, or overflow without Inf and NaN
        "NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE ONEDNN_DEFAULT_FPMATH_MODE "
        "DNNL_DEFAULT_FPMATH_MODE ALLOW_FP32_TO_FP16 INF_NAN_MODE_FORCE_DISABLE"
    ),
    HARMLESS: (  # kernels and the order of sums, which is rounding; devices, memory and speed
        "CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES "
        "NVIDIA_VISIBLE_DEVICES TASK_QUEUE_ENABLE COMBINED_ENABLE CPU_AFFINITY_CONF PYTORCH_ALLOC_CONF "
        "PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF PYTORCH_NPU_ALLOC_CONF CUDA_DEVICE_MAX_CONNECTIONS "
        "TOKENIZERS_PARALLELISM ASCEND_GLOBAL_ ASCEND_SLOG_ TORCH_LOGS NCCL_DEBUG HCCL_LOG "
        "CUBLAS CLOSE_MATMUL_K_SHIFT LCCL_DETERMINISTIC FLASH_ATTENTION_DETERMINISTIC PYTORCH_MPS_ ATEN_ "
        "ONEDNN_ DNNL_ MKL_ OMP_ KMP_ GOMP_ OPENBLAS_ BLIS_ CUDNN_ MIOPEN_ ROCBLAS_ HIPBLAS HSA_ TORCH_BLAS_ "
        "TORCH_ROCM_ TORCHINDUCTOR_ TRITON_ PYTORCH_TUNABLEOP_ NCCL_ RCCL_ HCCL_ GLOO_ NVTE_"
    ),
    SUSPECT: (  # another batch, library, file or order; synchronous operations; unknown effects
        "WORLD_SIZE LOCAL_WORLD_SIZE PYTHONHASHSEED PYTHONPATH LD_PRELOAD LD_LIBRARY_PATH INF_NAN_MODE_ENABLE "
        "ASCEND_LAUNCH_BLOCKING CUDA_LAUNCH_BLOCKING HF_ TRANSFORMERS_ DATASETS_ TORCH PYTORCH_ CUDA_ NVIDIA_ HIP_ "
        "ROCM_ AMD_ ASCEND_ ACL_ NPU_ TBE_ DS_ DEEPSPEED_ MEGATRON_ ACCELERATE_ FSDP_ VLLM_ SGLANG_ VERL_ FLASH_ "
        "XFORMERS_ XLA_ NUMBA_ NPY_ MINDSPEED_"
    ),
}
BEGINNINGS = {beginning: grade for grade, names in GRADES.items() for beginning in names.split()}


def variable_grade(name: str) -> str:
    """Return the grade of a variable that differs."""
    known = [beginning for beginning in BEGINNINGS if name.startswith(beginning)]
    return BEGINNINGS[max(known, key=len)] if known else SUSPECT


def relevant_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that can change numbers, without secrets and folders of compilers' caches."""
    return {
        name: REMOVED if FORMS.search(value) else value
        for name, value in sorted(variables.items())
        if name.startswith(tuple(BEGINNINGS))
        and not name.endswith("_CACHE_DIR")
        and not is_secret_variable(name)
    }
