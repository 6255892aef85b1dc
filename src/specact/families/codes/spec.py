"""Spec and interfaces of policies of action codes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from specact.errors import BundleError
from specact.families.codes.values import CodeDistribution
from specact.observation import ObservationSpec, Window
from specact.runtime.limits import RATES_HZ, check_integer, check_positive


@dataclass(frozen=True)
class PolicySpec:
    """The spec shared by draft, target and tokenizer of one bundle.

    Attributes:
        draft, target: observation spec of each policy.
        codebooks, codes: G and K.
        chunk, actions: n and A.
        execute: how many actions of a chunk are executed before the next inference.
        overlap: with ``average``, actions that several chunks predict for the same control step are averaged.
        temperature: of both softmaxes.
        rate_hz: control rate of the demonstrations [Hz].
        sequential: whether both policies have a sequential secondary head, which gives the distribution of the
            secondary code given the primary one (``CodeDistribution.conditional``); only with two codebooks.

    Raises:
        BundleError: for values outside their range.
    """

    draft: ObservationSpec
    target: ObservationSpec
    codebooks: int
    codes: int
    chunk: int
    actions: int
    execute: int
    overlap: Literal["drop", "average"]
    temperature: float
    rate_hz: float
    sequential: bool = False

    def __post_init__(self) -> None:
        for name in ("codes", "chunk", "actions", "execute"):
            check_integer(name, getattr(self, name), least=1)
        check_integer("codebooks", self.codebooks, least=1, most=1 << 13)
        _ = self.observation
        check_positive("temperature", self.temperature)
        check_positive("rate_hz", self.rate_hz)
        if self.rate_hz not in RATES_HZ:
            raise BundleError(f"a bundle's rate_hz must be {RATES_HZ}, but its manifest says {self.rate_hz}")
        if self.overlap not in ("drop", "average") or not isinstance(self.sequential, bool):
            raise BundleError(
                "a bundle's overlap must be drop or average and its sequential true or false, but its manifest says "
                f"{self.overlap!r:.60} and {self.sequential!r:.60}"
            )
        if not 1 <= self.execute <= self.chunk:
            raise BundleError(
                f"a bundle's execute must lie between 1 and chunk = {self.chunk}, but its manifest says {self.execute}"
            )
        if self.sequential and self.codebooks != 2:
            raise BundleError(
                f"a sequential secondary head needs 2 codebooks, but the bundle's manifest says {self.codebooks}"
            )

    @property
    def observation(self) -> ObservationSpec:
        """Union of the observations that draft and target need; the device stores these."""
        return self.draft.union(self.target)

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        own = {name: value for name, value in vars(self).items() if name not in ("draft", "target")}
        return {"draft": self.draft.describe(), "target": self.target.describe(), **own}


class InfersCodes(Protocol):
    """Maps an observation window to a distribution over action codes; deterministic."""

    def infer(self, window: Window) -> CodeDistribution:
        """The distribution for one window."""
        ...


class CodePolicy(InfersCodes, Protocol):
    """A policy of action codes."""

    def infer_batch(self, windows: Sequence[Window]) -> list[CodeDistribution]:
        """The distributions for several windows in one batch."""
        ...
