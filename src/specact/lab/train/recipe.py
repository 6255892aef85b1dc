"""Recipes: the complete settings of a training run, each read from one TOML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, overload

import msgspec
from msgspec import Meta, field

from specact.errors import ConfigError, unknown_name
from specact.families.chunks.sources import kind_of_source
from specact.families.tokens.policy import BINS
from specact.files import check_name
from specact.gates.settings import table_entries
from specact.lab.data.sources import Source
from specact.lab.rollout.token_rollouts import SHARD
from specact.records import (
    BelowOne,
    Count,
    NotNegative,
    Positive,
    Record,
    Seed,
    Share,
    Size,
    WholeNumber,
    check_fields,
    read_record,
    read_toml,
)
from specact.systems.flash import FlashSettings

Precision = Literal["float16", "float32"]
_MOST_TUPLES = 2**20  # of codes; their table of chunks has some hundred megabytes


class Recipe(Record, frozen=True, kw_only=True):
    """What recipes that learn from demonstrations have in common.

    Attributes:
        env: the environment's name, or ``MODULE:TASK``; None for a robot without an environment.
        rate_hz: control rate [Hz], without an environment.
        observations: sources of the observations in the files, by name; if empty, all known ones.
        data: demonstration files, relative to the data folder; empty to generate them with the scripted expert.
        generate_episodes, generate_noise: number of generated episodes, and the expert's action noise.
        skip_disturbed: whether chunks that reach beyond a disturbed step are left out or masked, see
            :meth:`~specact.lab.data.episodes.Episodes.followed`.
        window: T, the default length of observation histories; a goal has only the newest.
        chunk: actions a policy predicts at once.
        precision: of the exported weights.
        seed: random seed.
        held_out: share of episodes kept for validation.
    """

    env: str | None = None
    rate_hz: Positive | None = None
    observations: dict[str, Source] = field(default_factory=dict)
    data: tuple[str, ...] = ()
    generate_episodes: WholeNumber = 0
    generate_noise: NotNegative = 0.0
    skip_disturbed: bool = False
    window: Size = 5
    chunk: Size = 1
    precision: Precision = "float16"
    seed: Seed = 0
    held_out: BelowOne = 0.05

    @property
    def seeing(self) -> Mapping[str, Seeing]:
        """The observation settings of its policies, by name."""
        return {}

    def check_origin(self) -> None:
        """Refuses anything but one source of demonstrations, and one control rate."""
        if (self.env is None) == (self.rate_hz is None):
            raise ConfigError(
                'a recipe needs either env = "NAME", whose control rate is known, or rate_hz = HZ where there is no '
                "environment, and not both"
            )
        if bool(self.data) == bool(self.generate_episodes):
            raise ConfigError("a recipe needs either data = [...] or generate_episodes = N, and not both")
        if self.generate_episodes and (self.env is None or self.observations):
            raise ConfigError(
                "generate_episodes lets an environment's expert demonstrate, with the environment's observations: it "
                "needs env, and no [observations]"
            )


class Optimisation(Record, frozen=True, kw_only=True):
    """AdamW with linear warm-up and a cosine schedule down to 2 %.

    Attributes:
        steps, batch, learning_rate, weight_decay, warmup: its settings.
        average: decay of the exponential moving average of the weights, which is exported.
    """

    steps: Count = 4000
    batch: Size = 256
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-2
    warmup: WholeNumber = 100
    average: BelowOne = 0.998


class EncoderRecipe(Optimisation, frozen=True, kw_only=True):
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
        bfloat16: of the pre-training, as of a policy.
    """

    tokens: Literal["keypoints", "patches"] = "keypoints"
    channels: Annotated[tuple[Count, ...], Meta(min_length=2)] = (32, 64, 64, 64)
    pixels: WholeNumber = 0
    keypoints: Count = 32
    width: Count = 256
    shift: WholeNumber = 0
    learns: str = ""
    scenes: WholeNumber = 0
    batch: Size = 128
    learning_rate: Positive = 2e-3
    bfloat16: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.learns and self.tokens == "patches":
            raise ConfigError('encoder.learns is for an encoder with tokens = "keypoints", which tells numbers')
        if self.learns and self.shift:
            raise ConfigError(
                "encoder.shift is for an encoder that is trained along with the policy: what encoder.learns "
                "names does not move with the frame; leave one of them out"
            )
        if self.scenes and not self.learns:
            raise ConfigError("encoder.scenes is for an encoder that learns before the policy; set encoder.learns")


class TokenizerRecipe(Record, frozen=True):
    """Residual VQ tokenizer.

    Attributes:
        codebooks, codes: G and K.
        latent, hidden: widths of the latent and of the encoder's and decoder's hidden layers.
        steps, batch, learning_rate: of its training stage.
        decay: of the codebooks' exponential moving average.
        commitment: weight of the commitment loss.
        dead_share: codes used by a smaller share of the chunks are re-initialised.
    """

    codebooks: Size = 2
    codes: Size = 16
    latent: Size = 64
    hidden: Size = 128
    steps: Count = 3000
    batch: Size = 512
    learning_rate: Positive = 1e-3
    decay: BelowOne = 0.95
    commitment: NotNegative = 0.25
    dead_share: BelowOne = 0.004

    def __post_init__(self) -> None:
        check_fields(self)
        # Logarithms, because the power may have millions of digits.
        if self.codebooks * math.log2(self.codes) > math.log2(_MOST_TUPLES):
            raise ConfigError(
                f"{self.codes} codes in each of {self.codebooks} codebooks are {self.codes}^{self.codebooks} tuples; "
                f"the device keeps a table of all of them, and at most {_MOST_TUPLES} are allowed"
            )


class PolicyRecipe(Optimisation, frozen=True, kw_only=True):
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
        focal: gamma of the focal loss.
        primary_weight, secondary_weight, offset_weight: weights of the losses.
        state_noise: standard deviation of the noise on training observations, in standardised units.
        bfloat16: whether matrix products in training run in bfloat16 (about twice as fast on a CPU that has it).
            Networks of width below 32, and CPUs without AVX-512, AMX or SVE, which it slows down, always use float32.
        snapshot: share of the steps after which the raw weights are also saved, as ``NAME@snapshot``; 0 for never.
    """

    sees: tuple[str, ...] = ()
    history: dict[str, WholeNumber] = field(default_factory=dict)
    instruction: bool = False
    encoder: EncoderRecipe = EncoderRecipe()
    layers: Size = 4
    heads: Size = 4
    width: Size = 128
    head_width: WholeNumber = 384
    dropout: BelowOne = 0.1
    sequential: bool = False
    offset_on: Literal["ground_truth", "sampled"] = "ground_truth"
    focal: NotNegative = 2.0
    primary_weight: NotNegative = 5.0
    secondary_weight: NotNegative = 1.0
    offset_weight: NotNegative = 10.0
    state_noise: NotNegative = 0.0
    bfloat16: bool = True
    snapshot: Share = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        check_history(self)
        if self.width % self.heads:
            raise ConfigError(f"width {self.width} must be a multiple of heads {self.heads}")
        if self.snapshot and round(self.snapshot * self.steps) < 1:
            raise ConfigError(
                f"snapshot {self.snapshot:g} of {self.steps} steps is before the first one; choose a larger share"
            )


class CodesRecipe(Recipe, frozen=True, kw_only=True):
    """Pairs of VQ-BeT policies with one tokenizer; its file has no ``kind``.

    Attributes:
        execute: number of a chunk's actions that are executed before the next inference.
        overlap: with ``average``, actions that several chunks predict for the same control step are averaged.
        goal: ``token`` prepends observations without a history, such as the goal, to the window as tokens;
            ``concatenate`` concatenates them to every observation.
        temperature: of both deployed policies' softmax; below 1 it compensates the focal loss, which makes them
            underconfident.
        gates: recommended settings of the pairs' gates, see :func:`~specact.gates.settings.table_entries`.
        tokenizer: the tokenizer's recipe.
        policies: the policies' recipes by name.
        bundles: bundle name to (target, draft), each a policy's name or ``NAME@snapshot``.
    """

    execute: int = 1
    overlap: Literal["drop", "average"] = "drop"
    goal: Literal["token", "concatenate"] = "token"
    temperature: Positive = 1.0
    gates: dict[str, Any] = field(default_factory=dict)
    tokenizer: TokenizerRecipe = TokenizerRecipe()
    policies: dict[str, PolicyRecipe] = field(default_factory=dict)
    bundles: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_origin()
        table_entries(self.gates)
        if not 1 <= self.execute <= self.chunk:
            raise ConfigError(f"execute must lie between 1 and chunk = {self.chunk}, got {self.execute}")
        if "tokenizer" in self.policies:
            raise ConfigError("no policy may be named 'tokenizer', which is the name of a training stage")
        for name, policy in self.policies.items():
            check_name("a policy", name)
            if policy.sequential and self.tokenizer.codebooks != 2:
                raise ConfigError(
                    f"policy {name!r}: sequential needs 2 codebooks, the tokenizer has {self.tokenizer.codebooks}"
                )
        trained = {f"{n}{end}" for n, p in self.policies.items() for end in ("", "@snapshot") if p.snapshot or not end}
        for name, pair in self.bundles.items():
            check_name("a bundle", name)
            for policy_name in pair:
                if policy_name not in trained:
                    raise unknown_name("policy of a bundle", policy_name, trained)
            if len({self.policy(policy_name).sequential for policy_name in pair}) > 1:
                raise ConfigError(
                    f"bundle {name!r}: one of {' and '.join(pair)} is sequential and the other is not, so their codes "
                    "cannot be verified; set sequential to the same value for both"
                )

    @property
    def seeing(self) -> Mapping[str, Seeing]:
        return self.policies

    def policy(self, name: str) -> PolicyRecipe:
        """The recipe of a policy in a bundle, or of its snapshot."""
        return self.policies[name.removesuffix("@snapshot")]


class ChunkRecipe(Recipe, frozen=True, kw_only=True):
    """A chunk policy: by flow matching, by regression, or with autoregressive tokens.

    Attributes:
        kind: ``flow`` samples a chunk in several steps; ``regression`` predicts one in a single pass of the same
            networks, and is the cheaper draft; ``tokens`` decodes one of 256 bins after the other for every dimension
            of every action.
        bundle: name of the bundle.
        sees, history, instruction, encoder, state_noise, bfloat16: see :class:`PolicyRecipe`; steps, batch and so on:
            see :class:`Optimisation`.
        auxiliary: a numeric observation of the demonstrations that a readout of the prefix is trained to predict along
            with the policy, such as ``privileged.scene``; the policy does not observe it, and the readout is not
            exported. "" for none.
        smooth: of tokens, standard deviation in bins of the labels' normal distributions; 0 for one-hot labels.
        layers, heads, width, dropout: of prefix and expert, or of the decoder of tokens.
        draws: of a flow, times and noises per window of a batch; they share its prefix.
        snapshots: number of intermediate bundles ``BUNDLE-STEP``, evenly spaced over the steps. Select the best by
            rollouts: the loss on held-out demonstrations does not predict success.
    """

    kind: Literal["flow", "regression", "tokens"]
    bundle: str
    sees: tuple[str, ...] = ()
    history: dict[str, WholeNumber] = field(default_factory=dict)
    instruction: bool = False
    encoder: EncoderRecipe = EncoderRecipe()
    auxiliary: str = ""
    smooth: NotNegative = 0.0
    window: Size = 2
    chunk: Size = 16
    layers: Count = 3
    heads: Count = 4
    width: Count = 96
    dropout: BelowOne = 0.1
    state_noise: NotNegative = 0.0
    steps: Count = 8000
    batch: Count = 128
    draws: Count = 2
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-2
    warmup: WholeNumber = 200
    average: BelowOne = 0.999
    snapshots: WholeNumber = 0
    bfloat16: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        self.check_origin()
        check_history(self)
        check_name("a bundle", self.bundle)
        if self.encoder.learns:
            raise ConfigError(
                "encoder.learns is for pairs of action codes; a chunk policy's encoder learns along with it"
            )
        if self.smooth and self.kind != "tokens":
            raise ConfigError(f"smooth is for the labels of tokens; leave it out of a recipe of kind {self.kind!r}")
        if self.width % (2 * self.heads):
            raise ConfigError(f"width {self.width} must be an even multiple of heads {self.heads}")

    @property
    def seeing(self) -> Mapping[str, Seeing]:
        return {self.bundle: self}


class DrafterRecipe(Optimisation, frozen=True, kw_only=True):
    """Drafters of a token policy, which learn from its own rollouts.

    Attributes:
        kind: identifies this recipe type.
        bundle: name of the bundle.
        target: bundle of the token policy, by name or path.
        env: environment of its rollouts; its own if not given.
        episodes: number of rollouts.
        strict: dimensions of an action without a tolerance, such as a gripper.
        groups: the group of every dimension for HeiSD's acceptance, such as 0 for positions and 1 for a gripper; each
            its own if not given.
        path: indices into the observation ``state`` of the point for HeiSD's kinematic metric; all if not given.
        window: history of that metric in inferences, at least 3.
        top, tree, nodes: children of a node, depth and size of the head's tree.
        graph: search HeiSD's memory in a graph, approximately, instead of exhaustively; for large memories. Needs
            the extra ``retrieval`` wherever it is used.
        bigrams: K, most frequent successors that are stored per token.
        heads, dropout: of the head's layer.
        ahead: number of autoregressive passes in the head's training.
        feature_weight, token_weight: of the features' smooth L1 loss, and of the cross-entropy to the target's
            distribution.
        feature_noise: half the width of the uniform noise on its input features.
        bfloat16: see :class:`PolicyRecipe`.
        precision, seed: see :class:`Recipe`.
        held_out: share of the episodes kept for validation.
    """

    kind: Literal["drafters"]
    bundle: str
    target: str
    env: str | None = None
    episodes: int = 300
    strict: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    window: int = 5
    top: Annotated[int, Meta(ge=1, le=64)] = 8
    tree: Annotated[int, Meta(ge=1, le=64)] = 4
    nodes: Annotated[int, Meta(ge=1, le=512)] = 50
    graph: bool = False
    bigrams: Annotated[int, Meta(ge=1, le=BINS)] = 16
    heads: Count = 4
    dropout: BelowOne = 0.1
    ahead: Count = 4
    feature_weight: NotNegative = 1.0
    token_weight: NotNegative = 1.0
    feature_noise: NotNegative = 0.2
    steps: Count = 2000
    batch: Size = 64
    learning_rate: Positive = 3e-3
    bfloat16: bool = True
    precision: Precision = "float16"
    seed: Seed = 0
    held_out: BelowOne = 0.1

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("a bundle", self.bundle)
        if self.episodes < 2 * SHARD or self.episodes % SHARD:
            raise ConfigError(
                f"episodes must be a multiple of {SHARD}, which share a file, and at least {2 * SHARD}, of which one "
                f"file is held out; got {self.episodes}"
            )


class FlashRecipe(Optimisation, frozen=True, kw_only=True):
    """FLASH's block for a flow policy.

    Attributes:
        kind: identifies this recipe type.
        bundle: name of the bundle it makes.
        target: the flow policy that is drafted for: a bundle, by name or path, or ``lerobot:PATH@HZ``, see
            :func:`~specact.load.load_policy`.
        data, observations, held_out: of a target that is no bundle, the demonstrations that it was trained on, see
            :class:`Recipe`; a bundle's own recipe says it.
        execute: actions of a chunk that are executed at most before the next round.
        grippers: dimensions of an action that are grippers.
        period: checked rounds between two full ones at most; 0 for no limit.
        heads, dropout: of the block; its heads divide the width of the encoder's tokens.
        precision, seed: see :class:`Recipe`.
    """

    kind: Literal["flash"]
    bundle: str
    target: str
    execute: int
    data: tuple[str, ...] = ()
    observations: dict[str, Source] = field(default_factory=dict)
    held_out: BelowOne | None = None
    grippers: tuple[int, ...] = ()
    period: int = 4
    heads: Count = 4
    dropout: BelowOne = 0.0
    steps: Count = 3000
    batch: Size = 64
    learning_rate: Positive = 2e-3
    precision: Precision = "float16"
    seed: Seed = 0

    def __post_init__(self) -> None:
        check_fields(self)
        check_name("a bundle", self.bundle)
        FlashSettings(self.execute, self.grippers, self.period)
        bundled = kind_of_source(self.target) == "folder"
        if bundled and (self.data or self.observations or self.held_out is not None):
            raise ConfigError(
                f"the demonstrations are those of the recipe of {self.target}; leave out data, [observations] and "
                "held_out"
            )
        if not bundled and not self.data:
            raise ConfigError(
                f"nobody here knows what {self.target} was trained on; name those demonstrations, as in "
                'data = ["my_dataset"]'
            )


R = TypeVar("R", bound=Record)
# What says what a policy sees.
Seeing = PolicyRecipe | ChunkRecipe
AnyRecipe = CodesRecipe | ChunkRecipe | DrafterRecipe | FlashRecipe
KINDS: dict[str, type[ChunkRecipe | DrafterRecipe | FlashRecipe]] = {
    "flow": ChunkRecipe, "regression": ChunkRecipe, "tokens": ChunkRecipe, "drafters": DrafterRecipe,
    "flash": FlashRecipe,
}  # fmt: skip


@overload
def load_recipe(path: Path) -> AnyRecipe: ...
@overload
def load_recipe(path: Path, kind: type[R]) -> R: ...
def load_recipe(path: Path, kind: type[Record] = Record) -> Record:
    """Reads and checks a recipe; its ``kind`` says which one, and pairs of action codes have none.

    A policy of a pair may inherit with ``like = "other"`` and list only the differences.

    Args:
        path: the file.
        kind: class of recipes that are allowed.

    Raises:
        ConfigError: if the file is missing, is not TOML, makes no bundle, is a recipe of another kind, or holds an
            unknown key or a value that its key does not allow.
    """
    if not path.exists():
        raise ConfigError(f"there is no recipe at {path}; the committed ones are in recipes/")
    raw = read_toml(path, dict[str, Any], "recipe")
    if isinstance(raw.get("observations"), dict):
        raw["observations"] = dict(_tables(raw["observations"]))
    recipe: AnyRecipe
    if "kind" not in raw:
        recipe = read_record(raw | {"policies": _resolve_like(raw.get("policies", {}))}, CodesRecipe, str(path))
        if not recipe.bundles:
            raise ConfigError(
                f'{path} makes no bundle; add [bundles] with at least one line NAME = ["TARGET", "DRAFT"]'
            )
    elif raw["kind"] not in KINDS:
        raise unknown_name(f"value of {path}: kind", str(raw["kind"]), KINDS)
    else:
        recipe = read_record(raw, KINDS[raw["kind"]], str(path))
    if not isinstance(recipe, kind):
        raise ConfigError(f"{path} is of kind {raw.get('kind')!r}; this needs a {kind.__name__}")
    return recipe


def chunk_recipe_of(manifest: Mapping[str, Any], name: str) -> ChunkRecipe:
    """The recipe in the manifest of a chunk policy's bundle; refused if it is none."""
    settings = {key: value for key, value in manifest.items() if key != "teacher"}
    return read_record(settings, ChunkRecipe, f"the recipe of {name}")


def plain(recipe: Record) -> dict[str, Any]:
    """A recipe as plain values, as in JSON."""
    values: dict[str, Any] = msgspec.to_builtins(recipe)
    return values


def check_history(policy: Seeing) -> None:
    """Refuses a history of an observation that the policy does not have."""
    for name in policy.history:
        if policy.sees and name not in policy.sees:
            raise unknown_name("observation in history", name, policy.sees)


def _tables(observations: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Converts entries to tables: a string is the dataset's key; unquoted ``image.front = ...`` is nested in TOML."""
    for part, value in observations.items():
        name = f"{above}{part}"
        if isinstance(value, str):
            yield name, {"key": value}
        elif isinstance(value, dict) and value.keys().isdisjoint(Source.__struct_fields__):
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
