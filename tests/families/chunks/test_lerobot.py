"""LeRobot's policies against their own predict_action_chunk, and the parts of its flow policies (make lerobot)."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here comes from a hub
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("lerobot", reason="LeRobot is not installed here; make lerobot tests it in its own environment")
    import torch
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies.factory import get_policy_class, make_pre_post_processors
    from lerobot.policies.utils import prepare_observation_for_inference
    from safetensors.torch import load_file, save_file
    from tests.families.chunks import tiny_lerobot as tiny

    from specact.families.chunks.lerobot import LeRobotFlow

from tests.pages import ROOT, THIRD_PARTY, Block, blocks, follow

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.policy import ChunkPolicy
from specact.families.chunks.sources import LoadedPolicy, try_out
from specact.gates.gate import Always
from specact.lab.rollout.processes import ServerProcess
from specact.load import load_pair, load_policy
from specact.observation import ObservationSpec, Window
from specact.policy import SpeculativePolicy
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.systems.flow import ROUNDS, FlowParts, load_flash

# It warns of what it will change.
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]

MAKERS: dict[str, Callable[[Path], Path]] = {
    "act": tiny.act,
    "diffusion": tiny.diffusion,
    "vqbet": tiny.vqbet,
    "smolvla": tiny.smolvla,
    "pi0": tiny.pi0,
    "pi05": tiny.pi05,
    "pi0-relative": lambda path: tiny.pi0(path, use_relative_actions=True),
}
FLOWS = ("smolvla", "pi0", "pi05")


class Made:
    """One tiny policy: as it is saved, as LeRobot loads it, and as this package does."""

    def __init__(self, name: str, path: Path) -> None:
        self.path = MAKERS[name](path / name)
        with tiny.tiny_gemma() if name.startswith("pi") else nullcontext():
            self.loaded: LoadedPolicy = load_policy(f"lerobot:{self.path}@20")
            config = PreTrainedConfig.from_pretrained(self.path)
            self.theirs = get_policy_class(config.type).from_pretrained(self.path, config=config).eval()
        self.config = config
        self.before, self.after = make_pre_post_processors(config, pretrained_path=str(self.path))

    @property
    def policy(self) -> ChunkPolicy:
        return self.loaded.policy

    @property
    def parts(self) -> LeRobotFlow:
        assert isinstance(self.policy, FlowPolicy) and isinstance(self.policy.networks, LeRobotFlow)
        return self.policy.networks

    def batch(self, window: Window, step: int = -1) -> dict[str, Any]:
        """What LeRobot's own functions make of one observation of a window."""
        seen = {
            "observation.state": window["state"][step].copy(),
            "observation.images.front": window["image.front"][step].copy(),
        }
        batch: dict[str, Any] = self.before(
            prepare_observation_for_inference(seen, torch.device("cpu"), window.instruction)
        )
        return batch

    def chunk(self, window: Window, noise: Any = None) -> Any:
        """LeRobot's own answer in the environment's units."""
        drawn = {} if noise is None else {"noise": torch.tensor(noise)[None]}
        return self.after(self.theirs.predict_action_chunk(self.batch(window), **drawn))[0].numpy()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """Makes each policy once."""
    folder, kept = tmp_path_factory.mktemp("lerobot"), dict[str, Made]()

    def make(name: str) -> Made:
        if name not in kept:
            kept[name] = Made(name, folder)
        return kept[name]

    return make


def window_of(spec: ObservationSpec, seed: int) -> Window:
    rng, arrays = np.random.default_rng(seed), dict[str, Any]()
    for name, field in spec.fields.items():
        wild = rng.integers(0, 256, field.window_shape, np.uint8)
        arrays[name] = wild if field.is_image else rng.standard_normal(field.window_shape, dtype=np.float32)
    return Window(arrays, ("push the block", "lift")[seed % 2] if spec.instruction else None)


def noise_of(seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal((tiny.CHUNK, tiny.WIDTH), dtype=np.float32)


@pytest.mark.parametrize("name", MAKERS)
def test_the_spec_is_that_of_the_policy(name: str, made: Callable[[str], Made]) -> None:
    loaded, history = made(name).loaded, {"diffusion": 2, "vqbet": 3}.get(name, 1)
    spec = loaded.policy.spec
    assert (spec.chunk, spec.actions, spec.rate_hz) == (tiny.CHUNK, tiny.ACTIONS, 20.0)
    shapes = {name: field.window_shape for name, field in spec.observation.fields.items()}
    assert shapes == {"state": (history, 4), "image.front": (history, 24, 24, 3)}
    assert spec.observation.instruction == (name not in ("act", "diffusion", "vqbet"))
    assert loaded.name == name and len(loaded.fingerprint) == 16
    # What is relative to the state has no range of its own.
    assert (loaded.units is None) == (name == "pi0-relative")
    if loaded.units is not None:
        assert loaded.units.centre == pytest.approx([0.5, -1.0], abs=1e-5)
        assert loaded.units.scale == pytest.approx([1.8, 18.0], rel=1e-5)
    try_out(loaded)


def test_act_answers_what_its_own_method_answers(made: Callable[[str], Made]) -> None:
    act = made("act")
    for seed in range(3):
        window = window_of(act.policy.spec.observation, seed)
        chunk = act.policy.infer(window, np.random.default_rng(seed))
        np.testing.assert_array_equal(chunk, act.chunk(window))
        # Every input counts, and how it is given: frames upside down are others.
        turned = Window({**window.arrays, "image.front": window["image.front"][:, ::-1]})
        assert np.abs(chunk - act.policy.infer(turned, np.random.default_rng(seed))).max() > 1e-4


@pytest.mark.parametrize("name", ["diffusion", "vqbet"])
def test_a_policy_with_a_memory_is_shown_the_window(name: str, made: Callable[[str], Made]) -> None:
    """As its own select_action in an episode of as many steps as the window has, with PyTorch's generator seeded."""
    model = made(name)
    window = window_of(model.policy.spec.observation, 0)
    model.theirs.reset()
    for step in range(model.config.n_obs_steps):
        model.theirs._queues["action"].clear()
        torch.manual_seed(int(np.random.default_rng(5).integers(1 << 63)))
        first = model.theirs.select_action(model.batch(window, step))
    queue = torch.stack([first, *model.theirs._queues["action"]], dim=1)
    chunk = model.policy.infer(window, np.random.default_rng(5))
    np.testing.assert_allclose(chunk, model.after(queue)[0].numpy(), atol=1e-5)
    # The oldest observation counts, too.
    older = {key: np.concatenate([array[1:2], array[1:]]) for key, array in window.arrays.items()}
    assert np.abs(chunk - model.policy.infer(Window(older), np.random.default_rng(5))).max() > 1e-4


@pytest.mark.parametrize("name", [*FLOWS, "pi0-relative"])
def test_a_flow_policy_answers_as_its_own_method_with_the_same_noise(name: str, made: Callable[[str], Made]) -> None:
    flow = made(name)
    assert isinstance(flow.policy, FlowPolicy) == (name in FLOWS)
    for seed in range(2):
        window = window_of(flow.policy.spec.observation, seed)
        wanted = flow.chunk(window, noise_of(seed))
        chunk = flow.policy.infer(window, np.random.default_rng(seed))
        np.testing.assert_allclose(chunk, wanted, rtol=1e-4, atol=1e-4)
        assert np.abs(wanted - flow.chunk(window, noise_of(seed + 1))).max() > 0.05  # noise is what decides
        said = Window(window.arrays, "lift the block the block")
        assert np.abs(chunk - flow.policy.infer(said, np.random.default_rng(seed))).max() > 1e-4


@pytest.mark.parametrize("name", FLOWS)
def test_one_cache_serves_many_chunks_and_times(name: str, made: Callable[[str], Made]) -> None:
    """What a method needs that drafts and verifies several Euler steps at once; a cache is a value."""
    parts, spec = made(name).parts, made(name).policy.spec.observation
    chunks, times = np.stack([noise_of(seed) for seed in range(5)]), np.linspace(0.0, 0.9, 5, dtype=np.float32)
    windows = [window_of(spec, seed) for seed in range(5)]
    caches, several = [parts.cache([window]) for window in windows], parts.cache(windows)
    together = parts.velocity(chunks, times, caches[0])
    for _ in range(2):
        for row in range(5):
            alone = parts.velocity(chunks[row : row + 1], times[row : row + 1], caches[0])
            np.testing.assert_allclose(alone[0], together[row], rtol=1e-4, atol=1e-5)
    assert together.shape == chunks.shape and together.dtype == np.float32
    velocities = parts.velocity(chunks, times, several)
    for row in range(5):
        alone = parts.velocity(chunks[row : row + 1], times[row : row + 1], caches[row])
        np.testing.assert_allclose(alone[0], velocities[row], rtol=1e-4, atol=1e-5)
    assert np.abs(together - parts.velocity(chunks, times[::-1].copy(), caches[0])).max() > 1e-3
    assert np.abs(together - velocities)[1:].max() > 1e-3


@pytest.mark.parametrize("name", FLOWS)
def test_the_pull_is_the_exact_gradient(name: str, made: Callable[[str], Made]) -> None:
    """``g . d = (Y - x^_1)^T diag(W) dx^_1/dx d`` by central differences, and nothing of it from the padding."""
    parts, rng = made(name).parts, np.random.default_rng(0)
    cache = parts.cache([window_of(made(name).policy.spec.observation, 0)])
    chunk, wanted = noise_of(1)[None], noise_of(2)[None]
    weights, now = rng.random((1, tiny.CHUNK), dtype=np.float32), np.array([0.4], np.float32)
    velocity, pull = parts.guide(chunk, now, cache, wanted, weights)
    np.testing.assert_allclose(velocity, parts.velocity(chunk, now, cache), atol=1e-5)
    missing = weights[..., None] * (wanted - (chunk + (1 - now) * velocity))
    missing[..., tiny.ACTIONS :] = 0.0
    for _ in range(5):
        way = rng.standard_normal(chunk.shape, dtype=np.float32)
        ends = [chunk + side * np.float32(0.01) * way for side in (-1, 1)]
        low, high = (end + (1 - now) * parts.velocity(end, now, cache) for end in ends)
        assert float((pull * way).sum()) == pytest.approx(float((missing * (high - low)).sum()) / 0.02, abs=0.02)


@pytest.mark.parametrize("name", FLOWS)
def test_tokens_are_as_many_for_every_window_and_encoded_once(
    name: str, made: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, parts = made(name).policy, made(name).parts
    told = ("push the block", "lift")
    windows = [Window(window_of(policy.spec.observation, seed).arrays, text) for seed, text in enumerate(told)]
    tokens = parts.tokens(windows)
    for row, window in enumerate(windows):
        np.testing.assert_allclose(parts.tokens([window])[0], tokens[row], atol=1e-5)
        # State and instruction are there, wherever the policy itself shows them to its networks; of pi05's words for
        # its state the tiny tokenizer knows none.
        moved = Window({**window.arrays, "state": window["state"] + 1.0}, window.instruction)
        assert name == "pi05" or np.abs(parts.tokens([moved])[0] - tokens[row]).max() > 1e-3
        assert np.abs(parts.tokens([Window(window.arrays, f"the {window.instruction}")])[0] - tokens[row]).max() > 1e-3
    # The order of words is no affair of whoever reads the tokens.
    orders = [parts.tokens([Window(windows[0].arrays, text)])[0] for text in ("push the lift", "the push lift")]
    assert np.abs(np.diff(np.tanh(orders).sum(axis=1), axis=0)).max() > 1e-3
    # The end of the shorter instruction is zeros, and so is a camera that is not there.
    used = (np.abs(tokens).max(axis=-1) > 0.0).sum(axis=1)
    assert tokens.shape[1] > used[0] > used[1]
    encodings, seen = parts.tokens(windows), list[Any]()
    network = parts._model.policy.model
    encoder = network.vlm_with_expert if name == "smolvla" else network.paligemma_with_expert
    encode = encoder.embed_image

    def encoded(image: Any) -> Any:
        seen.append(image)
        return encode(image)

    monkeypatch.setattr(encoder, "embed_image", encoded)
    chunks, times = np.stack([noise_of(0), noise_of(1)]), np.array([0.2, 0.9], np.float32)
    known = parts.velocity(chunks, times, parts.cache(windows, encodings))
    assert not seen
    # Other tokens are none that it knows.
    for given in (tokens, None):
        np.testing.assert_array_equal(parts.velocity(chunks, times, parts.cache(windows, given)), known)
    assert seen


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a SmolVLA that has learned something, and what it was taught."""
    folder = tmp_path_factory.mktemp("taught")
    tiny.taught_smolvla(folder / "smolvla")
    tiny.demonstrations(folder / "shown")
    return folder


def shown_to(taught: Path, count: int) -> tuple[FlowPolicy, list[Window]]:
    policy = load_policy(f"lerobot:{taught / 'smolvla'}@20").policy
    assert isinstance(policy, FlowPolicy)
    rng = np.random.default_rng(7)
    states, _ = tiny.observed(count, rng)
    frames = rng.integers(0, 256, (count, 1, tiny.SIDE, tiny.SIDE, 3), np.uint8)
    seen = [{"state": state[None], "image.front": frame} for state, frame in zip(states, frames, strict=True)]
    return policy, [Window(arrays, "lift") for arrays in seen]


@pytest.fixture(scope="module")
def block(taught: Path) -> Path:
    return trained(taught, taught / "run")


def trained(taught: Path, out: Path, progress: Callable[[str, int, int], None] = lambda *told: None) -> Path:
    pytest.importorskip("onnx", reason="a block is exported with onnx, of the extra train, which is not installed here")
    from specact.lab.train.recipe import FlashRecipe
    from specact.lab.train.train import train

    recipe = FlashRecipe(
        kind="flash", bundle="drafts", target=f"lerobot:{taught / 'smolvla'}@20", execute=3, data=("shown",),
        held_out=0.25, heads=2, steps=80, batch=16, learning_rate=5e-3, warmup=5, average=0.9,
    )  # fmt: skip
    return train(recipe, taught, out, progress).bundles[0]


def test_a_block_is_trained_for_smolvla(block: Path, taught: Path) -> None:
    policy, seen = shown_to(taught, 12)
    loaded = load_policy(f"lerobot:{taught / 'smolvla'}@20")
    told = json.loads((block / "manifest.json").read_text())
    assert told["spec"]["target"] == loaded.fingerprint
    assert sorted(path.name for path in block.iterdir()) == ["block.onnx", "manifest.json"]
    made = load_flash(block, loaded)
    drafted = made.block.chunks(policy.networks.tokens(seen))
    calm = FlowPolicy(policy.networks, policy.units, policy.spec, spread=0.0)
    wanted = np.stack([policy.to_flow(calm.infer(window, np.random.default_rng(0))) for window in seen])
    wanted = wanted[..., : tiny.ACTIONS]
    error, baseline = (np.square(drafted - np.roll(wanted, by, axis=0)).mean() for by in (0, 5))
    assert error < 0.5 * baseline


def test_flash_rounds_with_a_trained_block(block: Path, taught: Path) -> None:
    """In one process, and with a device that has neither LeRobot's policy nor its encoder."""
    source = f"lerobot:{taught / 'smolvla'}@20"
    _, seen = shown_to(taught, 8)

    def played(pair: Any, **parts: Any) -> list[Any]:
        policy, rounds = SpeculativePolicy(pair, Always(), **parts), []
        for window in seen:
            done = [policy.act_on(window)]
            while not policy.wants_inference:
                done.append(policy.act_on(window))
            assert policy.record is not None and policy.record.outcome is not None
            rounds.append((policy.record.outcome.evidence.accepted, np.stack(done)))
        return rounds

    pair = load_pair(block, target=source, decoding="flash")
    assert isinstance(pair.parts, FlowParts) and pair.execute == 3

    def accepted(rounds: str, within: float) -> list[int]:
        return [count for count, _ in played(pair.composed(rounds=replace(ROUNDS[rounds], within=within)))]

    assert accepted("flash", 0.0) == [0] * 8
    # The first round of an episode is full, and one after four that were checked.
    for rounds in ("flash", "flash_device"):
        assert accepted(rounds, 1e6) == [0, 3, 3, 3, 3, 0, 3, 3]
    here = played(pair)
    arguments = ["serve", "--bundle", str(block), "--target", source, "--port", "0"]
    with ServerProcess(arguments, ready_within_s=600.0) as process:
        device = load_pair(block, decoding="flash")
        with Client(Endpoint("ws", "127.0.0.1", process.port), device.exchange.contract, "test") as client:
            client.connect(30.0)
            remote = played(device, verifier=remote_verifier(client, device, 60_000.0))
    assert [count for count, _ in remote] == [count for count, _ in here]
    for (_, actions), (_, wanted) in zip(remote, here, strict=True):
        np.testing.assert_allclose(actions, wanted, rtol=1e-4, atol=1e-4)


def test_a_block_belongs_to_itsprefix_weights(block: Path, taught: Path, made: Callable[[str], Made]) -> None:
    with pytest.raises(BundleError, match=r"was made for the target .*, but smolvla is .* train a block for this one"):
        load_pair(block, target=f"lerobot:{made('smolvla').path}@20")
    with pytest.raises(ConfigError, match=r"act answers with whole chunks and has no parts"):
        load_pair(block, target=f"lerobot:{made('act').path}@20")


@pytest.mark.parametrize("name", MAKERS)
def test_an_answer_depends_on_its_request_alone(name: str, made: Callable[[str], Made]) -> None:
    """Neither on what is beside it in a batch, nor on what was asked before, nor on PyTorch's generator."""
    policy = made(name).policy
    windows = [window_of(policy.spec.observation, seed) for seed in (0, 2)]
    torch.manual_seed(0)
    state = torch.get_rng_state()
    alone = [policy.infer(window, np.random.default_rng(seed)) for seed, window in enumerate(windows)]
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(1)
    batch = policy.infer_batch(windows[::-1], [np.random.default_rng(seed) for seed in (1, 0)])
    for single, batched in zip(alone, reversed(batch), strict=True):
        np.testing.assert_allclose(single, batched, rtol=1e-4, atol=1e-4)
    redrawn = [policy.infer(windows[0], np.random.default_rng(seed)) for seed in range(1, 9)]
    assert all(np.array_equal(alone[0], actions) for actions in redrawn) == (name == "act")


ARM = """
import numpy as np


class Arm:
    def observe(self):
        return {"state": np.zeros(4), "goal": np.zeros(2), "image.front": np.zeros((24, 24, 3), np.uint8)}

    def act(self, action):
        pass

    def stop(self):
        pass
"""


def test_the_commands_of_the_page(made: Callable[[str], Made], tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "reader"
    shutil.copytree(made("act").path, folder / "pretrained_model")
    shutil.copy(THIRD_PARTY / "my_policy.py", folder)
    shown = blocks(ROOT / "docs/how-to/lerobot.md")
    steps = [block for block in shown if block.reason == "needs LeRobot and a trained policy"]
    assert len(steps) == 2
    # Beside other work its server may be too slow for what the page asks, and says so.
    patient = ("--seconds", "--rate-hz 2 --deadline-ms 5000 --seconds")
    steps = [block._replace(text=block.text.replace(*patient)) for block in steps]
    follow([Block("my_arm.py", "python", ARM, None), *steps], folder, environment)
    manifest = json.loads((folder / "my-pair/manifest.json").read_text())
    assert manifest["sources"]["target"] is None  # whoever uses the pair names it again
    assert manifest["fingerprints"]["target"] == made("act").loaded.fingerprint


@pytest.mark.parametrize("rate", ["", "@", "@fast", "@0", "@-20", "@inf", "@nan"])
def test_the_rate_has_to_be_named(rate: str, made: Callable[[str], Made]) -> None:
    with pytest.raises(ConfigError, match=r"it must be lerobot:PATH@HZ, such as .*@30; the rate is the fps"):
        load_policy(f"lerobot:{made('act').path}{rate}")


def test_a_folder_that_is_not_complete(made: Callable[[str], Made], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lacks config.json, model.safetensors, .* checkpoints/last"):
        load_policy(f"lerobot:{tmp_path}@20")
    copy = Path(shutil.copytree(made("act").path, tmp_path / "act"))
    (copy / "policy_postprocessor.json").unlink()
    with pytest.raises(ConfigError, match=r"lacks policy_postprocessor.json;"):
        load_policy(f"lerobot:{copy}@20")


@pytest.mark.parametrize("name", ["act", "pi0"])
def test_weights_that_are_not_those_of_the_policy(name: str, made: Callable[[str], Made], tmp_path: Path) -> None:
    """LeRobot says so and goes on, with weights as they were initialised."""
    copy = Path(shutil.copytree(made(name).path, tmp_path / name))
    weights = load_file(copy / "model.safetensors")
    lost = next(key for key in sorted(weights) if "action" in key)
    for surplus in ({}, {f"{lost}.old": weights[lost]}):
        save_file({key: value for key, value in weights.items() if key != lost} | surplus, copy / "model.safetensors")
        with (
            pytest.raises(BundleError, match=rf"1 weights are missing and {len(surplus)} .* first {lost}"),
            tiny.tiny_gemma(),
        ):
            load_policy(f"lerobot:{copy}@20")


def test_other_weights_have_another_fingerprint(made: Callable[[str], Made], tmp_path: Path) -> None:
    same = Path(shutil.copytree(made("act").path, tmp_path / "same"))
    assert load_policy(f"lerobot:{same}@20").fingerprint == made("act").loaded.fingerprint
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps(config | {"n_action_steps": 1}))
    assert load_policy(f"lerobot:{same}@20").fingerprint != made("act").loaded.fingerprint
