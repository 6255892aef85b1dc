"""Spec and interfaces of policies of action codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, structs

from specact.errors import ConfigError
from specact.families.codes.values import CodeDistribution
from specact.observation import ObservationSpec, Window
from specact.records import Positive, RateHz, Record, Size, check_fields


class PolicySpec(Record, frozen=True):
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
        ConfigError: for values outside their range.
    """

    draft: ObservationSpec
    target: ObservationSpec
    codebooks: Annotated[int, Meta(ge=1, le=1 << 13)]
    codes: Size
    chunk: Size
    actions: Size
    execute: Size
    overlap: Literal["drop", "average"]
    temperature: Positive
    rate_hz: RateHz
    sequential: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.observation
        if self.execute > self.chunk:
            raise ConfigError(f"execute must lie between 1 and chunk = {self.chunk}, got {self.execute}")
        if self.sequential and self.codebooks != 2:
            raise ConfigError(f"a sequential secondary head needs 2 codebooks, got {self.codebooks}")

    @property
    def observation(self) -> ObservationSpec:
        """Union of the observations that draft and target need; the device stores these."""
        return self.draft.union(self.target)

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return structs.asdict(self) | {"draft": self.draft.describe(), "target": self.target.describe()}


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
