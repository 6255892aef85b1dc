"""A token policy as the target of a pair; the draft is whatever proposes tokens, or nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from specact.errors import ConfigError
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy
from specact.families.tokens.bundle import TokenBundle
from specact.families.tokens.decoding import DECODINGS, Decoding
from specact.families.tokens.drafter_bundle import DrafterBundle, load_drafters
from specact.families.tokens.drafters import TreeDrafter
from specact.families.tokens.drafting import TokenDrafter
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.verify import Prefilled, TokenTarget, TokenVerifier
from specact.families.tokens.wire import TokenCodec, TokenResponder
from specact.observation import ObservationSpec
from specact.units import ActionUnits
from specact.verification import Target

# Where a bundle's drafters lie.
DRAFTERS = "drafters"


@dataclass(frozen=True)
class TokenPair:
    """See :class:`~specact.pair.Pair`.

    Attributes:
        name: what it is called.
        policy: the target, greedy.
        drafters: what was learned from it; None where nothing was.
        draft: a policy on the device, where there is one.
        draft_name: as it was named when the pair was loaded.
        decoding: how verified steps are decoded, and what proposes.
        env, fingerprint, path: see :class:`~specact.pair.LoadedPair`.

    Raises:
        ConfigError: for a draft that does not fit the target.
    """

    name: str
    policy: TokenPolicy
    drafters: DrafterBundle | None = None
    draft: ChunkPolicy | None = None
    draft_name: str | None = None
    decoding: Decoding = DECODINGS["ar"]
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None

    def __post_init__(self) -> None:
        target, draft = self.policy.spec, None if self.draft is None else self.draft.spec
        if draft is not None and (draft.actions, draft.rate_hz) != (target.actions, target.rate_hz):
            raise ConfigError(
                f"the draft has {draft.actions} actions at {draft.rate_hz:g} Hz and the target {target.actions} at "
                f"{target.rate_hz:g} Hz; they must be those of one robot"
            )

    @property
    def recommended_gates(self) -> dict[str, Any]:
        """None: nobody has chosen any."""
        return {}

    @cached_property
    def observation(self) -> ObservationSpec:
        """See :class:`~specact.pair.Pair`."""
        target = self.policy.spec.observation
        return target if self.draft is None else self.draft.spec.observation.union(target)

    @cached_property
    def units(self) -> ActionUnits:
        """Those of the tokens: the outermost bins are -1 and 1."""
        return ActionUnits(self.policy.units.centre, self.policy.units.scale)

    @property
    def execute(self) -> int:
        """See :class:`~specact.pair.Pair`; all of a chunk."""
        return self.policy.spec.chunk

    @property
    def overlap(self) -> Literal["drop", "average"]:
        """See :class:`~specact.pair.Pair`."""
        return "drop"

    @property
    def rate_hz(self) -> float:
        """See :class:`~specact.pair.Pair`."""
        return self.policy.spec.rate_hz

    @property
    def drafter(self) -> TokenDrafter:
        """See :class:`~specact.pair.Pair`; of one robot."""
        return self.drafter_of(self.decoding)

    def drafter_of(self, decoding: Decoding) -> TokenDrafter:
        """The drafter of another decoding."""
        return TokenDrafter(self.policy, self.units, decoding, self.drafters, self.draft)

    @property
    def target(self) -> TokenTarget:
        """See :class:`~specact.pair.Pair`."""
        own: Mapping[str, TreeDrafter] = {} if self.drafters is None else self.drafters.own
        return TokenTarget(self.policy, own)

    def verifier(self, target: Target[Prefilled]) -> TokenVerifier:
        """See :class:`~specact.pair.Pair`; for a target in this process, see :class:`TokenCodec` for a server."""
        return TokenVerifier(target, self.units)

    @property
    def codec(self) -> TokenCodec:
        """See :class:`~specact.pair.Pair`."""
        return TokenCodec(self.policy, self.units)

    @property
    def responder(self) -> TokenResponder:
        """See :class:`~specact.pair.Pair`."""
        return TokenResponder(self.target, self.policy, self.name, self.fingerprint)

    @property
    def source(self) -> str:
        """See :class:`~specact.pair.LoadedPair`."""
        return str(self.path)


def token_pair(bundle: TokenBundle, draft: LoadedPolicy | None = None, draft_name: str | None = None) -> TokenPair:
    """A token policy's bundle as a pair, with the drafters that lie beside it.

    Args:
        bundle: the target.
        draft: a policy on the device.
        draft_name: how it was named.

    Raises:
        BundleError: if the drafters do not fit the target, or are damaged.
        ConfigError: if the draft does not fit the target.
    """
    folder = bundle.path / DRAFTERS
    drafters = load_drafters(folder, bundle) if folder.exists() else None
    prints = [part.fingerprint for part in (bundle, drafters, draft) if part is not None]
    whole = hashlib.sha256("".join(prints).encode()).hexdigest()[:16]
    return TokenPair(
        bundle.name, bundle.policy(), drafters, None if draft is None else draft.policy, draft_name,
        env=bundle.env, fingerprint=whole, path=bundle.path,
    )  # fmt: skip
