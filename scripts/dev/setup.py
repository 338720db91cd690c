"""Set up what is missing: the virtual environment and the packages that the next command needs.

    python3 -m scripts.dev.setup base            .venv with kconfiglib: enough to configure
    python3 -m scripts.dev.setup main            what .config needs to train (torch, and the extras that it asks for)
    python3 -m scripts.dev.setup tools           the same for a command that can do without a .config
    python3 -m scripts.dev.setup core            the same without the extras of .config
    python3 -m scripts.dev.setup dev             what `make check` needs besides
    PYTHON -m scripts.dev.setup --as-it-is WHAT  install nothing; say what this interpreter lacks

Standard library only: it runs before anything is installed. A second call finds its stamp and does nothing.
"""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
MODULES = {  # the module by which an installed requirement shows
    "base": ["kconfiglib"],
    "core": ["kconfiglib", "torch", "numpy", "scipy", "tiktoken", "rich"],
    "main": ["kconfiglib", "torch", "numpy", "scipy", "tiktoken", "rich"],
    "dev": [
        "pytest",
        "xdist",
        "hypothesis",
        "ruff",
        "mypy",
        "jsonschema",
        "PIL",
        "transformers",
        "pyarrow",
    ],
}
NO_EXTRAS = ("base", "core")
WITHOUT_CONFIG = {"tools": "main"}  # kinds that are another one, .config or not
EXTRA_MODULES = {"hub": ["datasets", "pyarrow"], "wandb": ["wandb"], "trackio": ["trackio"]}
EXTRAS = {  # lines of .config that need an extra
    "hub": r"CONFIG_DATASET_(FINEWEB_EDU|OPENWEBTEXT|TINYSTORIES|WIKITEXT103)=y|CONFIG_DATASET_FILES=.*parquet",
    "wandb": r"CONFIG_WANDB=y",
    "trackio": r"CONFIG_TRACKIO=y",
}
OLDEST = (3, 11)
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
    for extra in [*([] if what in NO_EXTRAS else configured_extras()), *(["dev"] if what == "dev" else [])]:
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
    lines = config.read_text(errors="replace").splitlines() if config.exists() else []
    if "CONFIG_SCALE_CPU=y" in lines:
        why = "no GPU" if 'CONFIG_DETECTED="cpu"' in lines else "CPU chosen"
        print(f"{why}: .config is scaled to a CPU study", flush=True)


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip in the virtual environment; True when it succeeded. Its last lines are shown when it did not."""
    command = [python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not quiet_failure:
        print("\n".join(done.stderr.strip().splitlines()[-8:]), file=sys.stderr)
    return done.returncode == 0


def works(code: str) -> bool:
    """Whether the environment's interpreter is there and runs `code`."""
    try:
        return subprocess.run([python(), "-c", code], capture_output=True).returncode == 0
    except OSError:  # none, a link into the void, another machine's
        return False


def make_venv() -> None:
    if works(""):
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
    if works("import torch"):
        return
    from gpt2.hardware.detect import detect_hardware

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
    stamp = VENV / f".{'main' if what == 'core' else what}-{digest}"
    if stamp.exists() and (VENV / "bin" / "python").exists():
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


def lacking(modules: list[str]) -> list[str]:
    """Those that cannot be imported; a broken one with its reason."""
    found = []
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library that does not load raises whatever it likes
            absent = isinstance(error, ModuleNotFoundError) and error.name == name
            reason = " ".join(str(error).split())[:100]
            found.append(name if absent else f"{name} ({type(error).__name__}: {reason})")
    return found


def check_as_it_is(what: str) -> None:
    """Say which modules this interpreter lacks for `what`."""
    modules = MODULES["main"] + MODULES["dev"] if what == "dev" else list(MODULES[what])
    if what not in NO_EXTRAS:
        modules += [name for extra in configured_extras() for name in EXTRA_MODULES[extra]]
    missing = lacking(list(dict.fromkeys(modules)))
    if missing:
        raise SetupError(
            f"{sys.executable} has no {', '.join(missing)}; install them there, or leave PYTHON= out and make sets up "
            "an environment of its own"
        )


def prepare(arguments: list[str]) -> None:
    """Install, or with --as-it-is check, what the one other argument names."""
    names = [argument for argument in arguments if argument != "--as-it-is"]
    if sys.version_info < OLDEST:
        raise SetupError(
            f"Python {sys.version.split()[0]} is too old: {'.'.join(map(str, OLDEST))} or newer is needed. Install "
            "one as python3, or name one that has torch: make PYTHON=python3.12"
        )
    kinds = [*MODULES, *WITHOUT_CONFIG]
    if len(names) != 1 or names[0] not in kinds:
        raise SetupError(f"{names} is not what can be set up; right: one of {', '.join(kinds)}")
    if names[0] == "main" and not (ROOT / ".config").exists():
        raise SetupError(
            "there is no .config; right: make defconfig-gpt2-ra-ablation (make help lists others)"
        )
    what = WITHOUT_CONFIG.get(names[0], names[0])
    check_as_it_is(what) if "--as-it-is" in arguments else install(what)


def main(arguments: list[str]) -> int:
    try:
        prepare(arguments)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the next make goes on with the set-up", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
