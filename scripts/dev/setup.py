"""Create the virtual environment and install the packages that the next command needs.

    python3 -m scripts.dev.setup base            .venv with kconfiglib and msgspec, to configure
    python3 -m scripts.dev.setup core            what reads results, predicts and measures needs: torch
    python3 -m scripts.dev.setup main            the same with the extras of .config, to train
    python3 -m scripts.dev.setup exchange        what reads and writes models of transformers needs
    python3 -m scripts.dev.setup lm-eval         the same with lm-evaluation-harness
    python3 -m scripts.dev.setup dev             the same with the packages of `make check`
    PYTHON -m scripts.dev.setup --as-it-is KIND  install nothing; name the packages that this interpreter lacks

Standard library only: it runs before any package is installed. A stamp file makes a second call do nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from runtime.errors import UserError, run_command
from study.make_arguments import refuse_unknown_variables

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
KINDS = ("base", "core", "main", "exchange", "lm-eval", "dev")
MODULES = {"pillow": "PIL", "pytest-xdist": "xdist"}  # of the packages whose module has another name
EXTRAS = {  # lines of .config that need an extra
    "hub": r"CONFIG_DATASET_(FINEWEB_EDU|OPENWEBTEXT|TINYSTORIES|WIKITEXT103)=y|CONFIG_DATASET_FILES=.*parquet"
    r'|CONFIG_EVAL_SETS="(.*\bparquet|(.* )?wikitext-2[" ])',
    "rl": r"CONFIG_GRPO=y",
    "wandb": r"CONFIG_WANDB=y",
    "tensorboard": r"CONFIG_TENSORBOARD=y",
    "ray": r"CONFIG_EXECUTOR_RAY=y",
}
PLACES = {  # variables of pip: those of uv
    "PIP_NO_INDEX": "UV_NO_INDEX",
    "PIP_INDEX_URL": "UV_DEFAULT_INDEX",
    "PIP_EXTRA_INDEX_URL": "UV_INDEX",
    "PIP_FIND_LINKS": "UV_FIND_LINKS",
}
OLDEST = (3, 11)
TORCH_ON_CPU = "torch==2.13.0+cpu"  # the tested CPU build


def requirements_of(kind: str) -> list[str]:
    """Return the requirements of a kind, as pyproject.toml lists them."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    if kind == "base":
        lines = [*extras["trainer"], *project["dependencies"]]
        return [line for line in lines if package(line) in ("kconfiglib", "msgspec")]
    chosen = ["trainer"] + ([] if kind == "core" else configured_extras())
    chosen += [kind] if kind in ("exchange", "lm-eval", "dev") else []
    chosen_lines = (line for name in chosen for line in extras[name])
    return [*extras["torch"], *project["dependencies"], *chosen_lines]


def package(requirement: str) -> str:
    return re.split(r"[<>=]", requirement)[0]


def config_text() -> str:
    config = Path(".config")
    return config.read_text(errors="replace") if config.is_file() else ""


def configured_extras() -> list[str]:
    return [name for name, line in EXTRAS.items() if re.search(rf"^({line})", config_text(), re.MULTILINE)]


def configured_card() -> str:
    """Return "cuda" or "rocm" where .config trains on such a card, on this machine or on others; else ""."""
    from runtime.gpu_specs import TARGETS

    lines = config_text().splitlines() if sys.platform == "linux" else []
    elsewhere = "CONFIG_EXECUTOR_SLURM=y" in lines or "CONFIG_EXECUTOR_RAY=y" in lines
    for name, target in TARGETS.items():
        named = f"CONFIG_TARGET_{name.upper().replace('-', '_')}=y" in lines
        scaled = "CONFIG_TARGET_AUTO=y" in lines and f'CONFIG_DETECTED="{name}"' in lines
        if target.kind in ("cuda", "rocm") and (named or (elsewhere and scaled)):
            return target.kind
    return ""


def say(text: str) -> None:
    print(f"setup: {text}", flush=True)


def say_scale() -> None:
    """Print the scale of a CPU study before the installation starts."""
    lines = config_text().splitlines()
    if "CONFIG_SCALE_CPU=y" in lines and "CONFIG_GRPO=y" not in lines:
        why = "no GPU" if 'CONFIG_DETECTED="cpu"' in lines else "CPU chosen"
        print(f"{why}: .config is scaled to a CPU study", flush=True)


def python() -> str:
    return str(VENV / "bin" / "python")


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip in the virtual environment; return whether it succeeded. A failure prints its last lines.

    ConnectionError where the last retry reached no package index. No module is compiled, which takes half of the time:
    Python compiles those that are imported.
    """
    options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--retries=2"]
    command = [python(), "-m", "pip", "install", *options, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and "Retry(total=0" in done.stderr:
        raise ConnectionError
    if done.returncode and not quiet_failure:
        print("\n".join(done.stderr.strip().splitlines()[-8:]), file=sys.stderr)
    return done.returncode == 0


def uv(*arguments: str) -> bool:
    """Install by uv, at a fifth of pip's CPU time; return whether it succeeded. pip is the second try.

    uv reads no PIP_ variable: those that name where packages are become its own.
    """
    environment = os.environ | {
        theirs: ",".join(os.environ[name].split()) for name, theirs in PLACES.items() if os.environ.get(name)
    }
    command = [python(), "-m", "uv", "pip", "install", "--quiet", "--python", python(), *arguments]
    return subprocess.run(command, capture_output=True, env=environment).returncode == 0


def works(code: str) -> bool:
    """Return whether the environment's interpreter exists and runs `code`."""
    try:
        return subprocess.run([python(), "-c", code], capture_output=True).returncode == 0
    except OSError:  # no interpreter, a broken link, or a copy from another machine
        return False


def make_venv() -> None:
    if works(""):
        return
    if subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], capture_output=True).returncode:
        shutil.rmtree(VENV, ignore_errors=True)  # else the next call finds an interpreter without pip
        raise UserError(
            f"{sys.executable} could not create a virtual environment; fix: sudo apt install "
            f"python3.{sys.version_info[1]}-venv (Debian and Ubuntu), or free disk space, or name an interpreter that "
            "has torch: make PYTHON=python3"
        )


def torch_kind(card: str) -> str:
    """Return the kind of device that torch must drive: the card of .config, else what this machine has."""
    from runtime.detected_hardware import detect_hardware

    return card or (detect_hardware().kind if sys.platform == "linux" else "other")


def install_torch(torch: str, card: str) -> None:
    """Install the build of torch for the card of .config, else for this machine. A CPU build saves gigabytes.

    An existing torch is replaced only where it cannot drive the card of .config, or this machine's AMD GPU.
    """
    kind = torch_kind(card)
    library = "hip" if kind == "rocm" else "cuda" if card else ""
    fits = f"import torch; assert torch.version.{library}" if library else "import torch"
    if works(fits):
        return
    build, backend = {"cpu": ("CPU", "cpu"), "rocm": ("ROCm", "auto")}.get(kind, ("default", ""))
    again = ["--force-reinstall"] if card and works("import torch") else []
    verb = "replacing a torch that cannot use the card of .config" if again else "installing torch"
    say(f"{verb} ({build} build{'' if backend else '; on Linux with CUDA, some gigabytes'})")
    if not backend and pip(*again, torch) and (not card or works(fits)):
        return
    if kind == "cpu" and (uv(TORCH_ON_CPU) or pip(TORCH_ON_CPU, quiet_failure=True)):
        return
    if backend and uv("--torch-backend", backend, *again, torch) and works(fits):
        return
    by_hand = f"a build (for CUDA, some gigabytes): {python()} -m pip install --force-reinstall '{torch}'"
    if kind == "rocm":
        by_hand = f"torch's ROCm build with {python()} -m pip, or run `make setup-main` where the card is"
    raise UserError(
        f"no {build} build of torch could be installed; fix: the same command (it tries again), or install {by_hand}, "
        "or name an interpreter that has torch: make PYTHON=python3"
    )


def install(kind: str) -> None:
    """Install the requirements of a kind where its stamp is missing."""
    lines = requirements_of(kind)
    card = configured_card() if kind == "main" else ""  # other commands need no card
    stamp = VENV / f".installed-{card}{hashlib.sha256(repr(lines).encode()).hexdigest()[:16]}"
    if stamp.exists() and (VENV / "bin" / "python").exists():
        return
    if kind == "main":
        say_scale()
    make_venv()
    others = [line for line in lines if package(line) != "torch"]
    if kind != "base":  # kconfiglib and msgspec take seconds
        with contextlib.suppress(ConnectionError):  # pip may find the packages in a folder
            pip("uv", quiet_failure=True)
        (torch,) = [line for line in lines if package(line) == "torch"]
        install_torch(torch, card)
        say("installing " + ", ".join(map(package, others)))
    if not ((kind != "base" and uv(*others)) or pip(*others)):
        raise UserError(
            "some packages could not be installed; pip's last lines are above; fix: the same command (it tries again)"
        )
    stamp.touch()


def wheels(kind: str) -> str:
    """Return the packages for `pip download` of a kind; those of a study for the kind that only writes .config."""
    lines = requirements_of("main" if kind == "base" else kind)
    if torch_kind(configured_card()) == "cpu":
        lines.append(TORCH_ON_CPU)
    return " ".join(f"'{line}'" for line in lines)


def check_as_it_is(kind: str) -> None:
    """Raise UserError with the modules that this interpreter lacks for a kind, broken ones with the reason."""
    missing, needed = [], []
    for requirement in dict.fromkeys(requirements_of(kind)):
        module = MODULES.get(package(requirement), package(requirement))
        try:
            importlib.import_module(module)
        except Exception as error:  # a broken library may raise anything
            absent = isinstance(error, ModuleNotFoundError) and error.name == module
            reason = " ".join(str(error).split())[:100]
            missing.append(module if absent else f"{module} ({type(error).__name__}: {reason})")
            needed.append(f"'{requirement}'")
    if missing:
        packages = " ".join(needed)
        raise UserError(
            f"{sys.executable} has no {', '.join(missing)}; fix: {sys.executable} -m pip install {packages} (without "
            f"internet: on another machine python3 -m pip download {packages}, carry the .whl files here, and install "
            "with --no-index --find-links=FOLDER), or run make without PYTHON=, which creates .venv"
        )


def main(arguments: list[str]) -> None:
    """Install the packages of the kind in `arguments`, or with --as-it-is check them."""
    names = [argument for argument in arguments if argument != "--as-it-is"]
    if sys.version_info < OLDEST:
        raise UserError(
            f"Python {sys.version.split()[0]} is too old: {'.'.join(map(str, OLDEST))} or newer is needed; fix: "
            "install one as python3, or name one that has torch: make PYTHON=python3.12"
        )
    if len(names) != 1 or names[0] not in KINDS:
        raise UserError(f"{names} is not a kind of set-up; fix: use one of {', '.join(KINDS)}")
    if names[0] != "base":  # then scripts.kconfig checks them, with the symbols
        refuse_unknown_variables()
    goals = {*os.environ.get("MAKE_GOALS", "").split()}
    if (names[0] == "main" or goals & {"admit", "plan"}) and not Path(".config").exists():
        raise UserError("there is no .config; fix: make defconfig-gpt2-ra-ablation (make help lists others)")
    try:
        (check_as_it_is if "--as-it-is" in arguments else install)(names[0])
    except ConnectionError:
        raise UserError(
            "no network: pip reaches no package index; fix: where there is one, with this system and Python "
            f"3.{sys.version_info[1]}, run `python3 -m pip download -d wheels {wheels(names[0])}` (a +cpu build needs "
            "the index that pytorch.org names), carry the folder wheels here, and put PIP_NO_INDEX=1 "
            "PIP_FIND_LINKS=wheels before the same command"
        ) from None


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
