"""Read the settings of the learned attentions from .config. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.dotconfig import Symbols

MIXES = {"ALTERNATION_MIX_OUTPUT": "output", "ALTERNATION_MIX_SCORE": "score", "ALTERNATION_MIX_HARD": "hard"}


@dataclass(frozen=True)
class AlternationSettings:
    """Settings of RALEARN.

    mix: the mixed quantity ("output", "score", "hard"). initial_probability: share of the reciprocal path, in (0, 1).
    learning_rate_multiplier: of the logits, relative to the rest of the model. recompute: recompute the attention
    calls in backward instead of storing their outputs. gate_every: steps between two gradients of the hard gate.
    """

    mix: str
    initial_probability: float
    learning_rate_multiplier: float
    recompute: bool = False
    gate_every: int = 1

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> AlternationSettings:
        """Read the symbols. ConfigError where a value is out of range."""
        mix = MIXES[symbols.choice(MIXES)]
        return cls(
            mix=mix,
            initial_probability=symbols.number("ALTERNATION_INIT", "(0, 1)"),
            learning_rate_multiplier=symbols.number("ALTERNATION_LR_MULTIPLIER", "(0, 100000]"),
            recompute=symbols.flag("ALTERNATION_RECOMPUTE"),
            gate_every=symbols.integer("ALTERNATION_GATE_EVERY") if mix == "hard" else 1,
        )
