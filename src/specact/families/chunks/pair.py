"""Two chunk policies as a pair: executes the draft's chunk, the target's, or a prefix of the first, then the second.

This is not exact: accepted actions differ from the target's by up to the threshold. A pair is stored as a folder: a
manifest with the sources of both policies, and a copy of the draft. A manifest names only bundles. Sources of code
(``MODULE:NAME``, LeRobot), ONNX files with a description, and servers have to be named again when the pair is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, check_scale, copy_bundle, find_bundle, named_bundles, open_bundle
from specact.bundle.manifest import FORMAT, MANIFEST
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import Chunk, ChunkExchange, ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import LoadedPolicy, kind_of_source, load_stored, try_out
from specact.files import check_folder, check_name, write_json
from specact.observation import ObservationSpec, Window
from specact.pair import Answer, Pair, PairIdentity, PairSource, Target, TargetVerifier
from specact.records import NotNegative, Record, Size, read_record
from specact.rng import Role, StepAddress, StepStreams
from specact.types import ActionUnits, Origin, Outcome, Proposal

# Folder of a pair's draft, within the pair's.
DRAFT = "draft"
Load = Callable[..., LoadedPolicy]
Infer = Callable[[Window, np.random.Generator], Chunk]


class PairSpec(Record, frozen=True):
    """How the chunks of a draft and of a target are executed.

    Attributes:
        target: the target's spec.
        execute, overlap: see :class:`~specact.pair.Pair`.
        accept_within: the drafted actions are executed up to the first one that is further from the target's
            [root mean square over the action's dimensions, in normalised units]; 0 takes the target's chunk whole.
    """

    target: ChunkSpec
    execute: Size
    accept_within: NotNegative = 0.0
    overlap: Literal["drop", "average"] = "drop"


@dataclass(frozen=True)
class ChunkParts(PairIdentity):
    """A chunk policy as the draft, and any other as the target.

    Attributes:
        units: of the actions, also for distances between actions.
        load_target: loads the target into this process on first use, or None if it is on a server.
        target_fingerprint: of the target alone; empty if it is unknown.
    """

    draft: ChunkPolicy
    units: ActionUnits
    spec: PairSpec
    load_target: Callable[[], ChunkPolicy] | None
    target_fingerprint: str = ""

    def __post_init__(self) -> None:
        draft, target = self.draft.spec, self.spec.target
        joint_observation(self.draft, target)
        if {self.units.centre.shape, self.units.scale.shape} != {(draft.actions,)}:
            raise ConfigError(f"the range of the actions must be that of {draft.actions} actions")
        most, execute = min(draft.chunk, target.chunk), self.spec.execute
        if execute > most:
            raise ConfigError(f"execute must lie between 1 and {most}, the shorter of both chunks; got {execute}")

    @cached_property
    def target(self) -> ChunkPolicy:
        """The target as a chunk policy; raises BundleError where it is only on a server."""
        if self.load_target is None:
            raise BundleError(
                f"the target of {self.name} is only on its server; connect to it, as with specact run --server URL"
            )
        return self.load_target()

    def pair(self) -> Pair[Chunk]:
        """As a pair."""
        seen, spec = self.draft.spec.observation, self.spec
        return Pair(
            **self.identity, observation=joint_observation(self.draft, spec.target), units=self.units,
            execute=spec.execute, rate_hz=self.draft.spec.rate_hz, overlap=spec.overlap, parts=self,
            drafter=lambda: ChunkDrafter(self.draft.infer, seen, self.units),
            target=lambda: ChunkAnswers(self.target),
            verifier=lambda target: ChunkVerifier(target, self.units, spec.execute, spec.accept_within),
            exchange=ChunkExchange(spec.target, self.name, self.target_fingerprint, lambda: self.target, self.units),
        )  # fmt: skip


def joint_observation(draft: ChunkPolicy | None, target: ChunkSpec) -> ObservationSpec:
    """What a target and the draft, if there is one, see.

    Raises:
        ConfigError: for policies of different robots: other numbers of actions, or control rates.
        BundleError: if they see different things under one name.
    """
    if draft is None:
        return target.observation
    spec = draft.spec
    if (spec.actions, spec.rate_hz) != (target.actions, target.rate_hz):
        raise ConfigError(
            f"the draft has {spec.actions} actions at {spec.rate_hz:g} Hz and the target {target.actions} at "
            f"{target.rate_hz:g} Hz; they must be those of one robot"
        )
    return spec.observation.union(target.observation)


class ChunkDrafter:
    """Proposes what a policy's ``infer`` gives for its ``observation``, in ``units``; there is no other evidence."""

    def __init__(self, infer: Infer, observation: ObservationSpec, units: ActionUnits) -> None:
        self._infer, self._observation, self._units = infer, observation, units

    def propose(self, window: Window, rng: np.random.Generator) -> Proposal:
        chunk = self._infer(self._observation.select(window), rng)
        return Proposal(window, self._units.from_environment(chunk))


class ChunkAnswers:
    """A chunk policy as a :class:`~specact.pair.TargetPolicy`, with the random stream of the step.

    Answers are in the environment's units; as on a server, only the policy's own fields are passed, and it may be NaN.
    """

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy, self._streams = policy, StepStreams()

    def answer(self, window: Window, address: StepAddress) -> Chunk:
        seen = self._policy.spec.observation.select(window)
        return self._policy.infer_batch([seen], [self._streams(Role.VERIFY, address)])[0]


class ChunkVerifier(TargetVerifier[Chunk]):
    """Accepts drafted actions up to the first that is too far from the target's; see :class:`PairSpec`."""

    def __init__(self, target: Target[Chunk], units: ActionUnits, execute: int, accept_within: float = 0.0) -> None:
        super().__init__(target)
        self._units, self._execute, self._within = units, execute, accept_within

    def judge(self, answer: Answer[Chunk], proposal: Proposal, address: StepAddress) -> Outcome:
        wanted = self._units.from_environment(answer.value)
        actions, accepted = replaced_after_prefix(proposal.actions, wanted, self._within)
        origins = np.full(len(actions), Origin.REPLACED, np.uint8)
        origins[:accepted] = Origin.ACCEPTED
        # Actions beyond the executed ones do not matter.
        kept = float(accepted >= self._execute)
        return Outcome(actions, origins, len(actions), accepted, answer.times, wanted, kept)


def replaced_after_prefix(drafted: Chunk, wanted: Chunk, within: float) -> tuple[Chunk, int]:
    """The accepted prefix of the drafted actions, then the wanted ones, as many as both have; the prefix's length.

    Args:
        drafted, wanted: ``[n, A]`` and ``[m, A]``, normalised.
        within: largest distance of an accepted action, root mean square over its dimensions; 0 accepts none.
    """
    count = min(len(wanted), len(drafted))
    distance = np.sqrt(np.square(drafted[:count] - wanted[:count]).mean(axis=-1))
    accepted = accepted_length(distance[None], within)
    return np.concatenate([drafted[:accepted], wanted[accepted:count]]), accepted


def accepted_length(distance: NDArray[np.float32], within: float) -> int:
    """Steps before the first at which one of K distances ``[K, n]`` is beyond ``within``, or NaN; none if that is 0."""
    if within <= 0.0:
        return 0
    beyond = np.flatnonzero(~(distance <= within).all(axis=0))
    return int(beyond[0]) if beyond.size else distance.shape[1]


def chunk_distance(drafted: Chunk, wanted: Chunk) -> float:
    """Root mean square over the action's dimensions, mean over the actions, of two chunks ``[n, A]``."""
    return float(np.sqrt(np.square(drafted - wanted).mean(axis=-1)).mean())


class _Units(Record, frozen=True):
    centre: tuple[float, ...]
    scale: tuple[float, ...]


@dataclass(frozen=True)
class PairSettings:
    """How two chunk policies work as a pair.

    Attributes:
        execute, accept_within, overlap: see :class:`PairSpec`; by default all of the shorter chunk is executed.
        env: environment the pair is for; that of the target, or else of the draft, if not given.
        draft_steps, target_steps: Euler steps of a flow policy.
    """

    execute: int | None = None
    accept_within: float = 0.0
    overlap: Literal["drop", "average"] = "drop"
    env: str = ""
    draft_steps: int = 2
    target_steps: int = 10


DEFAULTS = PairSettings()


def write_pair(out: Path, draft: str, target: str, settings: PairSettings, load: Load) -> Pair[Chunk]:
    """Writes a pair's folder. A draft that is a bundle is copied into it; the target stays where it is.

    Raises:
        ConfigError: if the folder exists, the policies do not fit together, or neither says the range of its actions.
        BundleError: if a policy cannot be used.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another folder")
    check_name("a pair", out.name)
    check_folder(out)
    small, large = load(draft, steps=settings.draft_steps), load(target, steps=settings.target_steps)
    for part, source, loaded in (("draft", draft, small), ("target", target, large)):
        field = f"{part}_steps"
        if getattr(settings, field) != getattr(DEFAULTS, field) and not isinstance(loaded.policy, FlowPolicy):
            raise ConfigError(f"{field} is for a flow policy, and {source} is none; leave it out")
        try_out(loaded)
    units = _joint_units(small.units, large.units)
    if units is None:
        raise ConfigError(
            "neither policy says the range of its actions, in which distances are measured and which actions cannot "
            "leave; give one of them low and high"
        )
    most = min(small.policy.spec.chunk, large.policy.spec.chunk)
    count = most if settings.execute is None else settings.execute
    spec = PairSpec(large.policy.spec, count, settings.accept_within, settings.overlap)
    ChunkParts(out.name, small.policy, units, spec, None)
    manifest = {
        "format": FORMAT, "kind": "chunks", "name": out.name, "env": settings.env or large.env or small.env,
        "spec": structs.asdict(spec) | {"target": spec.target.describe()},
        "sources": {"draft": stored_source(draft), "target": stored_source(target)},
        "steps": {"draft": settings.draft_steps, "target": settings.target_steps},
        "units": {"centre": units.centre.tolist(), "scale": units.scale.tolist()},
        "fingerprints": {"draft": small.fingerprint, "target": large.fingerprint},
    }  # fmt: skip
    # The folder is renamed into place when it is complete.
    partial_folder = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial_folder.mkdir(parents=True)
        if kind_of_source(draft) == "folder":
            copy_bundle(find_bundle(draft), partial_folder / DRAFT, ignore=["calibration"])
        write_json(partial_folder / MANIFEST, manifest)
        partial_folder.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)  # has been renamed if all went well
    return load_chunk_pair(out, load, PairSource(str(out), draft, target))


def _joint_units(draft: ActionUnits | None, target: ActionUnits | None) -> ActionUnits | None:
    """Units whose range holds the actions of both policies: no action of the target may be cut to the draft's range."""
    if draft is None or target is None or draft.centre.shape != target.centre.shape:
        return draft or target
    low = np.minimum(draft.centre - draft.scale, target.centre - target.scale)
    return ActionUnits.of_range(low, np.maximum(draft.centre + draft.scale, target.centre + target.scale))


@dataclass(frozen=True)
class PairBundle(Bundle[PairSpec]):
    """A pair's folder, which names its policies."""

    units: ActionUnits

    def policy(self, part: str, named: str | None, load: Load, compute: Compute) -> ChunkPolicy:
        """The draft or the target, as named or the folder's own, with the fingerprint that the pair knows."""
        wanted, steps = self.manifest.fingerprints[part], self.manifest.steps[part]
        repair = "make it again with specact pair"
        return load_stored(self, part, named, load, wanted, repair, steps=steps, compute=compute)


def load_chunk_pair(path: Path, load: Load, named: PairSource, compute: Compute = CPU) -> Pair[Chunk]:
    """Loads a pair's folder; its target is loaded on first use, by ``load``, see :func:`specact.load.load_policy`.

    The ``named`` draft and target replace those of the manifest, or are missing there.

    Raises:
        BundleError: if it cannot be read, or a policy does not have the fingerprint that the pair was made with.
        ConfigError: if the draft has to be named.
    """
    bundle, copied = _read(path), path / DRAFT
    draft = bundle.policy("draft", named.draft or (str(copied) if copied.is_dir() else None), load, compute)
    manifest, load_target = bundle.manifest, partial(bundle.policy, "target", named.target, load, compute)
    known = named.target or manifest.sources["target"]
    return ChunkParts(
        bundle.name, draft, bundle.units, bundle.spec, load_target if known else None, manifest.fingerprints["target"],
        env=bundle.env, fingerprint=bundle.fingerprint, path=path, source=named,
    ).pair()  # fmt: skip


def load_chunk_target(path: Path, load: Load, target: str | None = None, compute: Compute = CPU) -> ChunkExchange:
    """Loads the target of a pair's folder, for a server, which needs no draft; see :func:`load_chunk_pair`."""
    bundle = _read(path)
    policy = bundle.policy("target", target, load, compute)
    fingerprint = bundle.manifest.fingerprints["target"]
    return ChunkExchange(policy.spec, bundle.name, fingerprint, lambda: policy, bundle.units, inpaints=policy.inpaints)


def _read(path: Path) -> PairBundle:
    """Reads and checks a pair's manifest."""
    bundle = open_bundle(path, "chunks", PairSpec, {})
    manifest, file = bundle.manifest, path / MANIFEST
    stored = read_record(manifest.units, _Units, f"{file}: units", BundleError)
    if len(stored.centre) != len(stored.scale):
        raise BundleError(f"{file}: units must have as many scales as centres; make the pair again")
    with np.errstate(over="ignore"):
        units = ActionUnits(np.array(stored.centre, np.float32), np.array(stored.scale, np.float32))
    check_scale(file, units.centre, units.scale)
    for part in ("draft", "target"):
        if not {part} <= manifest.sources.keys() & manifest.steps.keys() & manifest.fingerprints.keys():
            raise BundleError(f"{file} must have the source, steps and fingerprint of the {part}; make the pair again")
    return PairBundle(path, manifest, bundle.spec, bundle.files, units)


def stored_source(source: str) -> str | None:
    """The source as a manifest stores it: name or path of a bundle, with ``#PART``, or None for any other kind."""
    kind = kind_of_source(source)
    name, mark, part = source.rpartition("#") if kind == "part" else (source, "", "")
    if kind not in ("folder", "part"):
        return None
    bundle = find_bundle(name)
    # A name holds in every checkout, a path on this machine alone.
    return f"{name if bundle == named_bundles().get(name) else bundle.resolve()}{mark}{part}"
