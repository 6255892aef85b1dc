"""Instructions as numbers."""

from __future__ import annotations

import numpy as np
import pytest

from specact.bundle.manifest import Words
from specact.bundle.network import NetworkInputs
from specact.errors import BundleError
from specact.observation import ObservationSpec, Window, vectors
from specact.records import read_record

WORDS = Words.of(["open the door", "Press the button, gently!"])


def test_words_are_numbered_in_any_case_and_without_punctuation() -> None:
    assert WORDS.vocabulary == ("button", "door", "gently", "open", "press", "the")
    assert WORDS.length == 4
    found = WORDS.numbers(["OPEN the   door.", "press THE button gently"])
    assert found.tolist() == [[5, 7, 3, 0], [6, 7, 2, 4]]
    assert found.max() < WORDS.size


def test_what_is_unknown_missing_or_too_long_has_a_number_too() -> None:
    assert WORDS.numbers(["close the door", None, "", "the " * 9]).tolist() == [
        [1, 7, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0], [7, 7, 7, 7],
    ]  # fmt: skip


def test_a_file_holds_them() -> None:
    assert read_record(WORDS.describe(), Words, "words") == WORDS


@pytest.mark.parametrize(
    "raw",
    [
        {}, {"vocabulary": ["a"]}, {"vocabulary": 3, "length": 1}, {"vocabulary": [1], "length": 1},
        {"vocabulary": ["a", "a"], "length": 1}, {"vocabulary": ["a"], "length": 0},
        {"vocabulary": ["a"], "length": "1"}, {"vocabulary": [["a"]], "length": 1},
    ],
)  # fmt: skip
def test_unusable_words_are_refused(raw: dict[str, object]) -> None:
    with pytest.raises(BundleError, match="words"):
        read_record(raw, Words, "words", BundleError)


def test_a_network_takes_the_instruction_beside_what_it_sees() -> None:
    spec = ObservationSpec(vectors(2, state=3).fields, instruction=True)
    window = Window(spec.zeros().arrays, "open the window")
    inputs = NetworkInputs(spec, WORDS)
    assert inputs.shapes == {"state": ("batch", 2, 3), "instruction": ("batch", 4)}
    stacked = inputs.stack([window, window])
    assert stacked["state"].shape == (2, 2, 3)
    assert stacked["instruction"].dtype == np.int64
    assert stacked["instruction"].tolist() == [[5, 7, 1, 0]] * 2
    # A policy that is told nothing does not get it, whatever words it knows.
    assert NetworkInputs(vectors(2, state=3), WORDS).shapes == {"state": ("batch", 2, 3)}
    with pytest.raises(BundleError, match="words"):
        NetworkInputs(spec)
