"""A recipe: everything that decides what a training run makes, read from one TOML file."""

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
from specact.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SEED, SHARE, Range, check_ranges
from specact.runtime.limits import MOST
from specact.toml import build, read_toml

HELD_OUT = Range(0, 1, open_high=True)
SIZE = Range(1, MOST)
_MOST_TUPLES = 2**20  # of codes; a table of so many chunks has some hundred megabytes


@dataclass(frozen=True)
class TokenizerRecipe:
    """Residual VQ tokenizer.

    Attributes:
        codebooks, codes: G and K.
        latent, hidden: widths of the latent and of the encoder's and decoder's hidden layers.
        steps, batch, learning_rate: its own training stage.
        decay: of the codebooks' exponential average.
        commitment: weight of the commitment loss.
        dead_share: a code used by a smaller share of the chunks is re-initialised.
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
        # Not the power itself: it may have millions of digits.
        if self.codebooks * math.log2(self.codes) > math.log2(_MOST_TUPLES):
            raise ConfigError(
                f"{self.codes} codes in each of {self.codebooks} codebooks are {self.codes}^{self.codebooks} tuples; "
                f"the device keeps a table of all of them, and at most {_MOST_TUPLES} are allowed"
            )


@dataclass(frozen=True)
class EncoderRecipe:
    """How a policy looks through its cameras, see :mod:`specact.lab.train.encoder`.

    Attributes:
        tokens: what becomes of a frame: ``keypoints`` makes one token of the places of so many things, ``patches`` one
            of every patch, for a policy that attends to them.
        channels: of its convolutions; the first has a stride of 4, the second of 2. With patches those after it have
            a stride of 2, too: three make patches of 16 x 16 pixels.
        pixels: height and width that the network first averages frames down to; 0 for frames as they are. The ``size``
            in ``[observations]`` is what the robot is to give.
        keypoints: how many places in a frame it finds.
        width: of the two layers that read them.
        shift: by up to how many pixels the frames of a window are moved at random in training; for an encoder that is
            trained along with the policy.
        learns: an observation of the demonstrations, such as a pose, that the encoder learns to tell from a frame
            before the policy is trained, after which it is frozen; "" to train it along with the policy.
        scenes: how many random scenes of the environment it learns from, half of every batch; 0 for none.
        steps, batch, learning_rate, weight_decay, average, bfloat16: of that stage, as those of a policy.
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
        sees: names of the observations it looks at; without any, all that are no camera's.
        history: of an observation, how many it looks at, where that is not the recipe's ``window`` or what
            ``[observations]`` says; 0 for the newest alone.
        instruction: whether it is told what to do, where the demonstrations say it.
        encoder: how it looks through cameras, where it sees one.
        layers, heads, width: the transformer's.
        head_width: hidden width of the code and offset heads; 0 for linear heads.
        dropout: in the transformer.
        sequential: whether the secondary code is predicted given the primary; only with two codebooks, and alike for
            the policies of a bundle.
        offset_on: which codes the offset is trained on; ``ground_truth`` makes the codes carry the action,
            ``sampled`` (the official recipe) lets the offset undo a wrong code.
        steps, batch, learning_rate, weight_decay, warmup: AdamW with linear warm-up and a cosine to 2 %.
        average: decay of the exponential average of the weights, which is what is exported.
        focal: gamma of the focal loss.
        primary_weight, secondary_weight, offset_weight: weights of the losses.
        state_noise: standard deviation of the noise on training observations, in standardised units.
        bfloat16: whether matrix products in training run in bfloat16 (about twice as fast on a CPU that has it).
            Networks of fewer than 32 units, which it makes slower, run in float32 all the same.
        snapshot: also keep the raw weights at this share of the steps, as ``NAME@snapshot``; 0 for never.
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
        env: the environment's name, or ``MODULE:TASK``; None for a robot that there is no environment for.
        rate_hz: control rate [Hz], where there is no environment to say it.
        observations: what is read of the files, by the name that policies know it by; without any, everything that the
            reader knows.
        data: demonstration files, relative to the data folder; empty to let the scripted expert make them.
        generate_episodes, generate_noise: how many the expert makes, and its action noise.
        skip_disturbed: whether chunks are left out that reach beyond a disturbed step, see
            :meth:`~specact.lab.data.episodes.Episodes.followed`.
        window: T, how many observations a policy looks at, where nothing else is said. Of a goal it is the newest.
        chunk: n, actions a policy predicts at once.
        execute: how many of them are executed before the next inference.
        overlap: with ``average``, actions that several chunks predict for the same control step are averaged.
        goal: ``token`` prepends what has no history to the window, such as the goal; ``concatenate`` adds it to every
            observation.
        temperature: of both policies' softmax when they are deployed; below 1 it makes up for the focal loss, which
            leaves them less sure than they could be.
        precision: of the exported weights, ``float16`` or ``float32``.
        seed: random seed.
        gates: choices for the gates that serve the pairs well, see :class:`~specact.gates.settings.GateChoices`.
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
        """The recipe of what a bundle names: a policy, or its snapshot."""
        return self.policies[made.removesuffix("@snapshot")]


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    A policy may say ``like = "other"`` and list only what differs.

    Raises:
        ConfigError: if the file is missing, is not TOML, makes no bundle, or holds an unknown key or a value that its
            key does not allow.
    """
    raw = read_recipe(path)
    recipe = build(Recipe, raw | {"policies": _written_out(raw.get("policies", {}))}, "recipe")
    if not recipe.bundles:
        raise ConfigError(f'{path} makes no bundle; add [bundles] with at least one line NAME = ["TARGET", "DRAFT"]')
    return recipe


class Demonstrated(Protocol):
    """What every recipe says of its demonstrations; see :class:`Recipe`."""

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
    """What every recipe of a policy says of its observations; see :class:`PolicyRecipe`."""

    @property
    def sees(self) -> tuple[str, ...]: ...
    @property
    def history(self) -> dict[str, int]: ...
    @property
    def instruction(self) -> bool: ...


def check_origin(recipe: Demonstrated) -> None:
    """Refuses a recipe that does not say once where its demonstrations come from, and at which rate.

    Raises:
        ConfigError: if it does not.
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
    """Refuses a history that is negative, or of what the policy does not see.

    Raises:
        ConfigError: for such a history.
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
    """A name alone is the dataset's key; ``image.front = ...`` without quotation marks is a table to TOML."""
    for part, value in observations.items():
        name = f"{above}{part}"
        if isinstance(value, str):
            yield name, {"key": value}
        elif isinstance(value, dict) and not value.keys() & Source.__dataclass_fields__.keys():
            yield from _tables(value, f"{name}.")
        else:
            yield name, {"key": name} | value if isinstance(value, dict) else value


def _written_out(policies: Any) -> Any:
    """The policies with what ``like`` refers to; what is not a table is left for the check of types."""
    if not isinstance(policies, dict) or not all(isinstance(policy, dict) for policy in policies.values()):
        return policies
    whole: dict[str, Any] = {}
    for name, policy in policies.items():
        base: Any = policy.get("like")
        if base is None:
            whole[name] = policy
            continue
        if not isinstance(base, str) or base not in policies:
            raise unknown_name(f"policy in like of {name!r}", str(base), policies)
        # One that is written below may be referred to as well, unless it refers to another one itself.
        source: dict[str, Any] = whole[base] if base in whole else policies[base]
        if "like" in source:
            raise ConfigError(f"policies.{name}.like: the policy {base!r} also uses like; move it above {name!r}")
        whole[name] = {**source, "snapshot": 0.0, **{key: policy[key] for key in policy if key != "like"}}
    return whole


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, for a manifest."""
    return dataclasses.asdict(recipe)
