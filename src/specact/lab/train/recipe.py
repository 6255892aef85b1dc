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
from specact.files import check_name
from specact.gates.settings import table_entries
from specact.lab.data.readers import Demonstrations, Source
from specact.lab.rollout.steps import SHARD
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

_MOST_TUPLES = 2**20  # of codes; their table of chunks has some hundred megabytes


class Recipe(Demonstrations, frozen=True, kw_only=True):
    """Base class of recipes that learn from demonstrations.

    With ``skip_disturbed`` chunks beyond a disturbed step do not count, see
    :meth:`~specact.lab.data.episodes.Episodes.followed`. An observation's history has length ``window`` by default, a
    goal none; a policy predicts ``chunk`` actions at once.
    """

    skip_disturbed: bool = False
    window: Size = 5
    chunk: Size = 1

    def __post_init__(self) -> None:
        """Also refuses anything but one source of demonstrations, and one control rate."""
        super().__post_init__()
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

    @property
    def seeing(self) -> Mapping[str, Seeing]:
        """The observation settings of its policies, by name."""
        return {}


class Optimisation(Record, frozen=True, kw_only=True):
    """``steps`` of AdamW with linear ``warmup`` and a cosine schedule down to 2 %.

    ``average`` is the decay of the exponential moving average of the weights, which is exported.
    """

    steps: Count = 4000
    batch: Size = 256
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-2
    warmup: WholeNumber = 100
    average: BelowOne = 0.998


class EncoderRecipe(Optimisation, frozen=True, kw_only=True):
    """A policy's image encoder, see :mod:`specact.lab.train.encoder`.

    ``tokens`` of a frame are one of the coordinates of all ``keypoints``, before two layers of ``width``, or one per
    patch. The convolutions have these ``channels``; the first has a stride of 4, the second of 2, the later ones of 1,
    or of 2 with patches (three make patches of 16 x 16 pixels). Frames are first downsampled to ``pixels`` x
    ``pixels``, unless that is 0. ``shift`` is the maximum random shift of a window's frames in training, of an encoder
    that learns with its policy. With ``learns``, a numeric observation of the demonstrations such as a pose, it is
    first trained to predict that from a frame, with half of every batch from so many random ``scenes`` of the
    environment, and then frozen.
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
    """The residual VQ tokenizer: G = ``codebooks`` of K = ``codes``, and its training.

    ``latent`` and ``hidden`` are widths; ``decay`` is that of the codebooks' exponential moving average, ``commitment``
    the weight of that loss; codes that a share of the chunks below ``dead_share`` uses are re-initialised.
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
    """The recipe of a VQ-BeT policy: a transformer, with heads of ``head_width`` (0: linear).

    It ``sees`` these observations (if empty, all but camera frames), with histories of these lengths where they are not
    those of ``[observations]`` or the recipe's ``window``; 0 is only the newest. With ``sequential`` the secondary code
    is predicted given the primary. The offset is trained on the ``ground_truth`` codes, which then determine the
    action, or on ``sampled`` ones (the official recipe), which it learns to correct. ``focal`` is gamma;
    ``state_noise`` is in standardised units. Products are trained in ``bfloat16`` where that is faster: on a CPU that
    has it (AVX-512, AMX, SVE), from a width of 32. After the share ``snapshot`` of the steps the raw weights are saved,
    too, as ``NAME@snapshot``.
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

    Of a chunk ``execute`` actions are executed; with ``overlap = "average"`` those that several chunks predict for one
    step are averaged. A ``goal`` (an observation without a history) is a ``token`` before the window, or is
    ``concatenate``d to every observation. ``temperature`` is of both deployed policies; below 1 it compensates the
    focal loss, which makes them underconfident. ``gates`` are recommended settings, see
    :func:`~specact.gates.settings.table_entries`. ``bundles`` are (target, draft) by name, each a policy of
    ``policies`` or ``NAME@snapshot``.
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
        super().__post_init__()
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
    """The chunk policy ``bundle``: by flow matching, by regression, or with autoregressive tokens.

    ``flow`` samples a chunk in several steps, ``regression`` predicts one in a single pass of the same networks, and is
    the cheaper draft; ``tokens`` decodes one of 256 bins after the other, trained on labels ``smooth``ed over so many
    bins. Observations are those of :class:`PolicyRecipe`. ``auxiliary`` is a numeric observation of the demonstrations,
    such as ``privileged.scene``, that a readout of the prefix, which is not exported, learns to predict. ``draws`` of a
    flow are times and noises per window; with ``delays`` it learns to continue d actions under way, d uniform from 0 to
    ``delays`` (training-time RTC). It starts from the weights of ``base``, a bundle of the same networks, if one is
    named. ``snapshots`` intermediate bundles ``BUNDLE-STEP`` are made; select the best by
    rollouts: the loss on held-out demonstrations does not predict success.
    """

    kind: Literal["flow", "regression", "tokens"]
    bundle: str
    base: str = ""
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
    delays: WholeNumber = 0
    learning_rate: Positive = 1e-3
    weight_decay: NotNegative = 1e-2
    warmup: WholeNumber = 200
    average: BelowOne = 0.999
    snapshots: WholeNumber = 0
    bfloat16: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_history(self)
        check_name("a bundle", self.bundle)
        if self.encoder.learns:
            raise ConfigError(
                "encoder.learns is for pairs of action codes; a chunk policy's encoder learns along with it"
            )
        if self.smooth and self.kind != "tokens":
            raise ConfigError(f"smooth is for the labels of tokens; leave it out of a recipe of kind {self.kind!r}")
        if self.delays and (self.kind != "flow" or self.delays >= self.chunk):
            raise ConfigError(f"delays are for a recipe of kind 'flow', and below chunk = {self.chunk}")
        if self.base and self.kind == "tokens":
            raise ConfigError("base is for a recipe of kind 'flow' or 'regression'; leave it out for tokens")
        if self.width % (2 * self.heads):
            raise ConfigError(f"width {self.width} must be an even multiple of heads {self.heads}")
        if self.snapshots >= self.steps:
            raise ConfigError(f"snapshots {self.snapshots} must be fewer than steps {self.steps}")

    @property
    def seeing(self) -> Mapping[str, Seeing]:
        return {self.bundle: self}


class RolloutRecipe(Optimisation, frozen=True, kw_only=True):
    """Base class of recipes that learn from ``episodes`` of rollouts of their ``target`` in ``env``."""

    bundle: str
    target: str
    env: str | None = None
    episodes: int = 300
    seed: Seed = 0
    held_out: BelowOne = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("a bundle", self.bundle)
        if self.episodes < 2 * SHARD or self.episodes % SHARD:
            raise ConfigError(
                f"episodes must be a multiple of {SHARD}, which share a file, and at least {2 * SHARD}, of which one "
                f"file is held out; got {self.episodes}"
            )

    @property
    def files(self) -> tuple[range, range]:
        """The numbers of the files of rollouts that are trained on, and of those that are held out."""
        count = self.episodes // SHARD
        first = count - max(1, round(self.held_out * count))
        return range(first), range(first, count)

    def refuse_data(self, data: Path) -> None:
        """Refuses a folder of demonstrations, which rollouts do not need."""
        if data != Path():
            raise ConfigError(f"{self.bundle} learns from rollouts of its target alone; leave out --data")


class DrafterRecipe(RolloutRecipe, frozen=True, kw_only=True):
    """Drafters of the token policy ``target`` (a bundle), which learn from ``episodes`` of its own rollouts in ``env``.

    ``strict`` are dimensions of an action without a tolerance, such as a gripper; ``groups`` is the group of every
    dimension in HeiSD's acceptance (each its own by default); ``path`` are indices into ``state`` of the point for
    HeiSD's kinematic metric (default: all), whose history is ``window`` inferences. ``top``, ``tree`` and ``nodes`` are
    children of a node, depth and size of the head's tree; ``heads`` and ``dropout`` are its layer's; it learns from
    ``ahead`` autoregressive passes, features with uniform noise of half width ``feature_noise``. ``keeps`` is a folder
    of drafters that are not trained again: of HeiSD's settings only the boundary and the bounds of verify-skip are new.
    """

    kind: Literal["drafters"]
    keeps: str | None = None
    strict: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    window: int = 5
    top: Annotated[int, Meta(ge=1, le=64)] = 8
    tree: Annotated[int, Meta(ge=1, le=64)] = 4
    nodes: Annotated[int, Meta(ge=1, le=512)] = 50
    heads: Count = 4
    dropout: BelowOne = 0.1
    ahead: Count = 4
    feature_noise: NotNegative = 0.2
    steps: Count = 2000
    batch: Size = 64
    learning_rate: Positive = 3e-3
    bfloat16: bool = True


class FlashRecipe(Optimisation, frozen=True, kw_only=True):
    """FLASH's block ``bundle`` for a flow policy.

    ``target`` is a bundle, by name or path, or ``lerobot:PATH@HZ``, see :func:`~specact.load.load_policy`; of one that
    is no bundle, ``data``, ``observations`` and ``held_out`` say the demonstrations that it was trained on; ``env`` is
    only needed where a bundle's environment is code, which runs if it is named here, too. At most
    ``execute`` actions of a chunk are executed before the next round, and ``period`` checked rounds lie between two
    full ones (0: no limit). ``grippers`` are dimensions of an action. ``heads`` divide the width of the encoder's
    tokens.
    """

    kind: Literal["flash"]
    bundle: str
    target: str
    execute: int
    env: str | None = None
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


class CorrectorRecipe(RolloutRecipe, frozen=True, kw_only=True):
    """The corrector ``bundle`` of a chunk policy, ``target``, see :func:`~specact.load.load_policy`.

    ``corrector`` learns the target's answers of now, in ``episodes`` of rollouts in ``env`` that play its chunks up to
    ``most_delay`` control steps late, as far as they reach; the chunk is withheld from a share ``without`` of the
    examples. ``draft`` and ``newest`` are its controls, see :mod:`specact.systems.corrector`. ``a2c2`` learns the
    demonstrated actions, on the demonstrations of the target's bundle. It ``sees`` these numbers of the environment and
    cameras of the target; if empty, the target's numbers. Its layers have the width ``hidden``. ``played_by`` is an
    earlier corrector, which plays half of the rollouts (DAgger, 1011.0686): in the states that corrections lead to.
    """

    kind: Literal["corrector"]
    method: Literal["corrector", "a2c2", "draft", "newest"] = "corrector"
    most_delay: WholeNumber = 8
    played_by: str | None = None
    sees: tuple[str, ...] = ()
    without: Share = 0.25
    hidden: Count = 128
    steps: Count = 8000
    batch: Size = 512
    learning_rate: Positive = 2e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method == "a2c2" and self.played_by is not None:
            raise ConfigError("method 'a2c2' learns from demonstrations, which nobody plays; leave out played_by")


R = TypeVar("R", bound=Record)
# What says what a policy sees.
Seeing = PolicyRecipe | ChunkRecipe
AnyRecipe = CodesRecipe | ChunkRecipe | DrafterRecipe | FlashRecipe | CorrectorRecipe
KINDS: dict[str, type[ChunkRecipe | DrafterRecipe | FlashRecipe | CorrectorRecipe]] = {
    "flow": ChunkRecipe, "regression": ChunkRecipe, "tokens": ChunkRecipe, "drafters": DrafterRecipe,
    "flash": FlashRecipe, "corrector": CorrectorRecipe,
}  # fmt: skip


@overload
def load_recipe(path: Path) -> AnyRecipe: ...
@overload
def load_recipe(path: Path, kind: type[R]) -> R: ...
def load_recipe(path: Path, kind: type[Record] = Record) -> Record:
    """Reads and checks a recipe; its ``kind`` says which one, and pairs of action codes have none.

    A policy of a pair may inherit with ``like = "other"`` and list only the differences.

    Raises:
        ConfigError: if the file is missing, is not TOML, makes no bundle, is no recipe of the class ``kind``, or holds
            an unknown key or a value that its key does not allow.
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
    settings = {key: value for key, value in manifest.items() if key not in ("teacher", "precision")}  # an earlier key
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
