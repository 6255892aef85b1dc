"""Loads pairs, policies and exchanges of every family by name."""

from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from inspect import getattr_static
from pathlib import Path
from typing import Any, cast

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.bundle.network import CPU, Compute
from specact.errors import ConfigError, unknown_name
from specact.families.chunks.flow import load_flow
from specact.families.chunks.pair import DEFAULTS, PairSettings, load_chunk_pair, load_chunk_target, write_pair
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import (
    LoadedPolicy,
    is_policy,
    kind_of_source,
    load_own,
    load_regression,
    onnx_policy,
    try_out,
)
from specact.families.chunks.wire import ChunkExchange
from specact.families.codes.pair import load_codes
from specact.families.codes.policy import CodeChunks
from specact.families.tokens.policy import TokenBundle, load_tokens
from specact.files import check_name, file_stem
from specact.imports import load_instance
from specact.pair import Pair, PairSource
from specact.systems.flow import ROUNDS, load_block_pair, load_flow_pair
from specact.systems.staged import KIND as STAGED
from specact.systems.staged import SplitExchange, load_staged
from specact.systems.tokens import DECODINGS, load_token_pair
from specact.types import ActionUnits
from specact.wire.exchange import Exchange

COMPOSITIONS = {**DECODINGS, **ROUNDS}
# Kinds of bundles whose chunks are drafted and verified in several ways, with the way that needs no name.
_DECODED = {"tokens": "ar", "flow": "full", "flash": "full"}
_EXCHANGE = ("name", "fingerprint", "contract", "read", "answer")


def check_decoding(name: str) -> None:
    """Refuses a decoding that no family has, see :func:`load_pair`; empty is allowed.

    Raises:
        ConfigError: if the name is unknown.
    """
    if name and name not in COMPOSITIONS:
        raise unknown_name("decoding", name, COMPOSITIONS)


def load_pair(
    name_or_path: str | Path | PairSource,
    *,
    draft: str | None = None,
    target: str | None = None,
    decoding: str = "",
    compute: Compute = CPU,
) -> Pair[Any]:
    """Loads a pair of policies: of action codes, of chunks, of tokens, a flow policy, or one of your own.

    It is a folder, the name of a bundle that comes with the package, such as ``ball``, or ``MODULE:NAME``, a
    :class:`~specact.pair.Pair` or a function that makes one. Draft and target take the place of chunk policies' own,
    see :func:`load_policy`; a token or flow policy, which is a target, takes only a draft, FLASH's block the
    flow policy that it drafts for. The decoding, one of :data:`COMPOSITIONS`, is ``ar`` or ``full`` if empty.

    Raises:
        BundleError: if it cannot be used.
        ConfigError: if there is no pair of that name, or it takes no such draft, target or decoding.
    """
    if not isinstance(name_or_path, PairSource):
        name_or_path = PairSource(str(name_or_path), draft, target, decoding)
    elif draft or target or decoding:
        raise ConfigError("a PairSource names draft, target and decoding itself; use dataclasses.replace(source, ...)")
    source, name, is_code = name_or_path, name_or_path.name_or_path, kind_of_source(name_or_path.name_or_path) == "code"
    path = Path() if is_code else find_bundle(name)
    kind = None if is_code else read_manifest(path).kind
    default = _DECODED.get(str(kind))
    if source.decoding and default is None:
        raise ConfigError(
            f"{name} is no token policy and no flow policy, and only these have decodings; leave out the decoding "
            f"{source.decoding!r}"
        )
    if source.target is not None and kind not in ("flash", "chunks"):
        raise ConfigError(
            f"{name} is a target, or has its own; --target {source.target} is for FLASH's block and for a pair of "
            "chunk policies, leave it out"
        )
    if kind is None or kind == "pair":
        if source.draft is not None:
            raise ConfigError(
                f"{name} is no pair of chunk policies, no token policy and no flow policy, and only these can have "
                f"another draft; leave out --draft {source.draft}"
            )
        return _own_pair(name) if kind is None else load_codes(path, compute=compute).pair()
    source = replace(source, name_or_path=str(path), decoding="" if source.decoding == default else source.decoding)
    if kind == "chunks":
        return load_chunk_pair(path, load_policy, source, compute)
    small = None if source.draft is None else load_policy(source.draft, compute=compute)
    if source.decoding and source.decoding not in (known := DECODINGS if kind == "tokens" else ROUNDS):
        raise unknown_name("decoding", source.decoding, known)
    if kind == "tokens":
        how = DECODINGS[source.decoding or "ar"]
        return load_token_pair(load_tokens(path, compute=compute), small, source, decoding=how, compute=compute)
    rounds = ROUNDS[source.decoding or "full"]
    if kind == "flow":
        return load_flow_pair(load_flow(path, compute=compute), small, source, rounds=rounds, compute=compute)
    served = None if source.target is None else load_policy(source.target, compute=compute)
    return load_block_pair(path, served, small, source, rounds=rounds, compute=compute)


def load_policy(source: str, *, steps: int = 10, compute: Compute = CPU) -> LoadedPolicy:
    """Loads a chunk policy, of so many Euler steps if it is a flow.

    The source is the folder or name of a bundle of a flow, of a regression or of tokens; ``BUNDLE#draft`` or
    ``BUNDLE#target`` of a pair of action codes; a ``.toml`` file that describes an ONNX file, see
    :func:`~specact.families.chunks.sources.onnx_policy`; ``lerobot:PATH@HZ``, what LeRobot saved, and its control rate;
    ``openpi:ws://HOST:PORT#FILE.toml``, with the token in the variable SPECACT_TOKEN; or ``MODULE:NAME``.

    Raises:
        ConfigError: if the source does not exist, or is none of these.
        BundleError: if the policy cannot be used; RemoteError: if a server does not answer.
    """
    kind = kind_of_source(source)
    if kind == "part":
        name, _, part = source.rpartition("#")
        codes = load_codes(name, compute=compute)
        network = codes.draft if part == "draft" else codes.target
        chunks = CodeChunks(network, codes.tokenizer, codes.spec, network.observation)
        units = ActionUnits(codes.tokenizer.centre, codes.tokenizer.scale)
        return LoadedPolicy(f"{codes.name}-{part}", chunks, units, codes.manifest.fingerprints[part], codes.env)
    if kind == "lerobot":
        try:
            from specact.families.chunks.lerobot import load_lerobot
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{source!r} needs LeRobot, and there is no module {error.name!r} here; in an environment of Python "
                "3.12 or newer run: pip install 'specact[server]' 'lerobot[smolvla,pi,diffusion]==0.6.1'"
            ) from None
        return load_lerobot(source, steps=steps)
    if kind == "openpi":
        from specact.families.chunks.openpi import openpi_policy, openpi_source

        server = openpi_source(source, os.environ.get("SPECACT_TOKEN") or None)
        return LoadedPolicy(server.name, openpi_policy(server), server.units, server.fingerprint)
    if kind == "description":
        own = onnx_policy(Path(source), compute=compute)
        return LoadedPolicy(Path(source).stem, own, own.units, own.fingerprint)
    if kind == "code":
        return load_own(source)
    path = find_bundle(source)
    held = read_manifest(path).kind
    if held == "pair":
        raise ConfigError(f"{source} is a pair of policies; say which one: {source}#draft or {source}#target")
    if held == "regression":
        made = load_regression(path, compute=compute)
        return LoadedPolicy(made.name, made.policy, made.policy.units, made.fingerprint, made.env)
    bundle = load_tokens(path, compute=compute) if held == "tokens" else load_flow(path, compute=compute)
    policy: ChunkPolicy = bundle.policy() if isinstance(bundle, TokenBundle) else bundle.policy(steps)
    units = ActionUnits.of_range(bundle.units.low, bundle.units.high)
    return LoadedPolicy(bundle.name, policy, units, bundle.fingerprint, bundle.env)


def make_pair(out: Path, draft: str, target: str, settings: PairSettings = DEFAULTS) -> Pair[Any]:
    """Writes a pair of chunk policies; see :func:`~specact.families.chunks.pair.write_pair`."""
    return write_pair(out, draft, target, settings, load_policy)


def load_exchange(
    source: str, *, target: str | None = None, steps: int | None = None, compute: Compute = CPU
) -> Exchange[Any]:
    """What a server exchanges with devices, for any kind of target.

    The source is a pair, whose target is served, see :func:`load_pair`; a target in stages, as ``specact split`` writes
    it; a chunk policy, see :func:`load_policy`, with 10 Euler steps unless given; or ``MODULE:NAME``, a
    :class:`~specact.wire.exchange.Exchange`. FLASH's block and a pair of chunk policies can have another target.

    Raises:
        BundleError: if it cannot be used.
        ConfigError: if there is no target of that name, or steps are given for another one than a flow policy, or a
            place for one with a runtime of its own.
    """
    kind = kind_of_source(source)
    if compute != CPU and kind in ("lerobot", "openpi", "code"):
        raise ConfigError(f"{source} has a runtime of its own; leave out --provider and --threads, of ONNX Runtime")
    path = find_bundle(source) if kind == "folder" else Path()
    holds = read_manifest(path).kind if kind == "folder" else None
    if holds == "flash" and target is None:
        raise ConfigError(f"{source} is FLASH's block alone; name its flow policy, as in --target lerobot:PATH@HZ")
    if target is not None and holds not in ("flash", "chunks"):
        raise ConfigError(f"{source} has a target; leave out --target, for FLASH's block and pairs of chunk policies")
    if steps is not None and kind != "lerobot" and holds not in ("flow", "flash"):
        raise ConfigError(f"{source} is no flow policy, so it has no Euler steps; leave out --steps {steps}")
    exchange: Exchange[Any]
    if holds == "flash":
        assert target is not None
        flow_policy = load_policy(target, steps=steps or 10, compute=compute)
        exchange = load_block_pair(path, flow_policy, compute=compute).exchange
    elif holds == "chunks":
        exchange = load_chunk_target(path, load_policy, target, compute)
    elif holds == STAGED:
        exchange = SplitExchange(load_staged(path, compute=compute))
    elif holds == "flow":
        # Whatever drafts for it, the fingerprint is the flow policy's.
        flow = load_flow(path, compute=compute)
        served = load_flow_pair(flow, compute=compute)
        exchange = served.composed(policy=flow.policy(steps or 10), fingerprint=flow.fingerprint).exchange
    elif holds is not None and holds != "regression":
        exchange = load_pair(source, compute=compute).exchange
    elif kind == "code" and (own := _own_exchange(source)) is not None:
        exchange = own
    else:
        loaded = load_policy(source, steps=steps or 10, compute=compute)
        try_out(loaded)
        exchange = ChunkExchange(
            loaded.policy.spec, loaded.name, loaded.fingerprint, lambda: loaded.policy, loaded.units
        )
    return exchange


def _own_pair(source: str) -> Pair[Any]:
    """The pair ``MODULE:NAME``, an object or a function that makes one.

    Without a fingerprint it is derived from the name, so that a calibration of earlier weights is not refused. Without
    a path its calibrations are in the folder ``MODULE.NAME`` of the current directory.
    """
    found = load_instance(source, "pair of policies, a specact.Pair", lambda value: isinstance(value, Pair))
    if not isinstance(found, Pair):
        raise ConfigError(f"{source!r} makes {found!r:.100}; it must make a specact.Pair")
    check_name("pair", found.name)
    return replace(
        found, source=PairSource(source), path=found.path or Path(file_stem(source)),
        fingerprint=found.fingerprint or hashlib.sha256(source.encode()).hexdigest()[:16],
    )  # fmt: skip


def _own_exchange(source: str) -> Exchange[Any] | None:
    """The exchange ``MODULE:NAME``, or that of a pair of this name; None if the name is that of a chunk policy."""
    kind = "target: a chunk policy, a pair of policies or an exchange"
    found = load_instance(
        source, kind, lambda value: is_policy(value) or isinstance(value, Pair) or _is_exchange(value)
    )
    if is_policy(found):
        return None
    if isinstance(found, Pair):
        found = found.exchange
    if not _is_exchange(found):
        raise ConfigError(
            f"{source!r} is {found!r:.100}. It must be a {kind}, see specact.chunk_policy, specact.Pair and "
            f"specact.wire.exchange.Exchange; an exchange has {', '.join(_EXCHANGE)}"
        )
    check_name("exchange", found.name)
    return cast("Exchange[Any]", found)


def _is_exchange(value: object) -> bool:
    """Without evaluating properties."""
    missing = object()
    return not isinstance(value, type) and all(getattr_static(value, m, missing) is not missing for m in _EXCHANGE)
