"""CONFIG_SIZES: the configuration of each size, the order of the studies, bad input, and an interruption."""

from pathlib import Path

import pytest

from configuration.files import load_strictly
from gpt2.config.dotconfig import ConfigError, read_text
from gpt2.system.errors import UserError
from scripts import extend, study
from study.runner.preconditions import refuse_another_configuration
from study.sizes import run as sizes_run
from study.sizes.configuration import size_studies
from tests.kconfig_commands import defconfig
from tests.study.sample_records import a_study


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RA_DETECTED", "cpu")
    monkeypatch.delenv("MAKEFLAGS", raising=False)
    return tmp_path


def test_each_size_has_the_configuration_that_a_user_would_write_for_it() -> None:
    defconfig("CONFIG_STUDY_NAME=s", "CONFIG_SIZES=small tiny", "CONFIG_SEEDS=3")
    symbols, _, settings = study.load()
    assert settings.sizes == ("tiny", "small")
    assert symbols.text("SIZES") == "small tiny"
    found = size_studies(read_text(Path(".config")), ".config", settings)
    assert [(one.size, one.config.model.size, one.settings.name, one.settings.sizes) for one in found] == [
        ("tiny", "tiny", "s-tiny", ()), ("small", "small", "s-small", ()),
    ]  # fmt: skip
    for one in found:
        load_strictly(one.text, ".config")
    by_hand = defconfig("CONFIG_STUDY_NAME=s-small", "CONFIG_SEEDS=3", "CONFIG_GPT2_MODEL_SMALL=y")
    assert found[1].text == by_hand
    defconfig("CONFIG_STUDY_NAME=s", "CONFIG_SIZES=small tiny", "CONFIG_SEEDS=3", "CONFIG_GPT2_MODEL_TINY=y")
    assert size_studies(read_text(Path(".config")), ".config", settings)[1].text == by_hand


def test_a_study_of_an_older_version_without_the_symbol_continues(tmp_path: Path) -> None:
    text = defconfig()
    (tmp_path / "config").write_text(text.replace('CONFIG_SIZES=""\n', ""))
    assert "CONFIG_SIZES" not in (tmp_path / "config").read_text()
    refuse_another_configuration(tmp_path, text)


def configure_and_run(*assignments: str) -> None:
    defconfig(*assignments)
    study.main()


@pytest.mark.parametrize(
    ("assignments", "message"),
    [
        (("CONFIG_SIZES=tiny huge",), r"has huge, which is not a size; fix: use tiny, mini, small, 124m"),
        (("CONFIG_SIZES=tiny mini tiny",), "names tiny twice; fix: remove one"),
        (("CONFIG_SIZES=tiny TINY",), "names tiny twice; fix: remove one"),
        (("CONFIG_SIZES=mini",), "names one size; fix: .*CONFIG_GPT2_MODEL_MINI=y"),
        (("CONFIG_SIZES=tiny mini", f"CONFIG_STUDY_NAME={'n' * 62}"), "size tiny of CONFIG_SIZES: .*folder name; fix"),
        (("CONFIG_SIZES=tiny mini", "CONFIG_VARIANTS=B RA:3 RALEARN"), "size tiny of CONFIG_SIZES: .*fix"),
    ],
)  # fmt: skip
def test_bad_sizes_are_one_line_that_names_the_fix_before_anything_runs(
    assignments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["scripts.study"])
    with pytest.raises(ConfigError, match=message) as caught:
        configure_and_run(*assignments)
    assert "\n" not in str(caught.value)
    assert not Path("results").exists()


class OneStudy:
    """Stands for Study: writes the records of a finished study, or stops."""

    stops_at: str = ""
    fails_at: str = ""
    started: list[str]

    def __init__(self, symbols: object, text: str) -> None:
        self.name = next(line for line in text.split("\n") if "STUDY_NAME" in line).split('"')[1]

    def run(self) -> int:
        self.started.append(self.name)
        if self.name == self.stops_at:
            return 130
        folder = Path("results") / self.name
        if not folder.exists():
            a_study(folder, 3, -0.05, ("B", "RALEARN"), hellaswag=False)
        return 1 if self.name == self.fails_at else 0


@pytest.fixture
def one_study(monkeypatch: pytest.MonkeyPatch) -> type[OneStudy]:
    monkeypatch.setattr(OneStudy, "started", [], raising=False)
    monkeypatch.setattr(OneStudy, "stops_at", "")
    monkeypatch.setattr(OneStudy, "fails_at", "")
    monkeypatch.setattr(sizes_run, "Study", OneStudy)
    monkeypatch.setattr("sys.argv", ["scripts.study"])
    defconfig("CONFIG_STUDY_NAME=s", "CONFIG_SIZES=small mini tiny", "CONFIG_SEEDS=3")
    return OneStudy


def test_the_sizes_run_smallest_first_and_the_page_follows(
    one_study: type[OneStudy], capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main() == 0
    assert one_study.started == ["s-tiny", "s-mini", "s-small"]
    assert "size 1 of 3: s-tiny: " in capsys.readouterr().out
    assert Path("results/s/sizes.html").exists()


def test_an_interruption_ends_the_sizes_and_make_continues(one_study: type[OneStudy]) -> None:
    one_study.stops_at = "s-mini"
    assert study.main() == 130
    assert one_study.started == ["s-tiny", "s-mini"]
    assert "s-mini has no judged run yet" in Path("results/s/sizes.md").read_text()
    one_study.stops_at = ""
    assert study.main() == 0
    assert one_study.started[2:] == ["s-tiny", "s-mini", "s-small"]


def test_a_failed_size_does_not_keep_the_larger_ones_from_running(one_study: type[OneStudy]) -> None:
    one_study.fails_at = "s-tiny"
    assert study.main() == 1
    assert one_study.started == ["s-tiny", "s-mini", "s-small"]


def test_make_extend_refuses_several_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    defconfig("CONFIG_STUDY_NAME=s", "CONFIG_SIZES=tiny mini")
    monkeypatch.setattr("sys.argv", ["scripts.extend", "2"])
    with pytest.raises(UserError, match=r"fix: make defconfig-NAME with CONFIG_STUDY_NAME=s-tiny"):
        extend.main()
