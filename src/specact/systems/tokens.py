"""Token policies with what is trained for them: the bundle of drafters, every named decoding, and the pair of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy
from specact.families.tokens.drafters import Bigram
from specact.families.tokens.pair import GREEDY, Decoding, TokenParts
from specact.families.tokens.policy import BINS, TokenBundle
from specact.families.tokens.speculative import TreeDrafter, grouped
from specact.families.tokens.verify import Prefilled
from specact.pair import Pair, PairSource
from specact.records import check_fields
from specact.systems.heisd import HEISD, Index, KinematicMetric, SkipRule, load_entries
from specact.systems.kerv import KERV, Kalman, Motion
from specact.systems.specvla import SPECVLA, HeadDrafter, TokenHead

# Controls of HeiSD.
_FIXED = "{} instead of the memory, two of three inferences not verified: the control"
DECODINGS: dict[str, Decoding] = {
    "ar": GREEDY,
    "strict": Decoding("a head drafts a tree, equal tokens are accepted: greedy decoding's tokens", then="head"),
    "strict_last": Decoding("the last action drafts, equal tokens are accepted", "last"),
    "strict_draft": Decoding("the draft policy drafts, equal tokens are accepted", "draft"),
    "draft_9": Decoding("the draft policy drafts, within 9 bins", "draft", bins=9),
    "last": Decoding("the last action drafts, within 9 bins", "last", bins=9),
    "last_fixed": Decoding(_FIXED.format("the last action"), "last", then="head", bins=9, gate="periodic"),
    "draft_fixed": Decoding(_FIXED.format("a draft policy"), "draft", then="head", bins=9, gate="periodic"),
    **SPECVLA,
    **KERV,
    **HEISD,
}
# Folder of a bundle's drafters.
DRAFTERS = "drafters"
DRAFTER_PARTS = {"head": "head.onnx", "bigram": "bigram.safetensors", "memory": "memory.safetensors"}
# A tree may be about ten times as large as those of the papers, so that a manifest cannot ask for any amount of memory.
UpTo64 = Annotated[int, Meta(ge=1, le=64)]
UpTo512 = Annotated[int, Meta(ge=1, le=512)]


@dataclass(frozen=True)
class DrafterSettings:
    """Parameters of the methods besides networks, fitted to the target's own rollouts.

    Attributes:
        strict: dimensions of an action without tolerance, such as a gripper.
        groups: the group of each dimension, see :func:`~specact.families.tokens.speculative.grouped`.
        path: at least 2 indices into the observation ``state`` of the point whose path HeiSD's metric uses.
        filters: by motion model, ``velocity`` and ``walk``.
        scale: K_S of KERV's threshold, see :func:`~specact.systems.kerv.typical_change`.
        metric: of a path with a point for every inference.
        fast: smallest F at which the memory proposes.
        skip: rule for skipping verification.
        top, depth, nodes: size of the head's tree, see :class:`~specact.systems.specvla.HeadDrafter`; 1 to 64, 1
            to 64 and 1 to 512.
        graph: whether the memory is searched in a graph, see :class:`~specact.systems.heisd.Index`.

    Raises:
        ConfigError: for a number out of range, or filters other than these two.
    """

    strict: tuple[int, ...]
    groups: tuple[int, ...]
    path: tuple[int, ...]
    filters: dict[str, Kalman]
    scale: Annotated[float, Meta(ge=1e-6)]
    metric: KinematicMetric
    fast: float
    skip: SkipRule
    top: UpTo64 = 8
    depth: UpTo64 = 4
    nodes: UpTo512 = 50
    graph: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        motions = sorted(get_args(Motion))
        if sorted(self.filters) != motions or any(one.motion != name for name, one in self.filters.items()):
            found = {name: one.motion for name, one in self.filters.items()}
            raise ConfigError(
                f"filters must have exactly one of each motion, under its name: {' and '.join(motions)}; got {found}"
            )

    def check(self, spec: ChunkSpec) -> None:
        """Refuses settings that do not fit a target's actions and observation.

        Raises:
            ConfigError: for such settings; the message names the field and what is allowed.
        """
        grouped(0, 0, spec.chunk * spec.actions, spec.actions, self.groups, self.strict)
        sizes = {name: len(one.q) for name, one in self.filters.items()}
        if set(sizes.values()) != {spec.actions}:
            raise ConfigError(f"filters must be of the {spec.actions} dimensions of an action, got {sizes}")
        state = spec.observation.fields.get("state")
        width = state.shape[0] if state is not None and state.history and len(state.shape) == 1 else 0
        if len(set(self.path)) < 2 or not all(0 <= index < width for index in self.path):
            allowed = f"from 0 to {width - 1}" if width else "but the target sees no vector of that name with a history"
            raise ConfigError(
                f"path must be at least 2 different indices into the state, {allowed}; got {list(self.path)}"
            )


@dataclass(frozen=True)
class DraftedFor:
    """The target of the drafters, and the settings fitted to it.

    Attributes:
        target: fingerprint of its bundle.
        length: T, tokens of its chunks.
        width: W, dimension of its features.
        settings: see :class:`DrafterSettings`.
    """

    target: str
    length: int
    width: int
    settings: DrafterSettings


@dataclass(frozen=True)
class BigramTable:
    """The most frequent next tokens of each token, per position, in descending order.

    Attributes:
        tokens: ``[T - 1, 256, K]``; entry i holds the tokens at position i + 1 given the token at position i.
        log_probs: of each of them, ``[T - 1, 256, K]``.
    """

    tokens: NDArray[np.uint8]
    log_probs: NDArray[np.float16]


@dataclass(frozen=True)
class DrafterBundle(Bundle[DraftedFor]):
    """A loaded bundle of drafters.

    Attributes:
        head, bigram, memory: the parts.
    """

    head: TokenHead
    bigram: BigramTable
    memory: Index

    @property
    def settings(self) -> DrafterSettings:
        """Other fitted parameters."""
        return self.spec.settings

    @property
    def own(self) -> dict[str, TreeDrafter]:
        """The target's own drafters, by their names in a request."""
        settings = self.settings
        return {
            "bigram": Bigram(self.bigram.tokens.astype(np.int64)),
            "head": HeadDrafter(self.head, settings.top, settings.depth, settings.nodes),
        }


def load_drafters(name_or_path: str | Path, target: TokenBundle, *, compute: Compute = CPU) -> DrafterBundle:
    """Loads a bundle of drafters for a target.

    Args:
        name_or_path: a folder, or the name of a bundle that comes with the package.
        target: the target of the drafters.
        compute: where the head runs.

    Raises:
        BundleError: if a part is missing, damaged, or does not match its fingerprint in the manifest, if it is no
            bundle of drafters, if they were trained for another target, or if their settings do not fit it.
        ConfigError: if there is no bundle of that name.
        MissingExtraError: if its memory is searched in a graph, without the package voyager.
    """
    bundle = open_bundle(name_or_path, "drafters", DraftedFor, DRAFTER_PARTS)
    made_for, path = bundle.spec, bundle.path
    if made_for.target != target.fingerprint:
        raise BundleError(
            f"the drafters in {path} learned from the target {made_for.target}, but {target.name} is "
            f"{target.fingerprint}; take that target, or train drafters for this one with specact train and a recipe "
            'of kind = "drafters"'
        )
    try:
        made_for.settings.check(target.spec)
    except ConfigError as error:
        raise BundleError(
            f"the settings in the manifest of {path} do not fit the target {target.name}: {error}; train the drafters "
            "again"
        ) from None
    length, width = target.networks.length, target.networks.width
    head = TokenHead(bundle.files["head"], length, width, compute=compute)
    shape = (length - 1, BINS, "most")
    table = bundle.tensors("bigram", {"tokens": (np.uint8, shape), "log_probs": (np.float16, shape)})
    memory = load_entries(bundle.files["memory"])
    if memory.tokens.shape[1] != length or memory.features.shape[1] != width:
        raise BundleError(f"the memory in {path} is not of this target's chunks and features; copy the bundle again")
    index = Index(memory, graph=made_for.settings.graph)
    return DrafterBundle(path, bundle.manifest, made_for, bundle.files, head, BigramTable(**table), index)


def load_token_pair(
    bundle: TokenBundle,
    draft: LoadedPolicy | None = None,
    source: PairSource | None = None,
    *,
    decoding: Decoding = GREEDY,
    compute: Compute = CPU,
) -> Pair[Prefilled]:
    """A token policy's bundle as a pair, with the drafters in its folder.

    Args:
        bundle: the target.
        draft: a policy on the device.
        source: how it was named.
        decoding: of verified steps.
        compute: of the drafters.

    Raises:
        BundleError: if the drafters are damaged or incompatible with the target.
        ConfigError: if the draft is incompatible with the target.
    """
    folder = bundle.path / DRAFTERS
    drafters = load_drafters(folder, bundle, compute=compute) if folder.exists() else None
    prints = [part.fingerprint for part in (bundle, drafters, draft) if part is not None]
    return TokenParts(
        bundle.name, bundle.policy(), drafters, None if draft is None else draft.policy, decoding, env=bundle.env,
        fingerprint=joint_fingerprint(*prints), path=bundle.path, source=source or PairSource(str(bundle.path)),
    ).pair()  # fmt: skip
