"""A token policy as the target of a pair, with drafters of tokens or none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.bundle.manifest import joint_fingerprint
from specact.bundle.network import CPU, Compute
from specact.families.chunks.pair import check_one_robot
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy
from specact.families.tokens.bundle import TokenBundle
from specact.families.tokens.decoding import DECODINGS, Decoding
from specact.families.tokens.drafter_bundle import DrafterBundle, load_drafters
from specact.families.tokens.drafting import TokenDrafter
from specact.families.tokens.policy import TokenPolicy
from specact.families.tokens.verify import Prefilled, TokenTarget, TokenVerifier
from specact.families.tokens.wire import TokenExchange
from specact.pair import UNNAMED, Pair, PairSource
from specact.units import ActionUnits
from specact.verification import Target

# Folder of a bundle's drafters.
DRAFTERS = "drafters"


@dataclass(frozen=True)
class TokenParts:
    """A token policy as the target, which is greedy.

    Attributes:
        policy: the target.
        drafters: trained for it, or None.
        draft: a policy on the device, or None.
        decoding: of verified steps, with its source of candidates.
        name, env, fingerprint, path, source: see :class:`~specact.pair.Pair`.

    Raises:
        ConfigError: for a draft that is incompatible with the target.
    """

    policy: TokenPolicy
    drafters: DrafterBundle | None = None
    draft: ChunkPolicy | None = None
    decoding: Decoding = DECODINGS["ar"]
    name: str = ""
    env: str = ""
    fingerprint: str = ""
    path: Path | None = None
    source: PairSource = UNNAMED

    def __post_init__(self) -> None:
        if self.draft is not None:
            check_one_robot(self.draft.spec, self.policy.spec)

    @property
    def units(self) -> ActionUnits:
        """Units of the tokens: the outermost bins are -1 and 1."""
        return ActionUnits(self.policy.units.centre, self.policy.units.scale)

    def drafter(self) -> TokenDrafter:
        """A new one, of one robot."""
        return TokenDrafter(self.policy, self.units, self.decoding, self.drafters, self.draft)

    def target(self) -> TokenTarget:
        """The target with its own drafters.

        Raises:
            BundleError: if it was exported without its decoder.
        """
        self.policy.networks.check_decodes()
        return TokenTarget(self.policy, {} if self.drafters is None else self.drafters.own)

    def verifier(self, target: Target[Prefilled]) -> TokenVerifier:
        """For a target in this process, see :class:`TokenExchange` for a server."""
        return TokenVerifier(target, self.units)

    def pair(self) -> Pair[Prefilled]:
        """As a pair; all of a chunk is executed."""
        spec = self.policy.spec
        seen = spec.observation if self.draft is None else self.draft.spec.observation.union(spec.observation)
        return Pair(
            name=self.name, observation=seen, units=self.units, execute=spec.chunk, rate_hz=spec.rate_hz, env=self.env,
            fingerprint=self.fingerprint, path=self.path, source=self.source, parts=self,
            drafter=self.drafter, target=self.target, verifier=self.verifier,
            exchange=TokenExchange(self.policy, self.units, self.name, self.fingerprint, self.target),
        )  # fmt: skip


def load_token_pair(
    bundle: TokenBundle,
    draft: LoadedPolicy | None = None,
    source: PairSource | None = None,
    *,
    decoding: Decoding = DECODINGS["ar"],
    compute: Compute = CPU,
) -> Pair[Prefilled]:
    """A token policy's bundle as a pair, with the drafters in its folder.

    Args:
        bundle: the target.
        draft: a policy on the device.
        source: how it was named.
        decoding: of verified steps.
        compute: of the drafters.

    Raises:
        BundleError: if the drafters are damaged or incompatible with the target.
        ConfigError: if the draft is incompatible with the target.
    """
    folder = bundle.path / DRAFTERS
    drafters = load_drafters(folder, bundle, compute=compute) if folder.exists() else None
    prints = [part.fingerprint for part in (bundle, drafters, draft) if part is not None]
    return TokenParts(
        bundle.policy(), drafters, None if draft is None else draft.policy, decoding, bundle.name, bundle.env,
        joint_fingerprint(*prints), bundle.path, PairSource(str(bundle.path)) if source is None else source,
    ).pair()  # fmt: skip
