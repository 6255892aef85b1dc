"""A recipe: the complete settings of a training run, read from one TOML file."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from specact.errors import ConfigError, unknown_name
from specact.files import check_name
from specact.gates.settings import GateChoices
from specact.lab.data.sources import Source
from specact.ranges import BELOW_ONE, COUNT, MOST, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range, check_ranges
from specact.toml import build, read_toml

HELD_OUT = Range(0, 1, open_high=True)
SIZE = Range(1, MOST)
_MOST_TUPLES = 2**20  # of codes; their table of chunks has some hundred megabytes


@dataclass(frozen=True)
class TokenizerRecipe:
    """Residual VQ tokenizer.

    Attributes:
        codebooks, codes: G and K.
        latent, hidden: widths of the latent and of the encoder's and decoder's hidden layers.
        steps, batch, learning_rate: of its training stage.
        decay: of the codebooks' exponential moving average.
        commitment: weight of the commitment loss.
        dead_share: codes used by a smaller share of the chunks are re-initialised.
    """

    codebooks: int = 2
    codes: int = 16
    latent: int = 64
    hidden: int = 128
    steps: int = 3000
    batch: int = 512
    learning_rate: float = 1e-3
    decay: float = 0.95
    commitment: float = 0.25
    dead_share: float = 0.004

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("codebooks", "codes", "latent", "hidden", "batch"), SIZE) | {"steps": COUNT})
        check_ranges(
            self,
            {"learning_rate": POSITIVE, "decay": BELOW_ONE, "commitment": NOT_NEGATIVE, "dead_share": BELOW_ONE},
        )
        # Logarithms, because the power may have millions of digits.
        if self.codebooks * math.log2(self.codes) > math.log2(_MOST_TUPLES):
            raise ConfigError(
                f"{self.codes} codes in each of {self.codebooks} codebooks are {self.codes}^{self.codebooks} tuples; "
                f"the device keeps a table of all of them, and at most {_MOST_TUPLES} are allowed"
            )


@dataclass(frozen=True)
class EncoderRecipe:
    """A policy's image encoder, see :mod:`specact.lab.train.encoder`.

    Attributes:
        tokens: the tokens of a frame: ``keypoints`` makes one token of the coordinates of all keypoints, ``patches``
            one per patch.
        channels: of its convolutions; the first has a stride of 4, the second of 2. With patches the later ones also
            have a stride of 2: three convolutions make patches of 16 x 16 pixels.
        pixels: height and width that the network first downsamples frames to; 0 for no downsampling. The ``size`` in
            ``[observations]`` is that of the robot's frames.
        keypoints: their number.
        width: of the two layers after the keypoints.
        shift: data augmentation: maximum random shift of a window's frames in training [pixels]; for an encoder that is
            trained jointly with the policy.
        learns: a numeric observation of the demonstrations, such as a pose, that the encoder is pre-trained to predict
            from a frame and then frozen; "" to train it jointly with the policy.
        scenes: number of random scenes of the environment for pre-training, half of every batch; 0 for none.
        steps, batch, learning_rate, weight_decay, average, bfloat16: of the pre-training, as those of a policy.
    """

    tokens: Literal["keypoints", "patches"] = "keypoints"
    channels: tuple[int, ...] = (32, 64, 64, 64)
    pixels: int = 0
    keypoints: int = 32
    width: int = 256
    shift: int = 0
    learns: str = ""
    scenes: int = 0
    steps: int = 4000
    batch: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    average: float = 0.998
    bfloat16: bool = True

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("keypoints", "width", "steps", "batch"), COUNT))
        check_ranges(self, dict.fromkeys(("pixels", "scenes", "shift", "weight_decay"), NOT_NEGATIVE))
        check_ranges(self, {"learning_rate": POSITIVE, "average": BELOW_ONE})
        if len(self.channels) < 2 or min(self.channels) < 1:
            raise ConfigError(
                f"an encoder has at least two convolutions, each with at least 1 channel, got {list(self.channels)}"
            )
        if self.learns and self.tokens == "patches":
            raise ConfigError('encoder.learns is for an encoder with tokens = "keypoints", which tells numbers')
        if self.learns and self.shift:
            raise ConfigError(
                "encoder.shift is for an encoder that is trained along with the policy: what encoder.learns "
                "names does not move with the frame; leave one of them out"
            )
        if self.scenes and not self.learns:
            raise ConfigError("encoder.scenes is for an encoder that learns before the policy; set encoder.learns")


@dataclass(frozen=True)
class PolicyRecipe:
    """One VQ-BeT policy.

    Attributes:
        sees: names of its observations; if empty, all but camera frames.
        history: length of an observation's history, by name; default is the one in ``[observations]``, else the
            recipe's ``window``; 0 for only the newest.
        instruction: whether it is conditioned on the demonstrations' instructions.
        encoder: of its cameras, if it has any.
        layers, heads, width: the transformer's.
        head_width: hidden width of the code and offset heads; 0 for linear heads.
        dropout: in the transformer.
        sequential: whether the secondary code is predicted given the primary; only with two codebooks, and the same
            for both policies of a bundle.
        offset_on: which codes the offset is trained on; with ``ground_truth`` the codes determine the action, with
            ``sampled`` (the official recipe) the offset learns to correct a wrong code.
        steps, batch, learning_rate, weight_decay, warmup: AdamW with linear warm-up and a cosine schedule to 2 %.
        average: decay of the exponential moving average of the weights, which is exported.
        focal: gamma of the focal loss.
        primary_weight, secondary_weight, offset_weight: weights of the losses.
        state_noise: standard deviation of the noise on training observations, in standardised units.
        bfloat16: whether matrix products in training run in bfloat16 (about twice as fast on a CPU that has it).
            Networks of width below 32, and CPUs without AVX-512, AMX or SVE, which it slows down, always use float32.
        snapshot: share of the steps after which the raw weights are also saved, as ``NAME@snapshot``; 0 for never.
    """

    sees: tuple[str, ...] = ()
    history: dict[str, int] = field(default_factory=dict)
    instruction: bool = False
    encoder: EncoderRecipe = field(default_factory=EncoderRecipe)
    layers: int = 4
    heads: int = 4
    width: int = 128
    head_width: int = 384
    dropout: float = 0.1
    sequential: bool = False
    offset_on: Literal["ground_truth", "sampled"] = "ground_truth"
    steps: int = 4000
    batch: int = 256
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    warmup: int = 100
    average: float = 0.998
    focal: float = 2.0
    primary_weight: float = 5.0
    secondary_weight: float = 1.0
    offset_weight: float = 10.0
    state_noise: float = 0.0
    bfloat16: bool = True
    snapshot: float = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, dict.fromkeys(("layers", "heads", "width", "batch"), SIZE) | {"steps": COUNT})
        check_ranges(
            self, dict.fromkeys(("head_width", "warmup", "weight_decay", "focal", "state_noise"), NOT_NEGATIVE)
        )
        check_ranges(self, dict.fromkeys(("primary_weight", "secondary_weight", "offset_weight"), NOT_NEGATIVE))
        check_ranges(self, {"dropout": BELOW_ONE, "learning_rate": POSITIVE, "average": BELOW_ONE, "snapshot": SHARE})
        check_history(self)
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.snapshot and round(self.snapshot * self.steps) < 1:
            raise ConfigError(
                f"snapshot {self.snapshot:g} of {self.steps} steps is before the first one; choose a larger share"
            )


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        env: the environment's name, or ``MODULE:TASK``; None for a robot without an environment.
        rate_hz: control rate [Hz], without an environment.
        observations: sources of the observations in the files, by name; if empty, all known ones.
        data: demonstration files, relative to the data folder; empty to generate them with the scripted expert.
        generate_episodes, generate_noise: number of generated episodes, and the expert's action noise.
        skip_disturbed: whether chunks that reach beyond a disturbed step are left out, see
            :meth:`~specact.lab.data.episodes.Episodes.followed`.
        window: T, the default length of observation histories; a goal has only the newest.
        chunk: n, actions a policy predicts at once.
        execute: number of them that are executed before the next inference.
        overlap: with ``average``, actions that several chunks predict for the same control step are averaged.
        goal: ``token`` prepends observations without a history, such as the goal, to the window as tokens;
            ``concatenate`` concatenates them to every observation.
        temperature: of both deployed policies' softmax; below 1 it compensates the focal loss, which makes them
            underconfident.
        precision: of the exported weights, ``float16`` or ``float32``.
        seed: random seed.
        gates: recommended settings of the pairs' gates, see :class:`~specact.gates.settings.GateChoices`.
        held_out: share of episodes kept for validation.
        tokenizer: the tokenizer's recipe.
        policies: the policies' recipes by name.
        bundles: bundle name to (target, draft), each a policy's name or ``NAME@snapshot``.
    """

    env: str | None = None
    rate_hz: float | None = None
    observations: dict[str, Source] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    generate_episodes: int = 0
    generate_noise: float = 0.0
    skip_disturbed: bool = False
    window: int = 5
    chunk: int = 1
    execute: int = 1
    overlap: Literal["drop", "average"] = "drop"
    goal: Literal["token", "concatenate"] = "token"
    temperature: float = 1.0
    precision: Literal["float16", "float32"] = "float16"
    seed: int = 0
    gates: dict[str, Any] = field(default_factory=dict)
    held_out: float = 0.05
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    policies: dict[str, PolicyRecipe] = field(default_factory=dict)
    bundles: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(
            self,
            {
                "generate_episodes": NOT_NEGATIVE, "generate_noise": NOT_NEGATIVE, "window": SIZE, "chunk": SIZE,
                "temperature": POSITIVE, "seed": SEED, "held_out": HELD_OUT,
            },
        )  # fmt: skip
        GateChoices().over(self.gates)
        if not 1 <= self.execute <= self.chunk:
            raise ConfigError(f"execute must lie between 1 and chunk = {self.chunk}, got {self.execute}")
        check_origin(self)
        if "tokenizer" in self.policies:
            raise ConfigError("no policy may be named 'tokenizer', which is the name of a training stage")
        for name in self.bundles:
            check_name("a bundle", name)
        for name, policy in self.policies.items():
            check_name("a policy", name)
            if policy.sequential and self.tokenizer.codebooks != 2:
                raise ConfigError(
                    f"policy {name!r}: sequential needs 2 codebooks, the tokenizer has {self.tokenizer.codebooks}"
                )
        made = {f"{n}{end}" for n, p in self.policies.items() for end in ("", "@snapshot") if p.snapshot or not end}
        for name, pair in self.bundles.items():
            for policy_name in pair:
                if policy_name not in made:
                    raise unknown_name("policy of a bundle", policy_name, made)
            if len({self.policy(policy_name).sequential for policy_name in pair}) > 1:
                raise ConfigError(
                    f"bundle {name!r}: one of {' and '.join(pair)} is sequential and the other is not, so their codes "
                    "cannot be verified; set sequential to the same value for both"
                )

    def policy(self, made: str) -> PolicyRecipe:
        """The recipe of a policy in a bundle, or of its snapshot."""
        return self.policies[made.removesuffix("@snapshot")]


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    A policy may inherit with ``like = "other"`` and list only the differences.

    Raises:
        ConfigError: if the file is missing, is not TOML, makes no bundle, or holds an unknown key or a value that its
            key does not allow.
    """
    raw = read_recipe(path)
    recipe = build(Recipe, raw | {"policies": _resolve_like(raw.get("policies", {}))}, "recipe")
    if not recipe.bundles:
        raise ConfigError(f'{path} makes no bundle; add [bundles] with at least one line NAME = ["TARGET", "DRAFT"]')
    return recipe


class Demonstrated(Protocol):
    """The settings of demonstrations in every recipe; see :class:`Recipe`."""

    @property
    def env(self) -> str | None: ...
    @property
    def rate_hz(self) -> float | None: ...
    @property
    def observations(self) -> dict[str, Source]: ...
    @property
    def data(self) -> tuple[str, ...]: ...
    @property
    def generate_episodes(self) -> int: ...
    @property
    def generate_noise(self) -> float: ...
    @property
    def window(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def seed(self) -> int: ...
    @property
    def held_out(self) -> float: ...


class Seeing(Protocol):
    """The settings of observations in every policy's recipe; see :class:`PolicyRecipe`."""

    @property
    def sees(self) -> tuple[str, ...]: ...
    @property
    def history(self) -> dict[str, int]: ...
    @property
    def instruction(self) -> bool: ...


def check_origin(recipe: Demonstrated) -> None:
    """Checks that a recipe has exactly one source of demonstrations, and one control rate.

    Raises:
        ConfigError: if it has not.
    """
    check_ranges(recipe, {"rate_hz": POSITIVE})
    if (recipe.env is None) == (recipe.rate_hz is None):
        raise ConfigError(
            'a recipe needs either env = "NAME", whose control rate is known, or rate_hz = HZ where there is no '
            "environment, and not both"
        )
    if bool(recipe.data) == bool(recipe.generate_episodes):
        raise ConfigError("a recipe needs either data = [...] or generate_episodes = N, and not both")
    if recipe.generate_episodes and (recipe.env is None or recipe.observations):
        raise ConfigError(
            "generate_episodes lets an environment's expert demonstrate, with the environment's observations: it needs "
            "env, and no [observations]"
        )


def check_history(policy: Seeing) -> None:
    """Checks the lengths and names of histories.

    Raises:
        ConfigError: if one is negative, or of an observation that the policy does not have.
    """
    for name, length in policy.history.items():
        if length < 0:
            raise ConfigError(f"history.{name} must be at least 0, got {length}")
        if policy.sees and name not in policy.sees:
            raise unknown_name("observation in history", name, policy.sees)


def read_recipe(path: Path) -> dict[str, Any]:
    """The content of a recipe's file, with every entry of ``[observations]`` as a table.

    Raises:
        ConfigError: as :func:`~specact.toml.read_toml`.
    """
    if not path.exists():
        raise ConfigError(f"there is no recipe at {path}; the committed ones are in recipes/")
    raw = read_toml(path, "recipe")
    if isinstance(raw.get("observations"), dict):
        raw["observations"] = dict(_tables(raw["observations"]))
    return raw


def _tables(observations: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Converts entries to tables: a string is the dataset's key; unquoted ``image.front = ...`` is nested in TOML."""
    for part, value in observations.items():
        name = f"{above}{part}"
        if isinstance(value, str):
            yield name, {"key": value}
        elif isinstance(value, dict) and not value.keys() & Source.__dataclass_fields__.keys():
            yield from _tables(value, f"{name}.")
        else:
            yield name, {"key": name} | value if isinstance(value, dict) else value


def _resolve_like(policies: Any) -> Any:
    """Resolves ``like``; entries that are no tables are left to the type check."""
    if not isinstance(policies, dict) or not all(isinstance(policy, dict) for policy in policies.values()):
        return policies
    resolved: dict[str, Any] = {}
    for name, policy in policies.items():
        base: Any = policy.get("like")
        if base is None:
            resolved[name] = policy
            continue
        if not isinstance(base, str) or base not in policies:
            raise unknown_name(f"policy in like of {name!r}", str(base), policies)
        # A policy further down may be the base too, unless it uses ``like`` itself.
        source: dict[str, Any] = resolved[base] if base in resolved else policies[base]
        if "like" in source:
            raise ConfigError(f"policies.{name}.like: the policy {base!r} also uses like; move it above {name!r}")
        resolved[name] = {**source, "snapshot": 0.0, **{key: policy[key] for key in policy if key != "like"}}
    return resolved


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, for a manifest."""
    return dataclasses.asdict(recipe)
