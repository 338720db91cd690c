"""Parse the name of an arm: an attention with modifiers, such as B+NORM=rms+LR=1e-3. Needs no torch.

    arm      = attention { "+" modifier }
    modifier = NORM=<part> | MLP=<part> | POSITION=<part>           a file of ra/published or ra/custom
             | WIDTH=match[:<attention>] | WIDTH=flops[:<attention>]   the width of equal parameters, or of equal FLOPs
             | AQN=mild | AQN=qerl | AQN=strong | AQN=<start>:<end>   noise on the norms during training (aqn)
             | LR=<number> | WD=<number> | BETA2=<number> | WARMUP=<number>   of the optimizer

Each modifier appears once. Their order does not matter, and an arm keeps the spelling of its name.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ra.names import (
    LEARNED,
    PATTERNS,
    VariantError,
    custom_variants,
    definitions,
    files_with,
    is_fixed_pattern,
    published_variants,
    reciprocal_layers,
)
from ra.noise_schedule import NoiseError, NoiseSchedule, parse_noise
from runtime.dotconfig import number_in
from runtime.settings import OPTIMIZER_NUMBERS

PARTS = {"NORM": "norm", "MLP": "mlp", "POSITION": "position"}  # modifier -> function of the file
RECIPE = {  # modifier -> field of OptimizerConfig
    "LR": "learning_rate",
    "WD": "weight_decay",
    "BETA2": "beta2",
    "WARMUP": "warmup_fraction",
}
WIDTH, AQN = "WIDTH", "AQN"
COSTS = {"match": "parameters", "flops": "FLOPs per token"}  # value of WIDTH -> the cost that is matched
KEYS = (*PARTS, WIDTH, AQN, *RECIPE)
GRAMMAR = (
    "ATTENTION[+NORM=rms][+MLP=swiglu][+POSITION=rotary][+WIDTH=match:RALEARN][+AQN=mild][+LR=1e-3][+WD=0.1]"
)
EXAMPLES = {"LR": "LR=1e-3", "WD": "WD=0.1", "BETA2": "BETA2=0.99", "WARMUP": "WARMUP=0.1"}
BASELINE = "B"
ANY_LAYERS = 10_000  # more than any model has


@dataclass(frozen=True)
class Arm:
    """A parsed arm."""

    name: str
    attention: str
    modifiers: tuple[tuple[str, str], ...] = ()  # as typed
    parts: tuple[tuple[str, str], ...] = ()  # function of a file -> the file's variant
    match: tuple[str, str] | None = None  # the cost that is matched, and the attention that has it
    noise: NoiseSchedule | None = None  # on the norms
    recipe: tuple[tuple[str, float], ...] = ()  # field of OptimizerConfig -> value

    @property
    def rate(self) -> str:
        """The learning rate as typed; "" without one."""
        return dict(self.modifiers).get("LR", "")

    @property
    def without_rate(self) -> Arm:
        """The arm at the learning rate of its study."""
        return parse_arm(self._without("LR"))

    def with_rate(self, rate: str) -> Arm:
        """Return the arm at a learning rate; "": at that of its study."""
        return parse_arm(f"{self._without('LR')}+LR={rate}" if rate else self._without("LR"))

    @property
    def without_noise(self) -> Arm:
        """The arm without +AQN=."""
        return parse_arm(self._without(AQN))

    @property
    def function_class(self) -> tuple[object, ...]:
        """Equal for two arms that differ by W_Q and W_K renamed alone, such as B and RA:5-7."""
        attention = BASELINE if is_fixed_pattern(self.attention) else self.attention
        return attention, frozenset(self.parts), self.match, self.noise, frozenset(self.recipe)

    @property
    def control_class(self) -> tuple[object, ...]:
        """The function class of the arm's control arms: that of B at the arm's learning rate."""
        return parse_arm(BASELINE).with_rate(self.rate).function_class

    @property
    def is_control(self) -> bool:
        """Whether the arm is a control arm of the arms at its learning rate."""
        return self.function_class == self.control_class

    @property
    def meaning(self) -> tuple[object, ...]:
        """Equal for two arms that train the same model in the same way, such as RMS and B+NORM=rms."""
        defined = definitions(self.attention) & {"attention", "recipe", *PARTS.values()}
        attention = BASELINE if defined and "attention" not in defined else self.attention
        parts = dict.fromkeys(defined & set(PARTS.values()), self.attention) | dict(self.parts)
        recipe_of = self.attention if "recipe" in defined else ""
        return attention, frozenset(parts.items()), self.match, self.noise, frozenset(self.recipe), recipe_of

    @property
    def model_name(self) -> str:
        """The name without the settings of the optimizer: arms with one model have one examination."""
        return self._without(*RECIPE)

    @property
    def parts_name(self) -> str:
        """The name of the attention and the other parts alone, at any width."""
        return self._without(*RECIPE, WIDTH)

    @property
    def file_variants(self) -> tuple[str, ...]:
        """The variants whose files build this arm, or decide its width."""
        attentions = (self.attention, *(self.match[1:] if self.match else ()))
        files = [name for name in attentions if name != LEARNED and not is_fixed_pattern(name)]
        return tuple(dict.fromkeys((*files, *(file for _, file in self.parts))))

    def _without(self, *keys: str) -> str:
        kept = (f"{key}={value}" for key, value in self.modifiers if key not in keys)
        return "+".join((self.attention, *kept))


@functools.cache
def parse_arm(name: str) -> Arm:
    """Parse the name of an arm, whose files may be gone. VariantError for a malformed modifier, or one given twice."""
    attention, *modifiers = name.split("+")
    typed: dict[str, str] = {}
    parts: dict[str, str] = {}
    recipe: dict[str, float] = {}
    match: tuple[str, str] | None = None
    noise: NoiseSchedule | None = None
    for modifier in modifiers:
        key, separator, value = modifier.partition("=")
        if not separator or key not in KEYS:
            near = difflib.get_close_matches(key.upper(), KEYS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}=...? " if near else ""
            raise VariantError(f"{name}: +{modifier} is not a modifier; {hint}fix: {GRAMMAR}")
        if key in typed:
            raise VariantError(f"{name}: {key} is given twice; fix: give each modifier once")
        typed[key] = value
        if key in PARTS:
            parts[PARTS[key]] = value.upper()
        elif key == WIDTH:
            match = _match(name, value)
        elif key == AQN:
            noise = _noise(name, value)
        else:
            recipe[RECIPE[key]] = _number(name, key, value)
    if match and match[1] == attention and not parts:
        raise VariantError(f"{name}: WIDTH= matches {attention} to itself; fix: WIDTH={match[0]}:ANOTHER")
    return Arm(
        name, attention, tuple(typed.items()), tuple(parts.items()), match, noise, tuple(recipe.items())
    )


def known_arm(name: str, layers: int = ANY_LAYERS) -> Arm:
    """Parse the name of an arm that can be trained. VariantError for an unknown attention or part, too.

    layers: of the model, to check that it has the layers of RA:...
    """
    arm = parse_arm(name)
    reciprocal_layers(arm.attention, layers)
    for key, value in arm.modifiers:
        if key in PARTS:
            _refuse_unknown_part(name, key, value)
    if arm.match:
        reciprocal_layers(arm.match[1], layers)
    return arm


def overview() -> tuple[str, str]:
    """List the attentions and the grammar of arms, in one line each."""
    return f"Attentions: {' '.join([*PATTERNS, *files_with('attention')])}", f"Arms: {GRAMMAR}"


def control_arms(names: Iterable[str]) -> list[str]:
    """Return the control arms among these names, at any learning rate."""
    return [name for name in names if parse_arm(name).is_control]


def controls_of(name: str, names: Iterable[str]) -> list[str]:
    """Return the control arms of the arm `name` among these names."""
    wanted = parse_arm(name).control_class
    return [other for other in names if parse_arm(other).function_class == wanted]


def control_groups(names: Sequence[str]) -> list[list[str]]:
    """Return the control arms among these names, those at one learning rate together."""
    return [
        list(group) for group in dict.fromkeys(tuple(controls_of(one, names)) for one in control_arms(names))
    ]


def refuse_equal_arms(names: Sequence[str], layers: int = ANY_LAYERS) -> None:
    """VariantError for two names of one arm."""
    seen: dict[tuple[object, ...], str] = {}
    for name in names:
        meaning = known_arm(name, layers).meaning
        if meaning in seen:
            twice = (
                f"{name} is named twice"
                if seen[meaning] == name
                else f"{seen[meaning]} and {name} are one arm"
            )
            raise VariantError(f"{twice}; fix: remove one")
        seen[meaning] = name


def _refuse_unknown_part(name: str, key: str, value: str) -> None:
    known = [*published_variants(), *custom_variants()]
    if value.upper() not in known or value != value.lower():
        raise VariantError(
            f"{name}: there is no part {value or '(empty)'}; fix: {key}= takes a file of ra/published or ra/custom "
            f"with a function {PARTS[key]}, such as {key}={next(iter(files_with(PARTS[key])), 'mine').lower()}"
        )


def _match(name: str, value: str) -> tuple[str, str]:
    cost, separator, other = value.partition(":")
    if cost not in COSTS or (separator and not other):
        raise VariantError(
            f"{name}: WIDTH={value} is malformed; fix: WIDTH=match or WIDTH=flops, with the attention that has the "
            f"cost, such as WIDTH=match:RALEARN (without one: {BASELINE})"
        )
    return cost, other or BASELINE


def _noise(name: str, value: str) -> NoiseSchedule:
    try:
        return parse_noise(value)
    except NoiseError as error:
        raise VariantError(f"{name}: {error}") from None


def _number(name: str, key: str, value: str) -> float:
    _, interval = OPTIMIZER_NUMBERS[RECIPE[key]]
    number = number_in(interval, value)
    if number is None:
        raise VariantError(
            f"{name}: {key}={value} is not a number in {interval}; fix: such as {EXAMPLES[key]}"
        )
    return number
