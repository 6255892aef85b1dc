"""Tokenisation of instructions with a vocabulary of words, and the inputs of a network."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.errors import BundleError
from specact.observation import ObservationSpec, Window
from specact.runtime.limits import check_integer

# Name of the instruction among a network's inputs.
INSTRUCTION = "instruction"
_PADDING, _UNKNOWN, _FIRST_WORD = 0, 1, 2
_MAX_VOCABULARY, _MAX_LENGTH = 1 << 16, 256


@dataclass(frozen=True)
class Words:
    """A policy's vocabulary.

    Attributes:
        vocabulary: lower-case words without repetitions.
        length: L, maximum number of words of an instruction; longer ones are truncated.

    Raises:
        BundleError: for an invalid vocabulary or length.
    """

    vocabulary: tuple[str, ...]
    length: int

    def __post_init__(self) -> None:
        check_integer("words.length", self.length, least=1, most=_MAX_LENGTH)
        texts = all(isinstance(word, str) for word in self.vocabulary)
        if not texts or not len(set(self.vocabulary)) == len(self.vocabulary) <= _MAX_VOCABULARY:
            raise BundleError(f"a vocabulary has at most {_MAX_VOCABULARY} words, each of them once")

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
        """As plain values, for a manifest; :func:`read_words` reads it."""
        return {"vocabulary": list(self.vocabulary), "length": self.length}


@dataclass(frozen=True)
class NetworkInputs:
    """A network's inputs: the arrays of its spec and, if it needs one, the instruction.

    Attributes:
        spec: its observation spec.
        words: its vocabulary; None for a spec without an instruction.

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
    def shapes(self) -> dict[str, list[int]]:
        """Shapes without the batch, by name."""
        tokens = {INSTRUCTION: [self.words.length]} if self.spec.instruction and self.words is not None else {}
        return self.spec.shapes | tokens


def read_words(manifest: Mapping[str, Any]) -> Words | None:
    """The vocabulary in a bundle's manifest, or None if it has none.

    Raises:
        BundleError: if it is invalid.
    """
    raw = manifest.get("words")
    if raw is None:
        return None
    try:
        return Words(tuple(raw["vocabulary"]), raw["length"])
    except (TypeError, KeyError) as error:
        raise BundleError(f"words have a vocabulary and a length; these are unusable ({error})") from None


def _split(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())
