"""The instruction of a policy as token ids, and the inputs of a network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window
from specact.records import Record, check_fields

# Name of the instruction among a network's inputs.
INSTRUCTION = "instruction"
_PADDING, _UNKNOWN, _FIRST_WORD = 0, 1, 2


class Words(Record, frozen=True):
    """A policy's vocabulary.

    Attributes:
        vocabulary: lower-case words without repetitions.
        length: L, maximum number of words of an instruction; longer ones are truncated.

    Raises:
        ConfigError: for a repeated word, too many words, or a length out of range.
    """

    vocabulary: Annotated[tuple[str, ...], Meta(max_length=1 << 16)]
    length: Annotated[int, Meta(ge=1, le=256)]

    def __post_init__(self) -> None:
        check_fields(self)
        if len(set(self.vocabulary)) != len(self.vocabulary):
            raise ConfigError("a vocabulary has each of its words once")

    @classmethod
    def of(cls, instructions: Iterable[str]) -> Words:
        """The vocabulary of some instructions, with the length of the longest one."""
        split = [_split(text) for text in instructions]
        return cls(tuple(sorted({word for words in split for word in words})), max([1, *map(len, split)]))

    @property
    def size(self) -> int:
        """Number of token ids: the words, one for padding, one for unknown words."""
        return len(self.vocabulary) + _FIRST_WORD

    def numbers(self, instructions: Sequence[str | None]) -> NDArray[np.int64]:
        """Token ids of B instructions, ``[B, L]``: 0 is padding, 1 an unknown word."""
        known = {word: number for number, word in enumerate(self.vocabulary, _FIRST_WORD)}
        rows = np.full((len(instructions), self.length), _PADDING, np.int64)
        for row, text in zip(rows, instructions, strict=True):
            words = _split(text or "")[: self.length]
            row[: len(words)] = [known.get(word, _UNKNOWN) for word in words]
        return rows

    def describe(self) -> dict[str, Any]:
        """As plain values, for a manifest."""
        return {"vocabulary": list(self.vocabulary), "length": self.length}


@dataclass(frozen=True)
class NetworkInputs:
    """A network's inputs: the arrays of its spec and, if it needs one, the instruction.

    Attributes:
        spec: its observation spec.
        words: its vocabulary; not used by a spec without an instruction.

    Raises:
        BundleError: for an instruction without a vocabulary.
    """

    spec: ObservationSpec
    words: Words | None = None

    def __post_init__(self) -> None:
        if self.spec.instruction and self.words is None:
            raise BundleError("a policy that needs an instruction must say which words it knows; export it again")

    def stack(self, windows: Sequence[Window]) -> dict[str, NDArray[Any]]:
        """Arrays of B windows by name, ``[B, *window_shape]``, and ``instruction`` int64 ``[B, L]``."""
        stacked = self.spec.stack(windows)
        if self.spec.instruction and self.words is not None:
            stacked[INSTRUCTION] = self.words.numbers([window.instruction for window in windows])
        return stacked

    @property
    def shapes(self) -> dict[str, tuple[int | str, ...]]:
        """Shapes by name, the batch first, as :class:`~specact.bundle.network.Network` takes them."""
        shapes: dict[str, tuple[int | str, ...]] = {
            name: ("batch", *field.window_shape) for name, field in self.spec.fields.items()
        }
        if self.spec.instruction and self.words is not None:
            shapes[INSTRUCTION] = "batch", self.words.length
        return shapes


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
