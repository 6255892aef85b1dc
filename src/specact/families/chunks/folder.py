"""A pair of chunk policies as a folder: a manifest with the sources of both policies, and a copy of the draft.

A manifest names only bundles. Sources that run code (``MODULE:NAME``, LeRobot), ONNX files with a description, whose
graphs are not checked, and servers have to be named again when the pair is loaded.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from specact.bundle.bundle import Bundle, check_scale, copy_bundle, find_bundle, open_bundle
from specact.bundle.manifest import FORMAT, MANIFEST, Manifest
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.pair import ChunkParts
from specact.families.chunks.policy import Chunk, ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import LoadedPolicy, kind_of_source, try_out
from specact.families.chunks.wire import ChunkExchange
from specact.files import check_folder, check_name, write_json
from specact.pair import Pair, PairSource
from specact.records import NotNegative, Positive, Record, Size, check_fields, read_record
from specact.units import ActionUnits

# Folder of a pair's draft, within the pair's.
DRAFT = "draft"
_PARTS = ("draft", "target")
Load = Callable[..., LoadedPolicy]


@dataclass(frozen=True)
class PairSettings:
    """How two chunk policies work as a pair.

    Attributes:
        execute: actions of a chunk that are executed before the next inference; the whole of the shorter chunk if not
            given.
        accept_within: drafted actions are executed up to the first that is further than this from the target's (root
            mean square, in units in which the range of the actions is [-1, 1]); 0 takes the target's chunk whole.
        overlap: average takes the mean of all chunks that predict a control step.
        env: environment the pair is for; that of the target, or else of the draft, if not given.
        draft_steps: Euler steps of a draft that is a flow policy.
        target_steps: Euler steps of a target that is a flow policy.
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

    Args:
        out: the folder; must not exist.
        draft, target: as ``load`` takes them.
        settings: how they work together.
        load: see :func:`specact.load.load_policy`.

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
    within, overlap = settings.accept_within, settings.overlap
    ChunkParts(out.name, small.policy, units, large.policy.spec, None, count, within)
    manifest = {
        "format": FORMAT,
        "kind": "chunks",
        "name": out.name,
        "env": settings.env or large.env or small.env,
        "spec": {
            "target": large.policy.spec.describe(),
            "execute": count,
            "accept_within": within,
            "overlap": overlap,
        },
        "sources": {"draft": _stored_source(draft), "target": _stored_source(target)},
        "steps": {"draft": settings.draft_steps, "target": settings.target_steps},
        "units": {"centre": units.centre.tolist(), "scale": units.scale.tolist()},
        "fingerprints": {"draft": small.fingerprint, "target": large.fingerprint},
    }
    # The folder is renamed into place when it is complete.
    partial_folder = out.with_name(f"{out.name}.{os.getpid()}.partial")
    try:
        partial_folder.mkdir(parents=True)
        if kind_of_source(draft) == "folder":
            copy_bundle(find_bundle(draft), partial_folder / DRAFT, ignore=["calibration"])
        write_json(partial_folder / "manifest.json", manifest)
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


def load_chunk_pair(path: Path, load: Load, named: PairSource, compute: Compute = CPU) -> Pair[Chunk]:
    """Loads a pair's folder; its target is loaded on first use.

    Args:
        path: the folder.
        load: see :func:`specact.load.load_policy`.
        named: draft and target that replace those of the manifest, or are missing there.
        compute: where their networks run.

    Raises:
        BundleError: if it cannot be read, or a policy does not have the fingerprint that the pair was made with.
        ConfigError: if the draft has to be named.
    """
    bundle, units = _read(path)
    manifest, spec, copied = bundle.manifest, bundle.spec, path / DRAFT
    source = named.draft or (str(copied) if copied.is_dir() else manifest.sources["draft"])
    if source is None:
        raise ConfigError(f"the draft of {path} is no bundle; name it again with --draft MODULE:NAME or FILE.toml")
    small = _load_source(source, load, manifest, "draft", compute)
    target_source = named.target or manifest.sources["target"]
    load_target: Callable[[], ChunkPolicy] | None = None
    if target_source is not None:
        load_target = partial(_load_target, target_source, load, manifest, compute)
    return ChunkParts(
        manifest.name, small.policy, units, spec.target, load_target, spec.execute, spec.accept_within, spec.overlap,
        env=manifest.env, fingerprint=bundle.fingerprint, path=path, source=named,
    ).pair()  # fmt: skip


def load_chunk_target(path: Path, load: Load, target: str | None = None, compute: Compute = CPU) -> ChunkExchange:
    """Loads the target of a pair's folder, for a server, which needs no draft; arguments as above.

    Raises:
        BundleError: as above.
        ConfigError: if the target has to be named.
    """
    bundle, _ = _read(path)
    source = target or bundle.manifest.sources["target"]
    if source is None:
        raise ConfigError(f"the target of {path} is no bundle; name it again with --target MODULE:NAME or FILE.toml")
    policy = _load_target(source, load, bundle.manifest, compute)
    return ChunkExchange(policy.spec, bundle.name, bundle.fingerprint, lambda: policy)


class PairSpec(Record, frozen=True):
    """What a pair's manifest says of it; see :class:`PairSettings`."""

    target: ChunkSpec
    execute: Size
    accept_within: NotNegative
    overlap: Literal["drop", "average"]


class _Units(Record, frozen=True):
    centre: tuple[float, ...]
    scale: tuple[Positive, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not len(self.centre) == len(self.scale) > 0:
            raise ConfigError(f"centre and scale must be of as many actions, got {self.centre} and {self.scale}")


def _read(path: Path) -> tuple[Bundle[PairSpec], ActionUnits]:
    """Reads and checks a pair's manifest."""
    bundle = open_bundle(path, "chunks", PairSpec, {})
    manifest, file = bundle.manifest, path / MANIFEST
    told = read_record(manifest.units, _Units, f"{file}: units", BundleError)
    with np.errstate(over="ignore"):
        units = ActionUnits(np.array(told.centre, np.float32), np.array(told.scale, np.float32))
    check_scale(file, units.centre, units.scale)
    for part in _PARTS:
        if not {part} <= manifest.sources.keys() & manifest.steps.keys() & manifest.fingerprints.keys():
            raise BundleError(f"{file} must have the source, steps and fingerprint of the {part}; make the pair again")
        # A manifest is not trusted: importing a module would run its code.
        source = manifest.sources[part]
        if source is not None and kind_of_source(source) not in ("part", "folder"):
            raise BundleError(
                f"{file} may name a bundle as its {part}, and no code, but names {source!r:.60}; name the {part} "
                f"yourself with --{part}"
            )
    return bundle, units


def _load_source(source: str, load: Load, manifest: Manifest, part: str, compute: Compute) -> LoadedPolicy:
    found, wanted = load(source, steps=manifest.steps[part], compute=compute), manifest.fingerprints[part]
    if found.fingerprint != wanted:
        raise BundleError(
            f"{source} has fingerprint {found.fingerprint!r}, but the pair was made with {wanted!r}; make it again "
            "with specact pair"
        )
    return found


def _load_target(source: str, load: Load, manifest: Manifest, compute: Compute) -> ChunkPolicy:
    return _load_source(source, load, manifest, "target", compute).policy


def _stored_source(source: str) -> str | None:
    """The source as a manifest stores it: the path of a bundle, None for any other kind."""
    kind = kind_of_source(source)
    if kind == "folder":
        return str(find_bundle(source).resolve())
    if kind == "part":
        name, _, part = source.rpartition("#")
        return f"{find_bundle(name).resolve()}#{part}"
    return None
