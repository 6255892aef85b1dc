"""A pair of chunk policies as a folder: a manifest that says what both are and where they come from, and the draft.

A manifest never names code: a policy that is given as ``MODULE:NAME`` has to be named again by whoever loads the pair.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specact.errors import BundleError, ConfigError
from specact.families.chunks.pair import ChunkPair
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy, load_policy, names_folder, try_out
from specact.families.chunks.wire import spec_of
from specact.families.codes.bundle import find_bundle
from specact.files import write_json
from specact.runtime.manifest import FORMAT, read_manifest
from specact.units import ActionUnits

_DRAFT = "draft"


def make_pair(
    out: Path,
    draft: str,
    target: str,
    *,
    execute: int | None = None,
    accept_within: float = 0.0,
    overlap: Literal["drop", "average"] = "drop",
    env: str = "",
    draft_steps: int = 2,
    target_steps: int = 10,
) -> ChunkPair:
    """Writes a pair's folder. A draft that is a bundle is copied into it; the target stays where it is.

    Args:
        out: the folder; must not exist.
        draft, target: as :func:`~specact.families.chunks.sources.load_policy` takes them.
        execute: see :class:`~specact.families.chunks.pair.ChunkPair`; the whole of the shorter chunk if not given.
        accept_within, overlap, env: likewise.
        draft_steps, target_steps: Euler steps, of a flow policy.

    Raises:
        ConfigError: if the folder exists, the policies do not fit together, or neither says the range of its actions.
        BundleError: if a policy cannot be used.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists; choose another folder")
    small, large = load_policy(draft, steps=draft_steps), load_policy(target, steps=target_steps)
    for loaded in (small, large):
        try_out(loaded)
    units = small.units or large.units
    if units is None:
        raise ConfigError(
            "neither policy says the range of its actions, in which distances are measured and which actions cannot "
            "leave; give one of them low and high"
        )
    most = min(small.policy.spec.chunk, large.policy.spec.chunk)
    count = most if execute is None else execute
    ChunkPair(out.name, small.policy, units, large.policy.spec, None, count, accept_within, overlap)
    out.mkdir(parents=True)
    if names_folder(draft):
        shutil.copytree(find_bundle(draft), out / _DRAFT, ignore=shutil.ignore_patterns("calibration"))
    manifest = {
        "format": FORMAT,
        "kind": "chunks",
        "name": out.name,
        "env": env,
        "spec": {
            "target": large.policy.spec.describe(),
            "execute": count,
            "accept_within": accept_within,
            "overlap": overlap,
        },
        "sources": {"draft": _kept(draft), "target": _kept(target)},
        "steps": {"draft": draft_steps, "target": target_steps},
        "units": {"centre": units.centre.tolist(), "scale": units.scale.tolist()},
        "fingerprints": {"draft": small.fingerprint, "target": large.fingerprint},
    }
    write_json(out / "manifest.json", manifest)
    return load_chunk_pair(out, draft=draft, target=target)


def load_chunk_pair(
    path: Path,
    *,
    draft: str | None = None,
    target: str | None = None,
    provider: str = "CPUExecutionProvider",
    threads: int = 1,
) -> ChunkPair:
    """Loads a pair's folder; its target is loaded when it is first asked for.

    Args:
        path: the folder.
        draft, target: instead of what the manifest names, or where it names nothing.
        provider, threads: see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if it cannot be read, or a policy is another than the one it was made with.
        ConfigError: if the draft has to be named.
    """
    manifest = read_manifest(path, "chunks", {})
    try:
        said, steps, fingerprints = manifest["spec"], manifest["steps"], manifest["fingerprints"]
        units = ActionUnits(*(np.asarray(manifest["units"][name], np.float32) for name in ("centre", "scale")))
        sources = {part: manifest["sources"][part] for part in ("draft", "target")}
        spec, execute, within, overlap = (
            spec_of(said["target"]),
            said["execute"],
            said["accept_within"],
            said["overlap"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise BundleError(f"the manifest of {path} has no usable spec ({error}); make the pair again") from None
    if not (np.isfinite(units.centre).all() and np.isfinite(units.scale).all() and (units.scale > 0.0).all()):
        raise BundleError(f"the units in the manifest of {path} must be finite, and every scale positive")
    copied = path / _DRAFT
    source = draft or (str(copied) if copied.is_dir() else sources["draft"])
    if not isinstance(source, str):
        raise ConfigError(f"the draft of {path} is a Python object; name it again with --draft MODULE:NAME")
    small = _loaded(source, int(steps["draft"]), str(fingerprints["draft"]), provider, threads)
    if len(units.centre) != small.policy.spec.actions:
        raise BundleError(
            f"the units in the manifest of {path} are of {len(units.centre)} actions, the draft's of others"
        )
    far = target or sources["target"]
    load_target: Callable[[], ChunkPolicy] | None = None
    if isinstance(far, str):
        load_target = partial(_target, far, int(steps["target"]), str(fingerprints["target"]), provider, threads)
    both = hashlib.sha256("".join(str(fingerprints[part]) for part in ("draft", "target")).encode()).hexdigest()[:16]
    return ChunkPair(
        str(manifest["name"]), small.policy, units, spec, load_target, execute, within, overlap,
        str(manifest["env"]), both, path, (draft, target),
    )  # fmt: skip


def _loaded(source: str, steps: int, fingerprint: str, provider: str, threads: int) -> LoadedPolicy:
    found = load_policy(source, steps=steps, provider=provider, threads=threads)
    if found.fingerprint != fingerprint:
        raise BundleError(
            f"{source} has fingerprint {found.fingerprint!r}, but the pair was made with {fingerprint!r}; make it "
            "again with specact pair"
        )
    return found


def _target(source: str, steps: int, fingerprint: str, provider: str, threads: int) -> ChunkPolicy:
    return _loaded(source, steps, fingerprint, provider, threads).policy


def _kept(source: str) -> Any:
    """What a manifest may say of a source: a file or bundle, and never code."""
    if source.endswith(".toml"):
        return str(Path(source).resolve())
    if "#" in source or names_folder(source):
        name, hash_, part = source.partition("#")
        return f"{find_bundle(name).resolve()}{hash_}{part}"
    return None
