"""Token policies with what is trained for them: the bundle of drafters, every named decoding, and the pair of both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
from msgspec import Meta

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import LoadedPolicy, check_made_for
from specact.families.tokens.pair import GREEDY, Decoding, TokenParts
from specact.families.tokens.policy import BINS, Prefilled, TokenBundle
from specact.families.tokens.speculative import Bigram, TreeDrafter, relaxed
from specact.pair import Pair, PairSource
from specact.records import check_fields
from specact.systems.heisd import HEISD, KinematicMetric, Memory, SkipRule
from specact.systems.kerv import KERV, Kalman, Motion
from specact.systems.specvla import SPECVLA, HeadDrafter, TokenHead

DECODINGS: dict[str, Decoding] = {
    "ar": GREEDY,
    "strict": Decoding("a head drafts a tree, equal tokens are accepted: greedy decoding's tokens", then="head"),
    "strict_last": Decoding("the last action drafts, equal tokens are accepted", "last"),
    "last": Decoding("the last action drafts, within 9 bins", "last", bins=9),
    "draft_9": Decoding("the draft policy drafts, within 9 bins", "draft", bins=9),
    "draft_fixed": Decoding(
        "a draft policy instead of the memory, two of three inferences not verified: the control", "draft",
        then="head", bins=9, gate="periodic",
    ),
    **SPECVLA,
    **KERV,
    **HEISD,
}  # fmt: skip
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
        groups: of HeiSD, the group of each dimension.
        path: of HeiSD, at least 2 indices into the observation ``state``: the point whose path the metric uses.
        metric, fast, skip: of HeiSD; ``fast`` is the smallest F at which the memory proposes.
        filters, scale: of KERV, a filter by motion model, ``velocity`` and ``walk``, and K_S.
        top, depth, nodes: size of the head's tree, see :class:`~specact.systems.specvla.HeadDrafter`.
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

    def __post_init__(self) -> None:
        check_fields(self)
        motions = {name: kalman.motion for name, kalman in self.filters.items()}
        if motions != {motion: motion for motion in get_args(Motion)}:
            allowed = " and ".join(sorted(get_args(Motion)))
            raise ConfigError(f"filters must have exactly one of each motion, under its name: {allowed}; got {motions}")

    def check(self, spec: ChunkSpec) -> None:
        """Refuses settings that do not fit a target's actions and observation.

        Raises:
            ConfigError: for such settings; the message names the field and what is allowed.
        """
        relaxed(0, spec.chunk * spec.actions, spec.actions, self.strict, self.groups)
        sizes = {name: len(kalman.q) for name, kalman in self.filters.items()}
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
    """The settings of drafters, and their target: its fingerprint, tokens T of a chunk, width W of its features."""

    target: str
    length: int
    width: int
    settings: DrafterSettings


@dataclass(frozen=True)
class DrafterBundle(Bundle[DraftedFor]):
    """A loaded bundle of drafters.

    Attributes:
        by_name: drafters that run beside the target, by their names in a request.
        head, memory: of Spec-VLA and of HeiSD.
    """

    by_name: dict[str, TreeDrafter]
    head: TokenHead
    memory: Memory

    @property
    def settings(self) -> DrafterSettings:
        """Other fitted parameters."""
        return self.spec.settings


def load_drafters(name_or_path: str | Path, target: TokenBundle, *, compute: Compute = CPU) -> DrafterBundle:
    """Loads a bundle of drafters, a folder or a name, for a target.

    Raises:
        BundleError, ConfigError: as :func:`~specact.bundle.bundle.open_bundle`; BundleError for drafters that were
            trained for another target, or whose settings do not fit it.
    """
    bundle = open_bundle(name_or_path, "drafters", DraftedFor, DRAFTER_PARTS)
    path, settings = bundle.path, bundle.spec.settings
    repair = 'take that target, or train drafters for this one with specact train and a recipe of kind = "drafters"'
    check_made_for(bundle, target, bundle.spec.target, repair)
    length, width = target.networks.length, target.networks.width
    bigram = bundle.tensors("bigram", {"tokens": (np.uint8, (length - 1, BINS, "most"))})
    entries = bundle.tensors("memory", {"features": (np.float16, ("n", width)), "tokens": (np.uint8, ("n", length))})
    try:
        settings.check(target.spec)
        memory = Memory(entries["features"].astype(np.float32), entries["tokens"].astype(np.int64))
    except ConfigError as error:
        raise BundleError(f"the drafters in {path} do not fit {target.name}: {error}; train new ones") from None
    head = TokenHead(bundle.files["head"], length, width, compute=compute)
    drafters: dict[str, TreeDrafter] = {
        "bigram": Bigram(bigram["tokens"][..., 0].astype(np.int64)),
        "head": HeadDrafter(head, settings.top, settings.depth, settings.nodes),
    }
    return DrafterBundle(path, bundle.manifest, bundle.spec, bundle.files, drafters, head, memory)


def load_token_pair(
    bundle: TokenBundle, draft: LoadedPolicy | None = None, source: PairSource | None = None, *,
    decoding: Decoding = GREEDY, compute: Compute = CPU,
) -> Pair[Prefilled]:  # fmt: skip
    """A token policy's bundle as a pair, with the drafters in its folder and a draft policy on the device.

    Raises:
        BundleError: if the drafters are damaged or incompatible with the target.
        ConfigError: if the draft is incompatible with the target.
    """
    folder = bundle.path / DRAFTERS
    drafters = load_drafters(folder, bundle, compute=compute) if folder.exists() else None
    prints = [part.fingerprint for part in (bundle, drafters, draft) if part is not None]
    policy = bundle.policy(drafters.by_name if drafters else None)
    return TokenParts(
        bundle.name, policy, drafters, draft.policy if draft else None, decoding, bundle.fingerprint,
        env=bundle.env, fingerprint=joint_fingerprint(*prints), path=bundle.path,
        source=source or PairSource(str(bundle.path)),
    ).pair()  # fmt: skip
