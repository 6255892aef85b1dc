"""Loads pairs, policies and exchanges of every family by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import replace
from inspect import getattr_static
from pathlib import Path
from typing import Any, cast

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import KINDS, Kind, read_manifest
from specact.bundle.network import CPU, Compute
from specact.errors import ConfigError, unknown_name
from specact.families.chunks.flow import load_flow
from specact.families.chunks.pair import DEFAULTS, PairSettings, load_chunk_pair, load_chunk_target, write_pair
from specact.families.chunks.policy import ChunkExchange, ChunkPolicy
from specact.families.chunks.remote import connect
from specact.families.chunks.sources import (
    LoadedPolicy,
    is_policy,
    kind_of_source,
    load_own,
    load_regression,
    onnx_policy,
    try_out,
)
from specact.families.codes.pair import load_codes
from specact.families.codes.policy import CodeChunks
from specact.families.tokens.pair import Decoding
from specact.families.tokens.policy import load_tokens
from specact.files import check_name, file_stem
from specact.imports import load_instance
from specact.pair import Pair, PairSource
from specact.systems.corrector import load_corrector
from specact.systems.flash import Rounds
from specact.systems.flow import ROUNDS, load_block_pair, load_flow_pair
from specact.systems.staged import KIND as STAGED
from specact.systems.staged import SplitExchange, load_stages
from specact.systems.tokens import DECODINGS, load_token_pair
from specact.types import ActionUnits
from specact.wire.exchange import Exchange
from specact.wire.messages import MAX_DEADLINE_MS

COMPOSITIONS: dict[str, Decoding | Rounds] = {**DECODINGS, **ROUNDS}
# Kinds of bundles whose chunks are drafted and verified in several ways, with the way that needs no name.
_DECODED: dict[Kind, str] = {"tokens": "ar", "flow": "full", "flash": "full"}
# What may be chosen for a pair or a served target, and for which kinds of bundles.
_CHOICES: dict[str, tuple[Kind, ...]] = {
    "draft": ("chunks", *_DECODED), "target": ("flash", "chunks", "corrector"),
    "decoding": tuple(_DECODED), "steps": ("flow", "flash"),
}  # fmt: skip
_EXCHANGE = ("name", "contract", "read", "answer")


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
    source, name = name_or_path, name_or_path.name_or_path
    path = None if kind_of_source(name) == "code" else find_bundle(name)
    kind = None if path is None else read_manifest(path).kind
    _check_choices(name, kind, decoding=source.decoding or None, target=source.target, draft=source.draft)
    if path is None or kind is None:
        return _own_pair(name)
    if kind == "pair":
        return load_codes(path, compute=compute).pair()
    if kind == "corrector":
        return load_corrector(path, load_policy, replace(source, name_or_path=str(path)), compute)
    if kind not in _CHOICES["draft"]:
        raise ConfigError(
            f"{name} is {KINDS[kind]}, and no pair; specact play drives a robot with a policy alone, and specact pair "
            "makes a pair of two"
        )
    chosen = "" if source.decoding == _DECODED.get(kind) else source.decoding
    source = replace(source, name_or_path=str(path), decoding=chosen)
    if kind == "chunks":
        return load_chunk_pair(path, load_policy, source, compute)
    small = None if source.draft is None else load_policy(source.draft, compute=compute)
    known: Mapping[str, Any] = DECODINGS if kind == "tokens" else ROUNDS
    if chosen and chosen not in known:
        raise unknown_name("decoding", chosen, known)
    composition = known[chosen or _DECODED.get(kind, "full")]
    if kind == "tokens":
        return load_token_pair(load_tokens(path, compute=compute), small, source, decoding=composition, compute=compute)
    if kind == "flow":
        return load_flow_pair(load_flow(path, compute=compute), small, source, rounds=composition, compute=compute)
    served = None if source.target is None else load_policy(source.target, compute=compute)
    return load_block_pair(path, served, small, source, rounds=composition, compute=compute)


def _check_choices(name: str, kind: Kind | None, **choices: object) -> None:
    """Refuses a draft, target, decoding or Euler steps for what cannot have another one; None is not chosen."""
    for option, value in choices.items():
        if value is not None and kind not in _CHOICES[option]:
            subject = f"{name} is {KINDS[kind]} and" if kind else name
            allowed = ", ".join(KINDS[other] for other in _CHOICES[option])
            raise ConfigError(f"{subject} takes no {option}; leave out --{option} {value}, which is for {allowed}")


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
        token = os.environ.get("SPECACT_TOKEN") or None
        served = connect(source, deadline_ms=MAX_DEADLINE_MS, token=token, timeout=10.0)
        return LoadedPolicy(served.name, served, served.units, served.fingerprint)
    if kind == "description":
        graph = onnx_policy(Path(source), compute=compute)
        return LoadedPolicy(Path(source).stem, graph, graph.units, graph.fingerprint)
    if kind == "code":
        return load_own(source)
    path = find_bundle(source)
    held = read_manifest(path).kind
    if held == "pair":
        raise ConfigError(f"{source} is a pair of policies; say which one: {source}#draft or {source}#target")
    load: Any = {"regression": load_regression, "tokens": load_tokens}.get(held, load_flow)
    bundle = load(path, compute=compute)
    policy: ChunkPolicy = bundle.policy(steps) if load is load_flow else bundle.policy()
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
    _check_choices(source, holds, target=target, steps=None if kind == "lerobot" else steps)
    if holds == "flash":
        if target is None:
            raise ConfigError(f"{source} is FLASH's block alone; name its flow policy, as in --target lerobot:PATH@HZ")
        flow_policy = load_policy(target, steps=steps or 10, compute=compute)
        return load_block_pair(path, flow_policy, compute=compute).exchange
    if holds == "chunks":
        return load_chunk_target(path, load_policy, target, compute)
    if holds == STAGED:
        return SplitExchange(load_stages(path, compute=compute))
    if holds == "flow":
        flow = load_flow(path, compute=compute)
        return load_flow_pair(flow, compute=compute).composed(policy=flow.policy(steps or 10)).exchange
    if holds is not None and holds != "regression":
        return load_pair(source, target=target, compute=compute).exchange
    if kind == "code" and (exchange := _own_exchange(source)) is not None:
        return exchange
    loaded = load_policy(source, steps=steps or 10, compute=compute)
    try_out(loaded)
    name, policy = loaded.name, loaded.policy
    return ChunkExchange(policy.spec, name, loaded.fingerprint, lambda: policy, loaded.units, inpaints=policy.inpaints)


def _own_pair(source: str) -> Pair[Any]:
    """The pair ``MODULE:NAME``, an object or a function that makes one.

    Without a fingerprint it is derived from the name, so that a calibration of earlier weights is not refused. Without
    a path its calibrations are in the folder ``MODULE.NAME`` of the current directory.
    """
    pair = load_instance(source, "pair of policies, a specact.Pair", lambda value: isinstance(value, Pair))
    if not isinstance(pair, Pair):
        raise ConfigError(f"{source!r} makes {pair!r:.100}; it must make a specact.Pair")
    check_name("pair", pair.name)
    return replace(
        pair, source=PairSource(source), path=pair.path or Path(file_stem(source)),
        fingerprint=pair.fingerprint or hashlib.sha256(source.encode()).hexdigest()[:16],
    )  # fmt: skip


def _own_exchange(source: str) -> Exchange[Any] | None:
    """The exchange ``MODULE:NAME``, or that of a pair of this name; None if the name is that of a chunk policy."""

    def is_exchange(value: object) -> bool:
        """Without evaluating properties."""
        missing = object()
        has = all(getattr_static(value, name, missing) is not missing for name in _EXCHANGE)
        return has and not isinstance(value, type)

    kind = "target: a chunk policy, a pair of policies or an exchange"
    exchange = load_instance(source, kind, lambda item: is_policy(item) or isinstance(item, Pair) or is_exchange(item))
    if is_policy(exchange):
        return None
    if isinstance(exchange, Pair):
        exchange = exchange.exchange
    if not is_exchange(exchange):
        raise ConfigError(
            f"{source!r} is {exchange!r:.100}. It must be a {kind}, see specact.chunk_policy, specact.Pair and "
            f"specact.wire.exchange.Exchange; an exchange has {', '.join(_EXCHANGE)}"
        )
    check_name("exchange", exchange.name)
    return cast("Exchange[Any]", exchange)
