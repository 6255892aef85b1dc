"""The recipe of a chunk policy, read from one TOML file; its ``kind`` is flow, regression or tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from specact.errors import ConfigError
from specact.files import check_name
from specact.lab.data.sources import Source
from specact.lab.train.recipe import (
    HELD_OUT,
    EncoderRecipe,
    Recipe,
    Seeing,
    check_history,
    check_origin,
    load_recipe,
    read_recipe,
)
from specact.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SEED, check_ranges
from specact.toml import build


@dataclass(frozen=True)
class ChunkRecipe:
    """A training run of a chunk policy: by flow matching, by regression, or with autoregressive tokens.

    Attributes:
        kind: ``flow`` samples a chunk in several steps; ``regression`` predicts one in a single pass of the same
            networks, and is the cheaper draft; ``tokens`` decodes one of 256 bins after the other for every dimension
            of every action. Recipes of VQ-BeT pairs have no kind.
        bundle: name of the bundle.
        env, rate_hz, observations, data, generate_episodes, generate_noise, window: see
            :class:`~specact.lab.train.recipe.Recipe`.
        sees, history, instruction, encoder: see :class:`~specact.lab.train.recipe.PolicyRecipe`.
        auxiliary: a numeric observation of the demonstrations that a readout of the prefix is trained to predict along
            with the policy, such as ``privileged.scene``; the policy does not observe it, and the readout is not
            exported. "" for none.
        smooth: of tokens, standard deviation in bins of the labels' normal distributions; 0 for one-hot labels.
        skip_disturbed: whether actions of a chunk beyond a disturbed step are masked, see
            :meth:`~specact.lab.data.episodes.Episodes.followed`.
        chunk: H, actions it predicts at once.
        layers, heads, width: of prefix and expert, or of the decoder of tokens.
        dropout: in them.
        state_noise: standard deviation of the noise on training observations, in standardised units.
        steps, batch, learning_rate, weight_decay, warmup: AdamW with linear warm-up and a cosine schedule to 2 %.
        draws: of a flow, times and noises per window of a batch; they share its prefix.
        average: decay of the exponential moving average of the weights, which is exported.
        snapshots: number of intermediate bundles ``BUNDLE-STEP``, evenly spaced over the steps. Select the best by
            rollouts: the loss on held-out demonstrations does not predict success.
        bfloat16: whether matrix products in training run in bfloat16.
        precision: of the exported weights.
        seed: random seed.
        held_out: share of episodes kept for validation.
    """

    kind: Literal["flow", "regression", "tokens"]
    bundle: str
    env: str | None = None
    rate_hz: float | None = None
    observations: dict[str, Source] = field(default_factory=dict)
    sees: tuple[str, ...] = ()
    history: dict[str, int] = field(default_factory=dict)
    instruction: bool = False
    encoder: EncoderRecipe = field(default_factory=EncoderRecipe)
    auxiliary: str = ""
    smooth: float = 0.0
    skip_disturbed: bool = False
    data: tuple[str, ...] = ()
    generate_episodes: int = 0
    generate_noise: float = 0.0
    window: int = 2
    chunk: int = 16
    layers: int = 3
    heads: int = 4
    width: int = 96
    dropout: float = 0.1
    state_noise: float = 0.0
    steps: int = 8000
    batch: int = 128
    draws: int = 2
    learning_rate: float = 1e-3
    weight_decay: float = 1e-2
    warmup: int = 200
    average: float = 0.999
    snapshots: int = 0
    bfloat16: bool = True
    precision: Literal["float16", "float32"] = "float16"
    seed: int = 0
    held_out: float = 0.05

    def __post_init__(self) -> None:
        sizes = ("window", "chunk", "layers", "heads", "width", "steps", "batch", "draws")
        check_ranges(self, dict.fromkeys(sizes, COUNT))
        not_negative = (
            "generate_episodes",
            "generate_noise",
            "state_noise",
            "weight_decay",
            "warmup",
            "snapshots",
            "smooth",
        )
        check_ranges(self, dict.fromkeys(not_negative, NOT_NEGATIVE))
        check_ranges(
            self,
            {
                "dropout": BELOW_ONE, "learning_rate": POSITIVE, "average": BELOW_ONE, "seed": SEED,
                "held_out": HELD_OUT,
            },
        )  # fmt: skip
        if self.encoder.learns:
            raise ConfigError(
                "encoder.learns is for pairs of action codes; a chunk policy's encoder learns along with it"
            )
        if self.smooth and self.kind != "tokens":
            raise ConfigError(f"smooth is for the labels of tokens; leave it out of a recipe of kind {self.kind!r}")
        check_name("a bundle", self.bundle)
        check_origin(self)
        check_history(self)
        if self.width % (2 * self.heads):
            raise ConfigError(f"width {self.width} must be an even multiple of heads {self.heads}")


def load_any_recipe(path: Path) -> tuple[Recipe | ChunkRecipe, Mapping[str, Seeing]]:
    """Reads and checks a recipe of either type; also returns the observation settings of each of its policies.

    Raises:
        ConfigError: as :func:`load_chunk_recipe` and :func:`~specact.lab.train.recipe.load_recipe`.
    """
    if "kind" in read_recipe(path):
        flow = load_chunk_recipe(path)
        return flow, {flow.bundle: flow}
    pairs = load_recipe(path)
    return pairs, pairs.policies


def load_chunk_recipe(path: Path) -> ChunkRecipe:
    """Reads and checks the recipe of a chunk policy.

    Raises:
        ConfigError: if the file is missing, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    return build(ChunkRecipe, read_recipe(path), "recipe")
