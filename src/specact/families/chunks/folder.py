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
from typing import Literal, NamedTuple

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.chunks.bundle import read_chunk_spec
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.pair import ChunkPair
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import LoadedPolicy, kind_of_source, load_policy, try_out
from specact.families.chunks.wire import ChunkResponder
from specact.families.codes.bundle import find_bundle
from specact.families.head import check_head
from specact.files import check_folder, check_name, write_json
from specact.pair import Named
from specact.runtime.limits import check_integer
from specact.runtime.manifest import FORMAT, joint_fingerprint, read_manifest
from specact.units import ActionUnits

# Folder of a pair's draft, within the pair's.
DRAFT = "draft"
_PARTS = ("draft", "target")
_OVERLAPS = ("drop", "average")


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


_DEFAULTS = PairSettings()


def make_pair(out: Path, draft: str, target: str, settings: PairSettings = _DEFAULTS) -> ChunkPair:
    """Writes a pair's folder. A draft that is a bundle is copied into it; the target stays where it is.

    Args:
        out: the folder; must not exist.
        draft, target: as :func:`~specact.families.chunks.sources.load_policy` takes them.
        settings: how they work together.

    Raises:
        ConfigError: if the folder exists, the policies do not fit together, or neither says the range of its actions.
        BundleError: if a policy cannot be used.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another folder")
    check_name("a pair", out.name)
    check_folder(out)
    small, large = load_policy(draft, steps=settings.draft_steps), load_policy(target, steps=settings.target_steps)
    for part, source, loaded in (("draft", draft, small), ("target", target, large)):
        field = f"{part}_steps"
        if getattr(settings, field) != getattr(_DEFAULTS, field) and not isinstance(loaded.policy, FlowPolicy):
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
    ChunkPair(out.name, small.policy, units, large.policy.spec, None, count, within, overlap)
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
            shutil.copytree(find_bundle(draft), partial_folder / DRAFT, ignore=shutil.ignore_patterns("calibration"))
        write_json(partial_folder / "manifest.json", manifest)
        partial_folder.rename(out)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}; choose another place") from error
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)  # has been renamed if all went well
    return load_chunk_pair(out, draft=draft, target=target)


def _joint_units(draft: ActionUnits | None, target: ActionUnits | None) -> ActionUnits | None:
    """Units whose range holds the actions of both policies: no action of the target may be cut to the draft's range."""
    if draft is None or target is None or draft.centre.shape != target.centre.shape:
        return draft or target
    low = np.minimum(draft.centre - draft.scale, target.centre - target.scale)
    return ActionUnits.of_range(low, np.maximum(draft.centre + draft.scale, target.centre + target.scale))


def load_chunk_pair(
    path: Path,
    *,
    draft: str | None = None,
    target: str | None = None,
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
) -> ChunkPair:
    """Loads a pair's folder; its target is loaded on first use.

    Args:
        path: the folder.
        draft, target: sources that replace those of the manifest, or are missing there.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if it cannot be read, or a policy does not have the fingerprint that the pair was made with.
        ConfigError: if the draft has to be named.
    """
    said = _read(path)
    copied = path / DRAFT
    source = draft or (str(copied) if copied.is_dir() else said.sources["draft"])
    if source is None:
        raise ConfigError(f"the draft of {path} is no bundle; name it again with --draft MODULE:NAME or FILE.toml")
    small = _load_source(source, said.steps["draft"], said.fingerprints["draft"], provider, threads)
    target_source = target or said.sources["target"]
    load_target: Callable[[], ChunkPolicy] | None = None
    if target_source is not None:
        load_target = partial(
            _load_target, target_source, said.steps["target"], said.fingerprints["target"], provider, threads
        )
    return ChunkPair(
        said.name, small.policy, said.units, said.target, load_target, said.execute, said.within, said.overlap,
        said.env, said.fingerprint, path, Named(draft, target),
    )  # fmt: skip


def load_chunk_target(
    path: Path, *, target: str | None = None, provider: str = "CPUExecutionProvider", threads: int = 1
) -> ChunkResponder:
    """Loads the target of a pair's folder, for a server, which needs no draft; arguments as above.

    Raises:
        BundleError: as above.
        ConfigError: if the target has to be named.
    """
    said = _read(path)
    source = target or said.sources["target"]
    if source is None:
        raise ConfigError(f"the target of {path} is no bundle; name it again with --target MODULE:NAME or FILE.toml")
    policy = _load_target(source, said.steps["target"], said.fingerprints["target"], provider, threads)
    return ChunkResponder(policy, said.name, said.fingerprint)


class _Manifest(NamedTuple):
    """What a pair's folder says; parts by ``draft`` and ``target``."""

    name: str
    env: str
    units: ActionUnits
    target: ChunkSpec
    execute: int
    within: float
    overlap: Literal["drop", "average"]
    sources: dict[str, str | None]
    steps: dict[str, int]
    fingerprints: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """Of both policies together."""
        return joint_fingerprint(self.fingerprints["draft"], self.fingerprints["target"])


def _read(path: Path) -> _Manifest:
    """Reads and checks a pair's manifest."""
    manifest = read_manifest(path, "chunks", {})
    check_head(path, manifest)
    try:
        said = manifest["spec"]
        fingerprints = {part: manifest["fingerprints"][part] for part in _PARTS}
        steps = {part: manifest["steps"][part] for part in _PARTS}
        units = ActionUnits(*(np.asarray(manifest["units"][name], np.float32) for name in ("centre", "scale")))
        sources = {part: _check_source(path, part, manifest["sources"][part]) for part in _PARTS}
        spec, execute = read_chunk_spec(path, {"spec": said["target"]}, "make the pair again"), said["execute"]
        within, overlap = said["accept_within"], said["overlap"]
        number = isinstance(within, int | float) and not isinstance(within, bool) and float(within) >= 0.0
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); make the pair again") from None
    check_integer("execute", execute, least=1)
    for part in _PARTS:
        check_integer(f"steps of the {part}", steps[part], least=1)
    if not number or overlap not in _OVERLAPS:
        raise BundleError(
            f"the manifest of {path} must have a number of at least 0 as accept_within, and drop or average as "
            f"overlap; it has {within!r:.60} and {overlap!r:.60}; make the pair again"
        )
    if not (np.isfinite(units.centre).all() and np.isfinite(units.scale).all() and (units.scale > 0.0).all()):
        raise BundleError(f"the units in the manifest of {path} must be finite, and every scale positive")
    return _Manifest(
        manifest["name"], manifest["env"], units, spec, execute, within, overlap, sources, steps, fingerprints
    )


def _check_source(path: Path, part: str, source: object) -> str | None:
    """Checks a source in a manifest, which is untrusted: importing a module would run its code."""
    if source is None or (isinstance(source, str) and kind_of_source(source) in ("part", "folder")):
        return source
    raise BundleError(
        f"the manifest of {path} may name a bundle as its {part}, and no code, but names {source!r:.60}; "
        f"name the {part} yourself with --{part}"
    )


def _load_source(source: str, steps: int, fingerprint: str, provider: str, threads: int) -> LoadedPolicy:
    found = load_policy(source, steps=steps, provider=provider, threads=threads)
    if found.fingerprint != fingerprint:
        raise BundleError(
            f"{source} has fingerprint {found.fingerprint!r}, but the pair was made with {fingerprint!r}; make it "
            "again with specact pair"
        )
    return found


def _load_target(source: str, steps: int, fingerprint: str, provider: str, threads: int) -> ChunkPolicy:
    return _load_source(source, steps, fingerprint, provider, threads).policy


def _stored_source(source: str) -> str | None:
    """The source as a manifest stores it: the path of a bundle, None for any other kind."""
    kind = kind_of_source(source)
    if kind == "folder":
        return str(find_bundle(source).resolve())
    if kind == "part":
        name, _, part = source.rpartition("#")
        return f"{find_bundle(name).resolve()}#{part}"
    return None
