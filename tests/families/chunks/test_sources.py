"""Somebody else's policy: a Python function, an ONNX file with a description, a PyTorch module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact.errors import BundleError, ConfigError, MissError
from specact.families.chunks.pair import ChunkAnswers
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import Inputs, chunk_policy, onnx_policy, try_out
from specact.load import load_policy
from specact.observation import Field, ObservationSpec, Window
from specact.pair import LocalTarget
from specact.rng import StepAddress
from specact.robot.chunks import LocalSource
from specact.types import Miss, OffloadTimes

DESCRIPTION = """
onnx = "policy.onnx"
chunk = 3
actions = 2
rate_hz = 10.0
output = "chunk"
low = [-1.0, -1.0]
high = [1.0, 1.0]
[observation.state]
shape = [2]
history = 0
input = "robot_state"
[observation."image.front"]
shape = [4, 6, 3]
dtype = "uint8"
history = 0
input = "camera"
channels_first = true
"""
WINDOW = Window({"state": np.array([0.5, -0.25], np.float32), "image.front": np.full((4, 6, 3), 51, np.uint8)})


# Chunks of the state plus the mean of the camera's frame, and a second output.
GRAPH = """
<ir_version: 9, opset_import: ["" : 17]>
policy (float[B, 2] robot_state, float[B, 3, 4, 6] camera) => (float[B] mean, float[B, 3, 2] chunk) {
    one = Constant <value_ints: ints = [1]> ()
    mean = ReduceMean <axes = [1, 2, 3], keepdims = 0> (camera)
    means = Unsqueeze (mean, one)
    action = Add (robot_state, means)
    actions = Unsqueeze (action, one)
    chunk = Concat <axis = 1> (actions, actions, actions)
}
"""


@pytest.fixture(scope="module")
def graph() -> bytes:
    pytest.importorskip("onnx")
    from onnx import parser

    content: bytes = parser.parse_model(GRAPH).SerializeToString()
    return content


def described(folder: Path, graph: bytes, text: str = DESCRIPTION) -> Path:
    (folder / "policy.onnx").write_bytes(graph)
    (folder / "policy.toml").write_text(text)
    return folder / "policy.toml"


def test_an_onnx_file_sees_frames_as_it_wants_them(graph: bytes, tmp_path: Path) -> None:
    policy = onnx_policy(described(tmp_path, graph))
    chunk = policy.infer(WINDOW, np.random.default_rng(0))
    np.testing.assert_allclose(chunk, np.tile([0.7, -0.05], (3, 1)), atol=1e-6)
    try_out(load_policy(str(tmp_path / "policy.toml")))
    assert policy.units is not None and policy.fingerprint


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('onnx = "policy.onnx"', ""), ('"policy.onnx"', '"none.onnx"'), ('"policy.onnx"', '"a\\u0000b"'),
        ("rate_hz = 10.0", "rate_hz = nan"), ('output = "chunk"', 'output = "action"'),
        ("low = [-1.0, -1.0]", "low = [-1.0]"), ("low = [-1.0, -1.0]", "low = [2.0, 2.0]"),
        ("low = [-1.0, -1.0]", ""), ("[observation.state]", "[observation.State-2]"),
        ('input = "camera"', 'input = "kamera"'), ('dtype = "uint8"', 'dtype = "int4"'), ('dtype = "uint8"', ""),
        ("chunk = 3", "chunk = 3\nchnuk = 3"), ("shape = [2]", "shape = [2]\nhistroy = 2"),
    ],
)  # fmt: skip
def test_a_description_that_does_not_describe_it_is_refused(old: str, new: str, graph: bytes, tmp_path: Path) -> None:
    assert old in DESCRIPTION
    with pytest.raises((ConfigError, BundleError), match=r"policy\.(toml|onnx)"):
        onnx_policy(described(tmp_path, graph, DESCRIPTION.replace(old, new, 1)))


@pytest.mark.parametrize("change", ["cut", "other size"])
def test_a_graph_that_does_not_do_what_is_said_is_refused(change: str, graph: bytes, tmp_path: Path) -> None:
    text = DESCRIPTION.replace("chunk = 3", "chunk = 4") if change == "other size" else DESCRIPTION
    described(tmp_path, graph[:40] if change == "cut" else graph, text)
    with pytest.raises((BundleError, ConfigError), match=r"policy"):
        try_out(load_policy(str(tmp_path / "policy.toml")))


def test_a_function_whose_server_does_not_answer_is_a_miss() -> None:
    """Of the control loop, which goes on; not an error that ends it."""

    @chunk_policy(observation={"state": (2,)}, chunk=3, actions=2, rate_hz=10.0)
    def asks(inputs: Inputs) -> Any:
        raise MissError("no answer within 200 ms", "deadline")

    missed = LocalSource(asks).ask(WINDOW, StepAddress(0, 0, 0, 0))
    assert isinstance(missed, Miss) and missed.cause == "deadline"
    miss = LocalTarget(ChunkAnswers(asks)).submit(WINDOW, StepAddress(0, 0, 0, 0)).result()
    assert isinstance(miss, Miss) and miss.cause == "deadline"
    assert Miss.of(MissError("what is this", "fog"), OffloadTimes()).cause == "invalid"


def test_actions_do_not_leave_the_range_that_was_given() -> None:
    @chunk_policy(observation={"state": (2,)}, chunk=2, actions=2, rate_hz=10.0, low=[-1.0, 0.0], high=[1.0, 4.0])
    def far(inputs: Inputs) -> Any:
        return [[[50.0, -50.0], [np.inf, np.nan]]]

    chunk = far.infer(Window({"state": np.zeros((1, 2), np.float32)}), np.random.default_rng(0))
    # What is not finite is no action at all, and is refused further on.
    np.testing.assert_array_equal(chunk, [[1.0, 0.0], [np.inf, np.nan]])


def test_a_pytorch_module_is_told_the_instruction() -> None:
    torch = pytest.importorskip("torch")
    from specact.families.chunks.sources import torch_policy

    class Listener(torch.nn.Module):  # type: ignore[misc, name-defined]
        def forward(self, seen: dict[str, Any], instruction: list[str]) -> Any:
            words = torch.tensor([len(text) for text in instruction])[:, None, None]
            return (seen["state"][:, -1, None] + words).expand(-1, 3, -1).to(torch.bfloat16)

    spec = ChunkSpec(ObservationSpec({"state": Field((2,))}, instruction=True), 3, 2, 10.0)
    policy = torch_policy(spec, Listener())
    windows = [Window({"state": np.full((1, 2), k, np.float32)}, "x" * k) for k in (1, 2)]
    chunks = policy.infer_batch(windows, [np.random.default_rng(0)] * 2)
    assert [chunk.tolist() for chunk in chunks] == [[[2.0, 2.0]] * 3, [[4.0, 4.0]] * 3]


def test_a_lerobot_policy_needs_lerobot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)  # as where it is not installed
    monkeypatch.delitem(sys.modules, "specact.families.chunks.lerobot", raising=False)
    with pytest.raises(ConfigError, match=r"needs LeRobot, and there is no module 'lerobot.*' here; .* pip install"):
        load_policy("lerobot:outputs/pretrained_model@20")
