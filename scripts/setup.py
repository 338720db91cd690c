"""Set up what is missing: the virtual environment and the packages that the next command needs.

    python3 -m scripts.setup base            .venv with kconfiglib: enough to configure
    python3 -m scripts.setup main            what .config needs to train (torch, and the extras that it asks for)
    python3 -m scripts.setup dev             what `make check` needs besides
    PYTHON -m scripts.setup --as-it-is WHAT  install nothing; say what this interpreter lacks

Standard library only: it runs before anything is installed. A second call finds its stamp and does nothing.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MODULES = {  # the module by which an installed requirement shows
    "base": ["kconfiglib"],
    "main": ["kconfiglib", "torch", "numpy", "tiktoken", "rich"],
    "dev": ["pytest", "hypothesis", "ruff", "mypy", "jsonschema", "scipy", "transformers"],
}
EXTRAS = {  # lines of .config that need an extra
    "hub": r"CONFIG_DATASET_(FINEWEB_EDU|OPENWEBTEXT|TINYSTORIES|WIKITEXT103)=y|CONFIG_DATASET_FILES=.*parquet",
    "wandb": r"CONFIG_WANDB=y",
    "trackio": r"CONFIG_TRACKIO=y",
}
TORCH_ON_CPU = "torch==2.13.0+cpu"  # the CPU build that this project is tested with


class SetupError(Exception):
    """One line for the user."""


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """The project's dependencies and its extras, from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def wanted(what: str) -> list[str]:
    """The requirements of `what`, torch left out: it is chosen by hardware."""
    main, extras = requirements()
    if what == "base":
        return [line for line in main if line.startswith("kconfiglib")]
    lines = [line for line in main if not line.startswith("torch")]
    for extra in [*configured_extras(), *(["dev"] if what == "dev" else [])]:
        lines += extras[extra]
    return lines


def configured_extras() -> list[str]:
    config = ROOT / ".config"
    text = config.read_text(errors="replace") if config.exists() else ""
    return [extra for extra, pattern in EXTRAS.items() if re.search(rf"^({pattern})", text, re.MULTILINE)]


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def say_scale() -> None:
    """What the study was scaled to, before anything else is said."""
    config = ROOT / ".config"
    if config.exists() and re.search(
        r"^CONFIG_SCALE_CPU=y$", config.read_text(errors="replace"), re.MULTILINE
    ):
        print("no GPU: .config is scaled to a CPU study", flush=True)


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip in the virtual environment; True when it succeeded. Its last lines are shown when it did not."""
    command = [python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not quiet_failure:
        print("\n".join(done.stderr.strip().splitlines()[-8:]), file=sys.stderr)
    return done.returncode == 0


def make_venv() -> None:
    if (VENV / "bin" / "python").exists() and subprocess.run([python(), "-c", ""]).returncode == 0:
        return
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if made.returncode:
        raise SetupError(
            "python3 could not make a virtual environment; install your system's package for it "
            "(python3-venv on Debian and Ubuntu), or name an interpreter that has torch: make PYTHON=python3"
        )


def install_torch() -> None:
    """The build of torch that suits the hardware; never gigabytes of CUDA on a machine without a GPU."""
    main, _ = requirements()
    (torch,) = [line for line in main if line.startswith("torch")]
    if subprocess.run([python(), "-c", "import torch"], capture_output=True).returncode == 0:
        return
    from gpt2.hardware import detect_hardware

    kind = detect_hardware().kind if sys.platform == "linux" else "other"
    if kind in ("cuda", "other"):
        say(f"installing {torch} (the default build; on Linux with CUDA, some gigabytes)")
        if not pip(torch):
            raise SetupError(f"{torch} could not be installed; its last lines are above")
        return
    backend = "cpu" if kind == "cpu" else "auto"
    if kind == "cpu":
        say("installing torch (CPU build)")
        if pip(TORCH_ON_CPU, quiet_failure=True):
            return
    say(f"asking uv for torch's {'CPU' if kind == 'cpu' else 'ROCm'} build")
    uv = [
        python(),
        "-m",
        "uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        python(),
        "--torch-backend",
        backend,
        torch,
    ]
    if not pip("uv") or subprocess.run(uv).returncode:
        raise SetupError(
            f"no {'CPU' if kind == 'cpu' else 'ROCm'} build of torch could be had from here. Install the one you want "
            f"(`{python()} -m pip install '{torch}'` takes the CUDA build, some gigabytes), then run make again; "
            "or name an interpreter that has torch: make PYTHON=python3"
        )


def install(what: str) -> None:
    lines = wanted(what)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    stamp = VENV / f".{what}-{digest}"
    if stamp.exists():
        return
    if what == "main":
        say_scale()
    make_venv()
    if what != "base":  # kconfiglib alone takes seconds and goes without saying
        install_torch()
        say("installing " + ", ".join(re.split(r"[<>=]", line)[0] for line in lines))
    if not pip(*lines):
        raise SetupError(
            "some packages could not be installed; pip's last lines are above. Run make again to go on"
        )
    stamp.touch()


def check_as_it_is(what: str) -> None:
    """Say which modules this interpreter lacks for `what`."""
    modules = MODULES["main"] + MODULES["dev"] if what == "dev" else MODULES[what]
    extra_modules = {"hub": "datasets", "wandb": "wandb", "trackio": "trackio"}
    if what == "main":
        modules = modules + [extra_modules[extra] for extra in configured_extras()]
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SetupError(
            f"{sys.executable} has no {', '.join(missing)}; install them there, or leave PYTHON= out and make sets up "
            "an environment of its own"
        )


def main(arguments: list[str]) -> int:
    as_it_is = "--as-it-is" in arguments
    (what,) = [argument for argument in arguments if argument != "--as-it-is"]
    try:
        if what == "main" and not (ROOT / ".config").exists():
            raise SetupError(
                "there is no .config; right: make defconfig-gpt2-ra-ablation (make help lists others)"
            )
        if sys.version_info < (3, 11):
            raise SetupError(
                f"Python {sys.version.split()[0]} is too old: 3.11 or newer is needed (make PYTHON=...)"
            )
        check_as_it_is(what) if as_it_is else install(what)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
