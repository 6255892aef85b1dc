"""Networks: declared inputs and outputs are checked at loading; instructions are numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.bundle.graphs import doubling

from specact.bundle.manifest import Words
from specact.bundle.network import Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.observation import ObservationSpec, Window, vectors
from specact.records import read_record


def test_a_network_that_fits_runs(tmp_path: Path) -> None:
    network = Network(doubling(tmp_path / "n.onnx"), {"x": ("rows", "width")}, {"y": ("rows", "width")})
    assert (network.inputs, network.outputs) == ({"x": ["batch", 2]}, {"y": ["batch", 2]})
    assert network.sizes == {"width": 2}
    (output,) = network.run({"x": np.ones((3, 2), np.float32)})
    assert np.array_equal(output, np.full((3, 2), 2.0))


@pytest.mark.parametrize(
    ("inputs", "outputs", "sizes"),
    [
        ({"z": ("batch", 2)}, None, {}),
        ({"x": ("batch", 2), "z": (1,)}, None, {}),
        ({}, None, {}),
        ({"x": ("batch", 3)}, None, {}),
        ({"x": (1, 2)}, None, {}),
        ({"x": ("batch", 2, 1)}, None, {}),
        ({"x": ("batch", "width")}, None, {"width": 5}),
        (None, {"y": ("batch", 3)}, {}),
        (None, {"z": ("batch", 2)}, {}),
    ],
)
def test_a_network_that_does_not_fit_is_refused(inputs: Any, outputs: Any, sizes: Any, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"n\.onnx (takes|gives).*split it"):
        Network(doubling(tmp_path / "n.onnx"), inputs, outputs, sizes=sizes, repair="split it")


@pytest.mark.parametrize("content", [b"", b"no network"])
def test_an_unreadable_network_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "n.onnx").write_bytes(content)
    for file in (tmp_path / "n.onnx", tmp_path / "absent.onnx", tmp_path):
        with pytest.raises(BundleError, match=file.name):
            Network(file)


@pytest.mark.parametrize(("options", "said"), [({"threads": 0}, "threads.*0"), ({"provider": "No"}, "'No'.*CPUExec")])
def test_an_unknown_provider_and_less_than_a_thread_are_refused(options: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Compute(**options)


WORDS = Words.from_instructions(["open the door", "Press the button, gently!"])


def test_words_are_numbered_in_any_case_without_punctuation_the_unknown_and_missing_too() -> None:
    assert WORDS.vocabulary == ("button", "door", "gently", "open", "press", "the")
    assert (WORDS.length, WORDS.size) == (4, 8)
    assert WORDS.numbers(["OPEN the   door.", "press THE button gently"]).tolist() == [[5, 7, 3, 0], [6, 7, 2, 4]]
    assert WORDS.numbers(["close the door", None, "", "the " * 9]).tolist() == [
        [1, 7, 3, 0], [0, 0, 0, 0], [0, 0, 0, 0], [7, 7, 7, 7],
    ]  # fmt: skip
    assert read_record(structs.asdict(WORDS), Words, "words") == WORDS
    for raw in ({"vocabulary": ["a"]}, {"vocabulary": ["a", "a"], "length": 1}):
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
