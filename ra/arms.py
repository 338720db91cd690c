"""Parse the name of an arm: an attention with modifiers, such as B+NORM=rms+LR=1e-3. Needs no torch.

    arm      = attention { "+" modifier }
    modifier = NORM=<part> | MLP=<part> | POSITION=<part>           a file of ra/published or ra/custom
             | WIDTH=match[:<attention>] | WIDTH=flops[:<attention>]   the width of equal parameters, or of equal FLOPs
             | AQN=mild | AQN=qerl | AQN=strong | AQN=<start>:<end>   noise on the norms during training (aqn)
             | LR=<number> | WD=<number> | BETA2=<number> | WARMUP=<number>   of the optimizer

Each modifier appears once. Their order does not matter, and an arm keeps the spelling of its name.
"""

from __future__ import annotations

import ast
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ra.noise_schedule import NoiseError, NoiseSchedule, parse_noise
from runtime.dotconfig import number_in
from runtime.errors import UserError
from runtime.settings import RECIPE_INTERVALS

# Name the variants and their reciprocal layers. Needs no torch.
#
# A new arrangement of layers is a row of PATTERNS. A new attention is a file in ra/custom; its name is the variant's.
# ra/published has parts from the literature in the same form.


LEARNED = "RALEARN"

# name -> the reciprocal layers among L layers; None: every layer learns its share
PATTERNS: dict[str, Callable[[int], frozenset[int]] | None] = {
    "B": lambda L: frozenset(),
    "RAEARLY": lambda L: frozenset(range(L // 2)),
    "RALATE": lambda L: frozenset(range(L // 2, L)),
    "RAALL": lambda L: frozenset(range(L)),
    "RAALT": lambda L: frozenset(range(1, L, 2)),
    LEARNED: None,
}
LISTED = re.compile(r"RA:[0-9]{1,4}(-[0-9]{1,4})?(,[0-9]{1,4}(-[0-9]{1,4})?)*")
CUSTOM_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
CUSTOM_FOLDER = Path(__file__).with_name("custom")
PUBLISHED_FOLDER = Path(__file__).with_name("published")


class VariantError(UserError, ValueError):
    """The name is not a variant of this model."""


def custom_variants() -> list[str]:
    """List the custom variants: the names of the files in ra/custom, in upper case."""
    return _file_variants(CUSTOM_FOLDER)


def published_variants() -> list[str]:
    """List the variants from the literature: the names of the files in ra/published, in upper case."""
    return _file_variants(PUBLISHED_FOLDER)


def built_in_variants() -> list[str]:
    """List the names that no custom variant may have."""
    return [*PATTERNS, *published_variants()]


def known_variants() -> list[str]:
    """List all variants but those that name layers, RA:..."""
    return [*built_in_variants(), *custom_variants()]


def files_with(part: str) -> list[str]:
    """List the variants whose file defines the function `part`, as far as its text shows."""
    return [
        name
        for name in [*published_variants(), *custom_variants()]
        if part in _definitions(source(name).read_bytes())
    ]


def definitions(name: str) -> frozenset[str]:
    """Return the names of functions, classes and variables that the file of a variant defines; none without a file."""
    filed = name in published_variants() or name in custom_variants()
    return _definitions(source(name).read_bytes()) if filed else frozenset()


@functools.lru_cache(maxsize=256)
def _definitions(text: bytes) -> frozenset[str]:
    """Parse a file; nothing where it has a syntax error."""
    try:
        body = ast.parse(text).body
    except (SyntaxError, ValueError):
        return frozenset()
    names = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return frozenset(names | {target.id for target in targets if isinstance(target, ast.Name)})


def _file_variants(folder: Path) -> list[str]:
    return sorted(path.stem.upper() for path in folder.glob("*.py") if not path.stem.startswith("_"))


def source(name: str) -> Path:
    """Return the file that defines a published or a custom variant."""
    return (CUSTOM_FOLDER if is_custom(name) else PUBLISHED_FOLDER) / f"{name.lower()}.py"


def is_custom(name: str) -> bool:
    """Return whether a file in ra/custom defines the variant."""
    return name not in built_in_variants() and name in custom_variants()


def reciprocal_layers(name: str, layers: int) -> frozenset[int] | None:
    """Return the reciprocal layers (0 .. layers-1) of a variant; None for a learned, published or custom one.

    VariantError for an unknown name and for a listed layer that the model lacks.
    """
    if name in PATTERNS:
        pattern = PATTERNS[name]
        return pattern(layers) if pattern else None
    if name in known_variants():
        return None
    parts = [part for part in re.split(r"[,;]+(?=[A-Za-z]|$)", name) if part]
    if len(parts) > 1:
        raise VariantError(
            f'{name} is not a variant; spaces separate variants; did you mean "{" ".join(parts)}"?'
        )
    if not name.startswith("RA:"):
        known = known_variants()
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise VariantError(
            f"{name} is not a variant; {hint}fix: use {', '.join(known)}, or layers such as RA:5-7,9"
        )
    return _listed_layers(name, layers)


def refuse_misnamed_files() -> None:
    """VariantError for a file in ra/custom whose name cannot be a variant's, so that no file is ignored in silence."""
    for path in sorted(CUSTOM_FOLDER.glob("*.[pP][yY]")):
        stem = path.name[:-3]
        if stem.startswith("_"):
            continue
        suggestion = re.sub(r"[^a-z0-9_]+", "_", stem.lower()).strip("_")
        if not suggestion[:1].isalpha() or suggestion.upper() in built_in_variants():
            suggestion = f"my_{suggestion}".rstrip("_")
        problem = ""
        if stem.upper() in built_in_variants():
            problem = f"has the name of the built-in variant {stem.upper()}, which would be used instead"
        elif stem != stem.lower() or path.suffix != ".py":
            problem = "has upper-case letters; the file of variant NAME is name.py"
        elif not CUSTOM_NAME.fullmatch(stem):
            problem = "is not a variant name; a name has letters, digits and _, the first a letter"
        if problem:
            raise VariantError(
                f"ra/custom/{path.name} {problem}; fix: rename it, for example to ra/custom/{suggestion}.py "
                f"(variant {suggestion.upper()})"
            )


def is_fixed_pattern(attention: str) -> bool:
    """Return whether the attention is the baseline's with W_Q and W_K renamed in some layers, or none."""
    return bool(LISTED.fullmatch(attention)) or PATTERNS.get(attention) is not None


def _listed_layers(name: str, layers: int) -> frozenset[int]:
    """Parse the layers of `RA:5-7,9`. VariantError for a layer that the model lacks or that is listed twice."""
    if not LISTED.fullmatch(name):
        raise VariantError(
            f"{name} is malformed; fix: list layers and ranges of layers with commas, such as RA:5-7,9"
        )
    chosen: list[int] = []
    for part in name.removeprefix("RA:").split(","):
        first, _, last = part.partition("-")
        if last and int(last) < int(first):
            raise VariantError(f"{name}: the range {part} is descending; fix: {last}-{first}")
        for layer in (int(first), int(last or first)):
            if layer >= layers:
                raise VariantError(
                    f"{name}: there is no layer {layer}; fix: use layers 0 to {layers - 1} of this model"
                )
        chosen += range(int(first), int(last or first) + 1)
    twice = sorted({layer for layer in chosen if chosen.count(layer) > 1})
    if twice:
        raise VariantError(f"{name}: layer {twice[0]} is listed twice; fix: list each layer once")
    return frozenset(chosen)


def one_class(controls: Sequence[str]) -> str:
    """Say what several control arms have in common."""
    return (
        f"{', '.join(controls[:-1])} and {controls[-1]} are control arms (A/A): one function with W_Q and W_K renamed "
        "in some layers. Differences among them are noise."
    )


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


def judged_arms(names: Sequence[str]) -> list[str]:
    """Return the arms that are not control arms; where there are control arms, those that have one of their own."""
    others = [name for name in names if not parse_arm(name).is_control]
    return [name for name in others if controls_of(name, names)] if control_arms(names) else others


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
    interval = RECIPE_INTERVALS[RECIPE[key]]
    number = number_in(interval, value)
    if number is None:
        raise VariantError(
            f"{name}: {key}={value} is not a number in {interval}; fix: such as {EXAMPLES[key]}"
        )
    return number
