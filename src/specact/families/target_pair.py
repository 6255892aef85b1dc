"""A target's bundle as a pair, with drafters in its folder, a draft policy, or none."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from specact.errors import ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import ChunkPolicy
from specact.families.tokens.policy import TokenPolicy
from specact.observation import ObservationSpec

P = TypeVar("P", FlowPolicy, TokenPolicy)
C = TypeVar("C")


@dataclass(frozen=True, kw_only=True)
class TargetPair(ABC, Generic[P]):
    """The members of :class:`~specact.pair.Pair` that are common to token and flow targets.

    Attributes:
        name: of the pair.
        policy: the target.
        draft: a policy on the device, or None.
        draft_name: its name as given when the pair was loaded.
        env, fingerprint, path: see :class:`~specact.pair.LoadedPair`.

    Raises:
        ConfigError: for a draft that is incompatible with the target.
    """

    name: str
    policy: P
    draft: ChunkPolicy | None = None
    draft_name: str | None = None
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
        """Empty: there are no recommendations."""
        return {}

    @cached_property
    def observation(self) -> ObservationSpec:
        """See :class:`~specact.pair.Pair`."""
        target = self.policy.spec.observation
        return target if self.draft is None else self.draft.spec.observation.union(target)

    @property
    def overlap(self) -> Literal["drop", "average"]:
        """See :class:`~specact.pair.Pair`."""
        return "drop"

    @property
    def rate_hz(self) -> float:
        """See :class:`~specact.pair.Pair`."""
        return self.policy.spec.rate_hz

    @property
    def source(self) -> str:
        """See :class:`~specact.pair.LoadedPair`."""
        return str(self.path)


def name_in(known: Mapping[str, C], composition: C, default: str) -> str:
    """The name of a decoding or of rounds; empty for the default.

    Args:
        known: those that have a name.
        composition: one of them.
        default: name of the family's default.

    Raises:
        ConfigError: for one of the user's own.
    """
    for name, one in known.items():
        if one == composition:
            return "" if name == default else name
    raise ConfigError(
        "a decoding of your own has no name by which a calibration or another process finds it; choose one of "
        f"{', '.join(known)}"
    )
