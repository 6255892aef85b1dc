"""A token policy as the target of a pair, with drafters of tokens or none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.families.chunks.sources import LoadedPolicy
from specact.families.target_pair import TargetPair, name_in
from specact.families.tokens.bundle import TokenBundle
from specact.families.tokens.decoding import DECODINGS, Decoding
from specact.families.tokens.drafter_bundle import DrafterBundle, load_drafters
from specact.families.tokens.drafters import TreeDrafter
from specact.families.tokens.drafting import TokenDrafter
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.verify import Prefilled, TokenTarget, TokenVerifier
from specact.families.tokens.wire import TokenExchange
from specact.pair import Named
from specact.units import ActionUnits
from specact.verification import Target

# Folder of a bundle's drafters.
DRAFTERS = "drafters"


@dataclass(frozen=True, kw_only=True)
class TokenPair(TargetPair[TokenPolicy]):
    """See :class:`~specact.pair.Pair` and :class:`~specact.families.target_pair.TargetPair`; the target is greedy.

    Attributes:
        drafters: trained for it, or None.
        decoding: of verified steps, with its source of candidates.
    """

    drafters: DrafterBundle | None = None
    decoding: Decoding = DECODINGS["ar"]

    @property
    def named(self) -> Named:
        """What it was loaded with.

        Raises:
            ConfigError: for a decoding of the user's own.
        """
        return Named(self.draft_name, None, name_in(DECODINGS, self.decoding, "ar"))

    @cached_property
    def units(self) -> ActionUnits:
        """Units of the tokens: the outermost bins are -1 and 1."""
        return ActionUnits(self.policy.units.centre, self.policy.units.scale)

    @property
    def execute(self) -> int:
        """See :class:`~specact.pair.Pair`; all of a chunk."""
        return self.policy.spec.chunk

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
        self.policy.networks.check_decodes()
        own: Mapping[str, TreeDrafter] = {} if self.drafters is None else self.drafters.own
        return TokenTarget(self.policy, own)

    def verifier(self, target: Target[Prefilled]) -> TokenVerifier:
        """See :class:`~specact.pair.Pair`; for a target in this process, see :class:`TokenExchange` for a server."""
        return TokenVerifier(target, self.units)

    @cached_property
    def exchange(self) -> TokenExchange:
        """See :class:`~specact.pair.Pair`."""
        return TokenExchange(self.policy, self.units, self.name, self.fingerprint, lambda: self.target)


def token_pair(
    bundle: TokenBundle,
    draft: LoadedPolicy | None = None,
    draft_name: str | None = None,
    *,
    compute: Compute = CPU,
) -> TokenPair:
    """A token policy's bundle as a pair, with the drafters in its folder.

    Args:
        bundle: the target.
        draft: a policy on the device.
        draft_name: its name as given by the user.
        provider, threads: of the drafters, see :class:`~specact.families.codes.network.OnnxPolicy`.

    Raises:
        BundleError: if the drafters are damaged or incompatible with the target.
        ConfigError: if the draft is incompatible with the target.
    """
    folder = bundle.path / DRAFTERS
    drafters = load_drafters(folder, bundle, compute=compute) if folder.exists() else None
    parts = [part.fingerprint for part in (bundle, drafters, draft) if part is not None]
    return TokenPair(
        name=bundle.name, policy=bundle.policy(), drafters=drafters, draft=None if draft is None else draft.policy,
        draft_name=draft_name, env=bundle.env, fingerprint=joint_fingerprint(*parts), path=bundle.path,
    )  # fmt: skip
