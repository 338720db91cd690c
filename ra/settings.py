"""What .config says about the learned attentions. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config.dotconfig import Symbols

MIXES = {"ALTERNATION_MIX_OUTPUT": "output", "ALTERNATION_MIX_SCORE": "score", "ALTERNATION_MIX_HARD": "hard"}


@dataclass(frozen=True)
class AlternationSettings:
    """mix: what is mixed ("output", "score", "hard"); initial_probability in (0, 1) of the reciprocal path;

    learning_rate_multiplier: of the logits, relative to the rest of the model. recompute: make the attention calls
    again in backward instead of keeping their outputs. gate_every: steps from one gradient of the hard gate to the
    next.
    """

    mix: str
    initial_probability: float
    learning_rate_multiplier: float
    recompute: bool = False
    gate_every: int = 1

    @classmethod
    def from_symbols(cls, symbols: Symbols) -> AlternationSettings:
        """ConfigError where a value is out of range."""
        mix = MIXES[symbols.choice(MIXES)]
        return cls(
            mix=mix,
            initial_probability=symbols.number(
                "ALTERNATION_INIT", low=0, high=1, open_low=True, open_high=True
            ),
            learning_rate_multiplier=symbols.number(
                "ALTERNATION_LR_MULTIPLIER", low=0, high=100000, open_low=True
            ),
            recompute=symbols.flag("ALTERNATION_RECOMPUTE"),
            gate_every=symbols.integer("ALTERNATION_GATE_EVERY") if mix == "hard" else 1,
        )
