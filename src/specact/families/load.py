"""Loads pairs and exchanges of every family by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest
from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError, unknown_name
from specact.families.chunks.bundle import load_flow
from specact.families.chunks.folder import load_chunk_pair, load_chunk_target
from specact.families.chunks.sources import kind_of_source, load_policy, try_out
from specact.families.chunks.wire import ChunkExchange
from specact.families.codes.bundle import Bundle, load_bundle
from specact.families.flash.pair import block_pair, flash_pair
from specact.families.flash.rounds import ROUNDS, load_rounds
from specact.families.own import load_own_exchange, load_own_pair
from specact.families.staged.stages import KIND as STAGED
from specact.families.staged.stages import load_staged
from specact.families.staged.wire import SplitExchange
from specact.families.tokens.bundle import load_tokens
from specact.families.tokens.decoding import DECODINGS, load_decoding
from specact.families.tokens.pair import token_pair
from specact.pair import LoadedPair, Named
from specact.wire.exchange import Exchange

AnyPair = LoadedPair[Any]


def check_decoding(name: str) -> None:
    """Refuses a decoding that no family has, see :func:`load_pair`; empty is allowed.

    Raises:
        ConfigError: if the name is unknown.
    """
    known = {**DECODINGS, **ROUNDS}
    if name and name not in known:
        raise unknown_name("decoding", name, known)


def of_codes(pair: AnyPair, what: str) -> Bundle:
    """The pair, which must be one of action codes.

    Args:
        pair: the pair.
        what: what needs it, for the message.

    Raises:
        ConfigError: if it is of another family.
    """
    if not isinstance(pair, Bundle):
        raise ConfigError(f"{what} needs a pair of action codes, and {pair.name} is of another family")
    return pair


def load_pair(
    name_or_path: str | Path,
    *,
    draft: str | None = None,
    target: str | None = None,
    decoding: str = "",
    compute: Compute = CPU,
) -> AnyPair:
    """Loads a pair of policies: of action codes, of chunks, of tokens, or of a family of your own.

    Args:
        name_or_path: a folder, the name of a bundle that comes with the package, such as ``ball``, or ``MODULE:NAME``:
            a :class:`~specact.pair.Pair`, or a class or function that makes one without arguments.
        draft, target: policies of a pair of chunk policies, in place of those in its manifest; see
            :func:`~specact.families.chunks.sources.load_policy`. A token policy or a flow policy, which is a target,
            takes only a draft. FLASH's block takes the flow policy that it drafts for as the target; without it a
            server has to draft and check.
        decoding: how chunks are drafted and verified: for a token policy one of
            :data:`~specact.families.tokens.decoding.DECODINGS`, ``ar`` if empty, for a flow policy one of
            :data:`~specact.families.flash.rounds.ROUNDS`, ``full`` if empty.
        compute: where its networks run.

    Raises:
        BundleError: if it cannot be used.
        ConfigError: if there is no pair of that name, no such execution provider, or the pair has no decodings.
    """
    own = kind_of_source(str(name_or_path)) == "code"
    path = Path() if own else find_bundle(name_or_path)
    kind = None if own else read_manifest(path).kind
    decoded = kind in ("flash", "tokens", "flow")
    if decoding and not decoded:
        raise ConfigError(
            f"{name_or_path} is no token policy and no flow policy, and only these have decodings; leave out the "
            f"decoding {decoding!r}"
        )
    if target is not None and kind not in ("flash", "chunks"):
        raise BundleError(
            f"{name_or_path} is a target, or has its own; --target {target} is for FLASH's block and for a pair of "
            "chunk policies, leave it out"
        )
    if kind == "chunks":
        return load_chunk_pair(path, draft=draft, target=target, compute=compute)
    if decoded:
        small = None if draft is None else load_policy(draft, compute=compute)
        if kind == "tokens":
            tokens = load_tokens(path, compute=compute)
            pair = token_pair(tokens, small, draft, compute=compute)
            return replace(pair, decoding=load_decoding(decoding or "ar"))
        if kind == "flow":
            flow = load_flow(path, compute=compute)
            rounds = flash_pair(flow, small, draft, compute=compute)
        else:
            rounds = block_pair(path, target, small, draft, compute=compute)
        return replace(rounds, rounds=load_rounds(decoding or "full"))
    if draft is not None:
        raise BundleError(
            f"{name_or_path} is no pair of chunk policies, no token policy and no flow policy, and only these can have "
            f"another draft; leave out --draft {draft}"
        )
    return load_own_pair(str(name_or_path)) if own else load_bundle(path, compute=compute)


def load_named(name_or_path: str | Path, named: Named) -> AnyPair:
    """The pair that :func:`load_pair` loads with this draft, target and decoding; errors as there."""
    return load_pair(name_or_path, draft=named.draft, target=named.target, decoding=named.decoding)


def load_exchange(
    source: str,
    *,
    target: str | None = None,
    steps: int = 10,
    compute: Compute = CPU,
) -> Exchange[Any]:
    """What a server exchanges with devices, for any kind of target.

    Args:
        source: a pair, whose target is served, see :func:`load_pair`; a target in stages, as ``specact split`` writes
            it; a chunk policy, see :func:`~specact.families.chunks.sources.load_policy`; or ``MODULE:NAME``, a
            :class:`~specact.wire.exchange.Exchange`.
        target: of FLASH's block, the flow policy that it drafts for; of a pair of chunk policies, in place of the one
            in its manifest.
        steps: Euler steps of a flow policy that is served by itself.
        compute: where its networks run.

    Raises:
        BundleError: if it cannot be used.
        ConfigError: if there is no target of that name, or no such execution provider.
    """
    kind = kind_of_source(source)
    path = find_bundle(source) if kind == "folder" else Path()
    holds = read_manifest(path).kind if kind == "folder" else None
    if holds == "flash" and target is None:
        raise ConfigError(
            f"{source} is FLASH's block alone; name the flow policy that it drafts for, as in --target lerobot:PATH@HZ"
        )
    if target is not None and holds not in ("flash", "chunks"):
        raise ConfigError(
            f"{source} is a target, or has its own; --target is for FLASH's block and for a pair of chunk policies, "
            "leave it out"
        )
    if holds == "flash":
        return block_pair(path, target, steps=steps, compute=compute).exchange
    if holds == "chunks":
        return load_chunk_target(path, target=target, compute=compute)
    if holds == STAGED:
        return SplitExchange(load_staged(path, compute=compute))
    if holds == "flow":
        flow = load_flow(source, compute=compute)
        # The fingerprint is the flow policy's, whatever drafts for it.
        pair = flash_pair(flow, compute=compute)
        return replace(pair, policy=flow.policy(steps), fingerprint=flow.fingerprint).exchange
    if holds is not None and holds != "regression":
        return load_pair(source, compute=compute).exchange
    if kind == "code" and (own := load_own_exchange(source)) is not None:
        return own
    loaded = load_policy(source, steps=steps, compute=compute)
    try_out(loaded)
    return ChunkExchange(loaded.policy.spec, loaded.name, loaded.fingerprint, lambda: loaded.policy)
