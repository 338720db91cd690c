"""The configuration of the study of each size: .config with that model and the name of the study. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config.config import CUSTOM_MODEL, MODELS, Config
from gpt2.config.dotconfig import SET, UNSET, ConfigError, Symbols, parse_lines, quote
from study.runner.settings import StudySettings, symbol_of


@dataclass(frozen=True)
class SizeStudy:
    """The study of one size. text: its .config."""

    size: str
    symbols: Symbols
    text: str
    config: Config
    settings: StudySettings


def size_studies(text: str, label: str, settings: StudySettings) -> list[SizeStudy]:
    """Return the study of each of CONFIG_SIZES, the smallest model first. ConfigError where a size cannot be run.

    text: of .config; label: its name in messages.
    """
    return [_study(text, label, settings, size) for size in settings.sizes]


def _study(text: str, label: str, settings: StudySettings, size: str) -> SizeStudy:
    configuration = size_text(text, f"{settings.name}-{size}", size)
    symbols = Symbols(label, parse_lines(configuration, label))
    try:
        return SizeStudy(
            size, symbols, configuration, Config.from_symbols(symbols), StudySettings.from_symbols(symbols)
        )
    except ConfigError as error:
        raise ConfigError(f"size {size} of CONFIG_SIZES: {error}") from None


def size_text(text: str, name: str, size: str) -> str:
    """Return the .config of one size: with its model, the study's name and no CONFIG_SIZES."""
    chosen = symbol_of(size)
    changed = {"STUDY_NAME": f"CONFIG_STUDY_NAME={quote(name)}", "SIZES": 'CONFIG_SIZES=""'}
    changed |= {
        symbol: f"CONFIG_{symbol}=y" if symbol == chosen else f"# CONFIG_{symbol} is not set"
        for symbol in (*MODELS, CUSTOM_MODEL)
    }

    def line(old: str) -> str:
        match = SET.fullmatch(old.rstrip()) or UNSET.fullmatch(old.rstrip())
        return changed.get(match[1], old) if match else old

    return "\n".join(map(line, text.split("\n")))
