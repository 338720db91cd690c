"""Test the Kconfig tree and the defconfigs: every input that kconfiglib ignores is an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.dotconfig import ConfigError, read_symbols
from runtime.settings import load_config
from study import kconfig_commands as commands
from study import kconfig_rules as rules
from study.step_timing import SETTLED
from tests.kconfig_commands import BASES, FRAGMENTS, STUDY, defconfig, own_defconfigs, refusal, run

pytestmark = pytest.mark.usefixtures("elsewhere")


# ---- the tree itself


def test_every_user_symbol_has_help_text_and_a_default():
    tree = rules.load_kconfig("cpu")
    for symbol in tree.unique_defined_syms:
        assert any(node.help and len(node.help) > 20 for node in symbol.nodes), symbol.name
        assert symbol.choice or symbol.defaults, symbol.name
        if symbol.orig_type == tree.syms["SEEDS"].orig_type:
            assert symbol.ranges, f"{symbol.name} is an int without a range"


def test_the_kconfig_tree_loads_without_warnings(monkeypatch):
    import kconfiglib

    with rules.kconfig_environment("cpu"):
        os.environ["KCONFIG_WARN_UNDEF"] = "y"
        tree = kconfiglib.Kconfig("Kconfig", warn_to_stderr=False)
    assert tree.warnings == []


def test_environment_variables_of_the_kernel_build_have_no_effect(monkeypatch):
    for name, value in {
        "srctree": "/nowhere",
        "CONFIG_": "BR2_",
        "KCONFIG_CONFIG": "/nowhere/.config",
    }.items():
        monkeypatch.setenv(name, value)
    assert "CONFIG_SEEDS=5" in defconfig()
    assert os.environ["CONFIG_"] == "BR2_"


# ---- defconfigs and fragments


@pytest.mark.parametrize("detected", ["cpu", "a100-40g"])
@pytest.mark.parametrize("base", BASES)
def test_every_defconfig_and_fragment_survives_savedefconfig(base, detected, tmp_path, monkeypatch):
    monkeypatch.setenv("RA_DETECTED", detected)
    original = commands.DEFCONFIGS
    # a fragment other than cpu names its target, so the detected one gives no default
    fragments = FRAGMENTS if detected == "cpu" else ["cpu"]
    for index, spec in enumerate([base, *(f"{base}+{fragment}" for fragment in fragments)]):
        monkeypatch.setattr(commands, "DEFCONFIGS", original)
        text = defconfig(spec=spec)
        assert f'CONFIG_DETECTED="{detected}"' in text
        commands.check()
        run("savedefconfig", "saved")
        own_defconfigs(monkeypatch, tmp_path / str(index), saved=Path("saved").read_text())
        Path(".config").unlink()
        assert defconfig(spec="saved") == text, spec


@pytest.mark.parametrize(
    ("detected", "spec", "cpu"),
    [
        ("cpu", STUDY, True),
        ("a100-40g", STUDY, False),
        ("generic-cuda", STUDY, False),
        ("cpu", f"{STUDY}+a100-40g", False),
        ("a100-40g", f"{STUDY}+cpu", True),
        ("cpu", f"{STUDY}+cpu", True),
        ("cpu", f"{STUDY}+910c", False),
    ],
)
def test_the_scale_follows_the_configured_or_the_detected_target(detected, spec, cpu, monkeypatch):
    monkeypatch.setenv("RA_DETECTED", detected)
    defconfig(spec=spec)
    config = load_config(".config")
    assert config.target.scale_cpu is cpu
    assert config.target.detected == detected
    assert config.model.size == ("mini" if cpu else "124m")
    assert config.data.dataset == ("embedded" if cpu else "fineweb-edu")
    assert config.batch.effective == (4 if cpu else 512)
    assert config.target.compile is not (cpu or "910" in spec)


def test_the_effective_batch_is_the_same_on_every_gpu_target():
    batches = set()
    for fragment in set(FRAGMENTS) - {"cpu"}:
        defconfig(spec=f"{STUDY}+{fragment}")
        config = load_config(".config")
        batches.add((config.batch.effective, config.model.block_size, config.data.max_tokens))
        assert config.target.name == fragment
    assert len(batches) == 1
    assert {batch[:2] for batch in batches} == {(512, 1024)}


def test_a_study_on_a_cpu_has_a_count_and_no_limit_of_time_unless_it_is_set():
    """A time limit gives another number of updates on every machine and under every load.

    The estimate at equal time needs an evaluation late in training.
    """
    for tokenizer, count in (("BYTES", 800), ("GPT2", 100)):
        defconfig(f"CONFIG_TOKENIZER_{tokenizer}=y")
        config = load_config(".config")
        budget = config.budget
        assert (budget.max_time_seconds, budget.max_tokens, budget.max_iterations) == (0, 0, count)
        tokens, interval = (
            count * config.batch.effective * config.model.block_size,
            config.evaluation.interval_tokens,
        )
        assert any(0.5 <= point / tokens <= SETTLED for point in range(interval, tokens, interval))
    for limit in ("CONFIG_GPT2_MAX_TIME=7", "CONFIG_GPT2_MAX_TOKENS=10000000"):
        defconfig(limit)
        assert load_config(".config").budget.max_iterations == 0


def test_a_config_from_an_a100_is_valid_on_a_laptop(monkeypatch):
    monkeypatch.setenv("RA_DETECTED", "a100-40g")
    text = defconfig()
    monkeypatch.setenv("RA_DETECTED", "cpu")
    assert commands.check().model.size == "124m"
    run("olddefconfig")
    assert Path(".config").read_text() == text


def test_two_fragments_of_one_choice_are_refused_with_both_names():
    message = refusal("defconfig", f"{STUDY}+w7900+cpu")
    assert "defconfigs/target/cpu:2: CONFIG_TARGET_CPU=y" in message
    assert "CONFIG_TARGET_W7900=y (defconfigs/target/w7900:2)" in message
    message = refusal("defconfig", f"{STUDY}+w7900", "CONFIG_TARGET_CPU=y")
    assert "command line: CONFIG_TARGET_CPU=y" in message
    assert "defconfigs/target/w7900:2" in message


def test_a_fragment_overrides_the_defconfig_and_the_command_line_overrides_both(tmp_path, monkeypatch):
    own_defconfigs(
        monkeypatch,
        tmp_path / "d",
        mine="CONFIG_TARGET_H100=y\nCONFIG_SEEDS=1\nCONFIG_EFFECTIVE_BATCH=64\n",
        target__w7900="CONFIG_TARGET_W7900=y\nCONFIG_SEEDS=2\n",
        target__more="CONFIG_EFFECTIVE_BATCH=128\n",
    )
    defconfig("CONFIG_SEEDS=7", spec="mine+w7900+more")
    symbols = read_symbols(".config")
    assert symbols.flag("TARGET_W7900")
    assert not symbols.flag("TARGET_H100")
    assert (symbols.integer("SEEDS"), symbols.integer("EFFECTIVE_BATCH")) == (7, 128)


def test_a_cpu_study_defaults_to_bytes_and_a_gpu_study_to_gpt2s_tokens(monkeypatch):
    defconfig()
    small = load_config(".config")
    assert (small.data.tokenizer, small.model.vocabulary, small.evaluation.hellaswag) == ("bytes", 257, False)
    defconfig("CONFIG_TOKENIZER_GPT2=y")
    tokens = load_config(".config")
    assert (tokens.data.tokenizer, tokens.optimizer.learning_rate, tokens.evaluation.hellaswag) == (
        "gpt2",
        1e-3,
        True,
    )
    monkeypatch.setenv("RA_DETECTED", "h100")
    defconfig()
    large = load_config(".config")
    assert (large.data.tokenizer, large.model.vocabulary, large.evaluation.hellaswag) == ("gpt2", 50257, True)


def test_overriding_a_symbol_resets_its_dependants():
    defconfig("CONFIG_HELLASWAG=n", spec=f"{STUDY}-smoke")
    assert "HELLASWAG_LIMIT" not in read_symbols(".config")
    defconfig("CONFIG_DATASET_FILES=books/*.txt more/**/*.md", spec=f"{STUDY}-smoke")
    config = load_config(".config")
    assert (config.data.dataset, config.data.files) == ("files", ("books/*.txt", "more/**/*.md"))
    defconfig("CONFIG_DATASET_FILES='my books/*.txt' o'neill.md", spec=f"{STUDY}-smoke")
    assert load_config(".config").data.files == ("'my", "books/*.txt'", "o'neill.md")  # a quote is open
    defconfig("CONFIG_DATASET_FILES='my books/*.txt' b.md", spec=f"{STUDY}-smoke")
    assert load_config(".config").data.files == ("my books/*.txt", "b.md")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("gpt2-ra-ablatoin", "did you mean gpt2-ra-ablation?"),
        (f"{STUDY}+w790", "did you mean w7900?"),
        (f"{STUDY}+a100", "did you mean a100-40g or a100-80g?"),
        ("w7900", "is a fragment"),
        (f"{STUDY}+{STUDY}-smoke", "is a whole defconfig"),
        (f"{STUDY}+cpu+cpu", "named twice"),
        ("../../etc/passwd", 'there is no defconfig "../../etc/passwd"'),
        ("target/cpu", "there is no defconfig"),
        ("", "there is no defconfig"),
        (f"{STUDY}+", "there is no fragment"),
    ],
)
def test_an_unknown_name_is_refused_with_the_existing_ones(spec, says):
    assert says in refusal("defconfig", spec)


# ---- errors that the library accepts silently

SILENT = [
    ("CONFIG_SEDS=5", "CONFIG_SEDS=5", "CONFIG_SEEDS"),
    ("CONFIG_SEEDS=0", "CONFIG_SEEDS=0", "1 to 1000"),
    ("CONFIG_SEEDS=1001", "CONFIG_SEEDS=1001", "1 to 1000"),
    ("CONFIG_SEEDS=-3", "CONFIG_SEEDS=-3", "1 to 1000"),
    ("CONFIG_SEEDS=0x3", "CONFIG_SEEDS=0x3", "whole number"),
    ("CONFIG_SEEDS=three", "CONFIG_SEEDS=three", "whole number"),
    ('CONFIG_SEEDS="3"', 'CONFIG_SEEDS="3"', "whole number"),
    ("CONFIG_WANDB=yes", "CONFIG_WANDB=yes", "y nor n"),
    ("CONFIG_WANDB=m", "CONFIG_WANDB=m", "y nor n"),
    ('CONFIG_WANDB_MODE="online"', 'CONFIG_WANDB_MODE="online"', "needs CONFIG_WANDB"),
    ("CONFIG_DATASET_LOCAL=y", "CONFIG_DATASET_LOCAL=y", 'needs CONFIG_DATASET_FILES != ""'),
    ("CONFIG_TARGET_AUTO=n", "CONFIG_TARGET_AUTO=n", "CONFIG_TARGET_W7900=y"),
    ('CONFIG_DETECTED="h100"', 'CONFIG_DETECTED="h100"', "cannot be set"),
    ("CONFIG_SCALE_CPU=y", "CONFIG_SCALE_CPU=y", "cannot be set"),
    ('CONFIG_LEARNING_RATE="fast"', 'CONFIG_LEARNING_RATE="fast"', "not a number"),
    ('CONFIG_LEARNING_RATE="0"', 'CONFIG_LEARNING_RATE="0"', "(0, 1]"),
    ('CONFIG_LEARNING_RATE="nan"', 'CONFIG_LEARNING_RATE="nan"', "not a number"),
    ('CONFIG_ALTERNATION_INIT="1"', 'CONFIG_ALTERNATION_INIT="1"', "(0, 1)"),
    ("CONFIG_MICRO_BATCH=5", "CONFIG_MICRO_BATCH=5", "fix: use 1, 2, 4"),
    ('CONFIG_VARIANTS="B RALERN"', 'CONFIG_VARIANTS="B RALERN"', "RALEARN"),
    ('CONFIG_VARIANTS="B RA:3-12"', 'CONFIG_VARIANTS="B RA:3-12"', "layers 0 to 3"),
    ('CONFIG_VARIANTS=""', 'CONFIG_VARIANTS=""', "no variant"),
    ('CONFIG_STUDY_NAME="../up"', 'CONFIG_STUDY_NAME="../up"', "safe folder name"),
    ('CONFIG_RESULTS_DIR=" "', 'CONFIG_RESULTS_DIR=" "', "no folder"),
    ("CONFIG_EVAL_TOKENS=100", "CONFIG_EVAL_TOKENS=100", "CONFIG_GPT2_BLOCK_SIZE=128"),
]


@pytest.mark.parametrize(("line", "assignment", "right"), SILENT)
def test_an_invalid_line_of_a_defconfig_is_named_with_file_line_symbol_value_and_fix(
    line, assignment, right, tmp_path, monkeypatch
):
    defconfig()
    own_defconfigs(monkeypatch, tmp_path.parent / f"{tmp_path.name}-d", mine=f"# first\n\n{line}\n")
    message = refusal("defconfig", "mine")
    assert message.startswith(f"{tmp_path.parent}/{tmp_path.name}-d/mine:3: {assignment} ")
    assert right in message


@pytest.mark.parametrize(("line", "assignment", "right"), SILENT)
def test_command_line_assignments_have_the_same_checks(line, assignment, right):
    defconfig()
    message = refusal("defconfig", STUDY, line)
    assert message.startswith(f"command line: {assignment} ")
    assert right in message


@pytest.mark.parametrize(
    "line",
    [
        "CONFIG_SEEDS = 3",
        " CONFIG_SEEDS=3",
        "SEEDS=3",
        "CONFIG_SEEDS",
        "CONFIG_SEEDS=3 # three",
        "# CONFIG_WANDB is not set at all",
        "#CONFIG_WANDB is not set",
        'CONFIG_STUDY_NAME="unfinished',
        'CONFIG_STUDY_NAME="a" "b"',
        'CONFIG_STUDY_NAME="a\\n"',
        "CONFIG_STUDY_NAME=unquoted",
        "CONFIG_SEEDS=",
        "\ufeffCONFIG_SEEDS=3",
    ],
)
def test_a_malformed_line_is_named(line, tmp_path, monkeypatch):
    defconfig()
    own_defconfigs(
        monkeypatch, tmp_path.parent / f"{tmp_path.name}-d", mine=f"CONFIG_TENSORBOARD=y\n{line}\n"
    )
    message = refusal("defconfig", "mine")
    assert "mine:2: " in message
    assert line.strip() in message
    assert "fix:" in message


def test_an_overridden_choice_member_is_refused(tmp_path, monkeypatch):
    text = "CONFIG_TARGET_H100=y\n\nCONFIG_TARGET_H200=y\n"
    own_defconfigs(monkeypatch, tmp_path / "d", mine=text)
    message = refusal_without_folder("mine")
    assert "mine:3: CONFIG_TARGET_H200=y excludes CONFIG_TARGET_H100=y (" in message
    assert "mine:1" in message


def refusal_without_folder(spec: str) -> str:
    with pytest.raises(ConfigError) as caught:
        run("defconfig", spec)
    assert not Path(".config").exists()
    return str(caught.value)


def test_a_symbol_set_twice_in_one_file_is_refused(tmp_path, monkeypatch):
    own_defconfigs(monkeypatch, tmp_path / "d", mine="CONFIG_SEEDS=3\nCONFIG_SEEDS=4\n")
    message = refusal_without_folder("mine")
    assert "mine:2: CONFIG_SEEDS=4 is already set, as CONFIG_SEEDS=3" in message


def test_a_failed_write_leaves_the_config_unchanged_and_no_temporary_file(monkeypatch):
    text = defconfig()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run("defconfig", STUDY, "CONFIG_SEEDS=7")
    assert [path.name for path in Path().iterdir()] == [".config"]
    assert Path(".config").read_text() == text


def test_the_previous_config_is_saved_valid_or_not(capsys):
    first = defconfig()
    second = defconfig("CONFIG_SEEDS=7")
    assert Path(".config.old").read_text() == first
    assert defconfig("CONFIG_SEEDS=7") == second
    assert Path(".config.old").read_text() == first
    for broken in (b"CONFIG_SEDS=4\n", b"\xff\xfe hours of editing"):
        Path(".config").write_bytes(broken)
        assert defconfig() == first
        assert Path(".config.old").read_bytes() == broken
        assert "the previous one is .config.old" in capsys.readouterr().out
