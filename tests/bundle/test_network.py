"""Networks: declared inputs and outputs are checked at loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tests.bundle.graphs import doubling

from specact.bundle.network import Compute, Network
from specact.errors import BundleError, ConfigError


def test_a_network_that_fits_runs(tmp_path: Path) -> None:
    network = Network(doubling(tmp_path / "n.onnx"), {"x": ("rows", "width")}, {"y": ("rows", "width")})
    assert (network.inputs, network.outputs) == ({"x": ["batch", 2]}, {"y": ["batch", 2]})
    assert network.sizes == {"width": 2}
    (found,) = network.run({"x": np.ones((3, 2), np.float32)})
    assert np.array_equal(found, np.full((3, 2), 2.0))


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


@pytest.mark.parametrize("threads", [0, -1])
def test_a_network_has_at_least_one_thread(threads: int) -> None:
    with pytest.raises(ConfigError, match=f"threads.*{threads}"):
        Compute(threads=threads)


def test_an_unknown_provider_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"NoSuchProvider.*{onnxruntime.get_available_providers()[0]}"):
        Compute("NoSuchProvider")
