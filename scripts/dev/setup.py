"""Create the virtual environment and install the packages that the next command needs.

    python3 -m scripts.dev.setup base            .venv with kconfiglib, to configure
    python3 -m scripts.dev.setup main            the packages that .config needs to train: torch and its extras
    python3 -m scripts.dev.setup tools           the same; .config is optional
    python3 -m scripts.dev.setup core            the same without the extras of .config
    python3 -m scripts.dev.setup dev             the packages of main and of `make check`
    PYTHON -m scripts.dev.setup --as-it-is KIND  install nothing; name the packages that this interpreter lacks

Standard library only: it runs before any package is installed. A stamp file makes a second call do nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

from gpt2.system.errors import run_command

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
CORE = ["kconfiglib", "torch", "numpy", "scipy", "tiktoken", "rich"]
DEV = ["pytest", "xdist", "hypothesis", "ruff", "mypy", "jsonschema", "PIL", "transformers", "pyarrow"]
MODULES = {
    "base": ["kconfiglib"],
    "core": CORE,
    "main": CORE,
    "dev": DEV,
}  # of the requirements of a kind
NO_EXTRAS = ("base", "core")
WITHOUT_CONFIG = {"tools": "main"}  # kinds that install another kind, with or without a .config
EXTRA_MODULES = {"hub": ["datasets", "pyarrow"], "wandb": ["wandb"], "trackio": ["trackio"]}
EXTRAS = {  # lines of .config that need an extra
    "hub": r"CONFIG_DATASET_(FINEWEB_EDU|OPENWEBTEXT|TINYSTORIES|WIKITEXT103)=y|CONFIG_DATASET_FILES=.*parquet",
    "wandb": r"CONFIG_WANDB=y",
    "trackio": r"CONFIG_TRACKIO=y",
}
OLDEST = (3, 11)
TORCH_ON_CPU = "torch==2.13.0+cpu"  # the tested CPU build


class SetupError(Exception):
    """The set-up failed; one line for the user."""


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Read the project's dependencies and extras from pyproject.toml."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project["dependencies"], project["optional-dependencies"]


def requirements_of(kind: str) -> list[str]:
    """Return the requirements of a kind without torch, whose build depends on the hardware."""
    main, extras = requirements()
    if kind == "base":
        return [line for line in main if line.startswith("kconfiglib")]
    lines = [line for line in main if not line.startswith("torch")]
    for extra in [*([] if kind in NO_EXTRAS else configured_extras()), *(["dev"] if kind == "dev" else [])]:
        lines += extras[extra]
    return lines


def configured_extras() -> list[str]:
    config = ROOT / ".config"
    text = config.read_text(errors="replace") if config.exists() else ""
    return [extra for extra, pattern in EXTRAS.items() if re.search(rf"^({pattern})", text, re.MULTILINE)]


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def say_scale() -> None:
    """Print the scale of a CPU study before the installation starts."""
    config = ROOT / ".config"
    lines = config.read_text(errors="replace").splitlines() if config.exists() else []
    if "CONFIG_SCALE_CPU=y" in lines:
        why = "no GPU" if 'CONFIG_DETECTED="cpu"' in lines else "CPU chosen"
        print(f"{why}: .config is scaled to a CPU study", flush=True)


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip in the virtual environment; return whether it succeeded. A failure prints its last lines."""
    command = [python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not quiet_failure:
        print("\n".join(done.stderr.strip().splitlines()[-8:]), file=sys.stderr)
    return done.returncode == 0


def works(code: str) -> bool:
    """Return whether the environment's interpreter exists and runs `code`."""
    try:
        return subprocess.run([python(), "-c", code], capture_output=True).returncode == 0
    except OSError:  # no interpreter, a broken link, or a copy from another machine
        return False


def make_venv() -> None:
    if works(""):
        return
    created = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True
    )
    if created.returncode:
        raise SetupError(
            "python3 could not create a virtual environment; fix: install python3-venv (on Debian and Ubuntu), "
            "or name an interpreter that has torch: make PYTHON=python3"
        )


def install_torch() -> None:
    """Install the build of torch for the hardware. The CPU build saves gigabytes on a machine without a GPU."""
    main, _ = requirements()
    (torch,) = [line for line in main if line.startswith("torch")]
    if works("import torch"):
        return
    from gpt2.hardware.detect import detect_hardware

    kind = detect_hardware().kind if sys.platform == "linux" else "other"
    if kind in ("cuda", "other"):
        say(f"installing {torch} (the default build; on Linux with CUDA, some gigabytes)")
        if not pip(torch):
            raise SetupError(
                f"{torch} could not be installed; pip's last lines are above; fix: make (it tries again)"
            )
        return
    backend, build = ("cpu", "CPU") if kind == "cpu" else ("auto", "ROCm")
    say(f"installing torch ({build} build)")
    if kind == "cpu" and pip(TORCH_ON_CPU, quiet_failure=True):
        return
    uv = [python(), "-m", "uv", "pip", "install", "--quiet", "--python", python(), "--torch-backend", backend]
    if not pip("uv") or subprocess.run([*uv, torch]).returncode:
        raise SetupError(
            f"no {build} build of torch could be installed; fix: install a build (for CUDA, some gigabytes: "
            f"{python()} -m pip install '{torch}'), then run make again; or name an interpreter that has torch: "
            "make PYTHON=python3"
        )


def install(kind: str) -> None:
    """Install the requirements of a kind where its stamp is missing."""
    lines = requirements_of(kind)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    stamp = VENV / f".{'main' if kind == 'core' else kind}-{digest}"
    if stamp.exists() and (VENV / "bin" / "python").exists():
        return
    if kind == "main":
        say_scale()
    make_venv()
    if kind != "base":  # kconfiglib alone takes seconds
        install_torch()
        say("installing " + ", ".join(re.split(r"[<>=]", line)[0] for line in lines))
    if not pip(*lines):
        raise SetupError(
            "some packages could not be installed; pip's last lines are above; fix: make (it tries again)"
        )
    stamp.touch()


def lacking(modules: list[str]) -> list[str]:
    """List the modules that cannot be imported, broken ones with the reason."""
    found = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken library may raise anything
            absent = isinstance(error, ModuleNotFoundError) and error.name == name
            reason = " ".join(str(error).split())[:100]
            found.append(name if absent else f"{name} ({type(error).__name__}: {reason})")
    return found


def check_as_it_is(kind: str) -> None:
    """Raise SetupError with the modules that this interpreter lacks for a kind."""
    modules = MODULES["main"] + MODULES["dev"] if kind == "dev" else list(MODULES[kind])
    if kind not in NO_EXTRAS:
        modules += [name for extra in configured_extras() for name in EXTRA_MODULES[extra]]
    missing = lacking(list(dict.fromkeys(modules)))
    if missing:
        raise SetupError(
            f"{sys.executable} has no {', '.join(missing)}; fix: install them there, or run make without PYTHON=, "
            "which creates .venv"
        )


def prepare(arguments: list[str]) -> None:
    """Install the packages of the kind in `arguments`, or with --as-it-is check them."""
    names = [argument for argument in arguments if argument != "--as-it-is"]
    if sys.version_info < OLDEST:
        raise SetupError(
            f"Python {sys.version.split()[0]} is too old: {'.'.join(map(str, OLDEST))} or newer is needed; fix: "
            "install one as python3, or name one that has torch: make PYTHON=python3.12"
        )
    kinds = [*MODULES, *WITHOUT_CONFIG]
    if len(names) != 1 or names[0] not in kinds:
        raise SetupError(f"{names} is no kind of set-up; fix: use one of {', '.join(kinds)}")
    if names[0] == "main" and not (ROOT / ".config").exists():
        raise SetupError("there is no .config; fix: make defconfig-gpt2-ra-ablation (make help lists others)")
    kind = WITHOUT_CONFIG.get(names[0], names[0])
    check_as_it_is(kind) if "--as-it-is" in arguments else install(kind)


def main(arguments: list[str]) -> int:
    try:
        prepare(arguments)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the next make continues the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
