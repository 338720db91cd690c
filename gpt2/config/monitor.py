"""The settings of the monitor: CONFIG_MONITOR and its symbols."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config.dotconfig import Symbols, split_words
from referee.errors import NumericsError
from referee.numerics.monitor.targets import parse_targets, parse_triggers


@dataclass(frozen=True)
class MonitorSettings:
    """The monitoring of a run. No fingerprint contains it: no number of a run depends on it.

    targets: see referee.numerics.monitor.targets, every `interval` steps. triggers: see
    referee.numerics.monitor.monitor_settings; one of them turns everything on for `full_steps` steps.
    """

    enabled: bool = False
    interval: int = 10
    targets: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()
    full_steps: int = 20

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> MonitorSettings:
        if not symbols.flag("MONITOR"):
            return cls()
        words = {name: split_words(symbols.text(f"MONITOR_{name}")) for name in ("TARGETS", "TRIGGERS")}
        for name, parse in (("TARGETS", parse_targets), ("TRIGGERS", parse_triggers)):
            try:
                parse(words[name])
            except NumericsError as error:
                raise symbols.error(f"MONITOR_{name}", f"cannot be used: {error}") from error
        return cls(
            enabled=True,
            interval=symbols.integer("MONITOR_INTERVAL"),
            targets=words["TARGETS"],
            triggers=words["TRIGGERS"],
            full_steps=symbols.integer("MONITOR_FULL_STEPS"),
        )


NOT_MONITORED = MonitorSettings()
