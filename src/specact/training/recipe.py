"""A recipe: everything that decides what a training run makes, read from one TOML file."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from specact.errors import ConfigError, unknown_name
from specact.files import check_name
from specact.gates.settings import GateChoices

T = typing.TypeVar("T")


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


@dataclass(frozen=True)
class PolicyRecipe:
    """One VQ-BeT policy.

    Attributes:
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
        snapshot: also keep the raw weights at this share of the steps, as ``NAME@snapshot``; 0 for never.
    """

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


@dataclass(frozen=True)
class Recipe:
    """A training run.

    Attributes:
        env: the environment's name.
        data: demonstration files, relative to the data folder; empty to let the scripted expert make them.
        generate_episodes, generate_noise: how many the expert makes, and its action noise.
        window: T, observations a policy looks at.
        chunk: n, actions a policy predicts at once.
        execute: how many of them are executed before the next inference.
        overlap: with ``average``, actions that several chunks predict for the same control step are averaged.
        goal: ``token`` prepends the goal to the window, ``concatenate`` adds it to every observation.
        image: whether the policy looks through the image encoder as well.
        temperature: of both policies' softmax when they are deployed; below 1 it makes up for the focal loss, which
            leaves them less sure than they could be.
        precision: of the exported weights, ``float16`` or ``float32``.
        seed: of everything random.
        gates: choices for the gates that serve the pairs well, see :class:`~specact.gates.settings.GateChoices`.
        held_out: share of episodes kept for validation.
        tokenizer: the tokenizer's recipe.
        policies: the policies' recipes by name.
        bundles: bundle name to (target, draft), each a policy's name or ``NAME@snapshot``.
    """

    env: str
    data: tuple[str, ...] = ()
    generate_episodes: int = 0
    generate_noise: float = 0.0
    window: int = 5
    chunk: int = 1
    execute: int = 1
    overlap: Literal["drop", "average"] = "drop"
    goal: Literal["token", "concatenate"] = "token"
    image: bool = False
    temperature: float = 1.0
    precision: Literal["float16", "float32"] = "float16"
    seed: int = 0
    gates: dict[str, Any] = field(default_factory=dict)
    held_out: float = 0.05
    tokenizer: TokenizerRecipe = field(default_factory=TokenizerRecipe)
    policies: dict[str, PolicyRecipe] = field(default_factory=dict)
    bundles: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.temperature > 0.0:
            raise ConfigError(f"temperature must be positive, got {self.temperature}")
        GateChoices().over(self.gates)
        if not 1 <= self.execute <= self.chunk:
            raise ConfigError(f"execute must lie between 1 and chunk = {self.chunk}, got {self.execute}")
        if bool(self.data) == bool(self.generate_episodes):
            raise ConfigError("a recipe needs either data = [...] or generate_episodes = N, and not both")
        if "tokenizer" in self.policies:
            raise ConfigError("no policy may be called 'tokenizer': that stage has the name")
        for name in self.bundles:
            check_name("a bundle", name)
        for name, policy in self.policies.items():
            check_name("a policy", name)
            if policy.width % policy.heads:
                raise ConfigError(f"policy {name!r}: width {policy.width} must be a multiple of heads {policy.heads}")
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
                    f"bundle {name!r}: one of {' and '.join(pair)} is sequential and the other is not, and their codes "
                    "could not be verified; set sequential alike for both"
                )

    def policy(self, made: str) -> PolicyRecipe:
        """The recipe of what a bundle names: a policy, or its snapshot."""
        return self.policies[made.removesuffix("@snapshot")]


def load_recipe(path: Path) -> Recipe:
    """Reads and checks a recipe.

    A policy may say ``like = "other"`` and list only what differs.

    Raises:
        ConfigError: if the file is missing, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    raw = read_toml(path)
    policies = raw.pop("policies", {})
    for name, policy in policies.items():
        base = policy.pop("like", None)
        if base is not None:
            if base not in policies:
                raise unknown_name(f"policy in like of {name!r}", base, policies)
            policies[name] = {**policies[base], "snapshot": 0.0, **policy}
    return build(
        Recipe,
        raw
        | {
            "tokenizer": build(TokenizerRecipe, raw.get("tokenizer", {}), "tokenizer"),
            "policies": {n: build(PolicyRecipe, p, f"policies.{n}") for n, p in policies.items()},
            "bundles": {n: tuple(pair) for n, pair in raw.get("bundles", {}).items()},
            "data": tuple(raw.get("data", ())),
        },
        "recipe",
    )


def read_toml(path: Path) -> dict[str, Any]:
    """What a recipe's file says.

    Raises:
        ConfigError: if the file is missing or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no recipe at {path}; the committed ones are in recipes/") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


def build(kind: type[T], values: dict[str, Any], where: str) -> T:
    """An instance of a dataclass from plain values, refusing unknown keys and values of the wrong type."""
    hints = typing.get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise unknown_name(f"key in [{where}]", key, hints)
        hint = hints[key]
        if typing.get_origin(hint) is Literal:
            if value not in typing.get_args(hint):
                raise unknown_name(f"value of {where}.{key}", str(value), typing.get_args(hint))
        elif isinstance(hint, type) and not isinstance(hint, types.GenericAlias):
            allowed = (int, float) if hint is float else (hint,)
            if not isinstance(value, allowed) or (isinstance(value, bool) and hint is not bool):
                raise ConfigError(f"{where}.{key} must be {hint.__name__}, got {value!r}")
    return kind(**values)


def as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values, for a manifest."""
    return dataclasses.asdict(recipe)
