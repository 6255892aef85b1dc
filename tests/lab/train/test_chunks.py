"""Chunk policies learn what was demonstrated, modes and all; their networks are what the bundle holds."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.lab.train.dots import dots
from torch import Tensor

from specact.bundle.manifest import WEIGHTS
from specact.errors import BundleError, ConfigError
from specact.execution.schedule import soft_mask
from specact.families.chunks.flow import FlowPolicy, integrate, load_flow
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec, Inpainting
from specact.families.chunks.sources import load_regression
from specact.families.tokens.policy import BINS, load_tokens
from specact.lab.data.episodes import Episodes
from specact.lab.train import export, loop
from specact.lab.train.chunks import (
    chunk_labels,
    chunk_stage,
    demonstrated_stage,
    nearest_bins,
    soft_bins,
    units_of,
    write_chunk_bundle,
)
from specact.lab.train.codes import policy_stage, specs_of
from specact.lab.train.dataset import observation_of, prepare
from specact.lab.train.encoder import PatchEmbedding
from specact.lab.train.export import stored_weights
from specact.lab.train.flow import Flow
from specact.lab.train.loop import Stage, run
from specact.lab.train.recipe import (
    ChunkRecipe,
    CodesRecipe,
    EncoderRecipe,
    PolicyRecipe,
    TokenizerRecipe,
    chunk_recipe_of,
    plain,
)
from specact.lab.train.vqbet import ResidualVQ
from specact.observation import Window, vectors

RECIPE = ChunkRecipe(
    kind="flow", bundle="b", env="ball", generate_episodes=1, window=2, chunk=3, layers=1, heads=2, width=16,
    dropout=0.1, state_noise=0.1, steps=400, batch=64, draws=2, learning_rate=3e-3, warmup=20, average=0.98,
    bfloat16=False,
)  # fmt: skip
SPEC = ChunkSpec(vectors(2, state=1), chunk=3, actions=1, rate_hz=10.0)


def two_ways(episodes: int = 60, length: int = 12) -> Episodes:
    """Every episode goes left or goes right, all the way, and nothing in the observation tells which."""
    rng = np.random.default_rng(0)
    side = np.repeat(rng.choice([-1.0, 1.0], episodes), length)[:, None]
    return Episodes(
        {"state": rng.normal(size=(episodes * length, 1)).astype(np.float32)},
        action=(side + rng.normal(0.0, 0.05, side.shape)).astype(np.float32),
        ends=np.arange(1, episodes + 1) * length,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Flow:
    stage = demonstrated_stage(prepare(two_ways(), RECIPE), RECIPE, SPEC)
    stage.module.load_state_dict(run(stage, tmp_path_factory.mktemp("flow"), lambda done: None))
    assert isinstance(stage.module, Flow)
    return stage.module.eval()


def drawn(model: Flow, steps: int, count: int = 200) -> np.ndarray:
    rng = np.random.default_rng(1)
    noise = rng.standard_normal((count, 3, 1), dtype=np.float32)
    with torch.no_grad():
        cache = model.cache({"state": torch.from_numpy(rng.standard_normal((count, 2, 1), dtype=np.float32))})

        def velocity(x: np.ndarray, time: float) -> np.ndarray:
            output: Tensor = model.expert(torch.from_numpy(x), torch.full((count,), time), cache)
            return np.asarray(output.numpy())

        return integrate(velocity, noise, steps)


def test_ten_steps_take_a_side_and_one_step_takes_the_middle(trained: Flow) -> None:
    """Why the number of steps is a lever: a single one answers with the mean, which nobody demonstrated.

    Each side has a probability near 1/2; fewer than 60 of 200 draws on one of them has one below 1e-8.
    """
    many, single = (drawn(trained, steps)[..., 0] for steps in (10, 1))
    assert (np.abs(np.abs(many) - 1.0) < 0.5).mean() > 0.9
    assert (np.sign(many) == np.sign(many[:, :1])).all(1).mean() > 0.9, "a chunk keeps to its side"
    assert 60 <= (many[:, 0] > 0.0).sum() <= 140
    assert np.abs(single).mean() < 0.6 < 0.9 < np.abs(many).mean()


def test_a_policy_trained_for_delays_goes_on_as_the_actions_under_way_do(tmp_path: Path) -> None:
    """Training-time RTC: what is committed comes back unchanged, and the rest keeps to its side.

    Pasted over a chunk that does not know of it, it is followed by the other side every other time.
    """
    shows, recipe = two_ways(), structs.replace(RECIPE, delays=2)
    policy = made(replace(shows, rate_hz=10.0), recipe, tmp_path)
    rng = np.random.default_rng(1)
    windows = [Window({"state": rng.standard_normal((2, 1), dtype=np.float32)}) for _ in range(60)]
    free = np.array([policy.infer(window, np.random.default_rng(row)) for row, window in enumerate(windows)])
    for count in (0, 1, 2):
        for side in (-1.0, 1.0):
            given = side + 0.05 * rng.standard_normal((3, 1)).astype(np.float32)
            told = Inpainting(given, soft_mask(count, 3, 3))
            chunks = np.array(
                [policy.infer(window, np.random.default_rng(row), told) for row, window in enumerate(windows)]
            )
            if not count:
                np.testing.assert_array_equal(chunks, free)
                continue
            np.testing.assert_array_equal(chunks[:, :count], np.broadcast_to(given[:count], (60, count, 1)))
            assert (np.sign(chunks[:, count:]) == side).mean() > 0.95
            assert (np.sign(free[:, count:]) == side).mean() < 0.7
    # Three are more than it was trained for.
    assert isinstance(policy, FlowPolicy)
    guided = FlowPolicy(policy.networks, policy.units, policy.spec, steps=policy.steps)
    for committed in (2, 3):
        told = Inpainting(np.ones((3, 1), np.float32), soft_mask(committed, 3, 3))
        with nullcontext() if committed == 2 else pytest.warns(UserWarning, match="delays"):
            chunk = policy.infer(windows[0], np.random.default_rng(0), told)
        same = np.array_equal(chunk, guided.infer(windows[0], np.random.default_rng(0), told))
        assert same == (committed == 3)
    with pytest.raises(ConfigError, match="delays"):
        structs.replace(RECIPE, delays=3)
    with pytest.raises(ConfigError, match="delays"):
        structs.replace(RECIPE, kind="regression", delays=1)


def test_a_training_may_start_from_the_weights_of_a_bundle(tiny_flow: Path, tmp_path: Path) -> None:
    """Also one for delays from one without: the networks are the same."""
    recipe = chunk_recipe_of(load_flow(tiny_flow).manifest.recipe, "tiny")
    spec, weights = load_flow(tiny_flow).spec, stored_weights(tiny_flow / WEIGHTS)
    data = {"state": (torch.zeros(8), torch.ones(8)), "goal": (torch.zeros(2), torch.ones(2))}

    def begun(**changes: Any) -> Stage:
        made = structs.replace(recipe, **changes)
        return chunk_stage("flow", made, spec, data, None, lambda step: None, lambda: None)  # type: ignore[arg-type, return-value]

    for name, value in begun(base=str(tiny_flow), delays=3).module.state_dict().items():
        torch.testing.assert_close(value, weights[name], msg=name)
    assert any((value != weights[name]).any() for name, value in begun().module.state_dict().items())
    with pytest.raises(ConfigError, match="networks"):
        begun(base=str(tiny_flow), width=8)


def test_draws_of_a_window_read_its_entry_of_the_cache(trained: Flow) -> None:
    rng = np.random.default_rng(3)
    windows, draws = 4, 3
    noisy = torch.from_numpy(rng.standard_normal((draws * windows, 3, 1), dtype=np.float32))
    time = torch.from_numpy(rng.random(draws * windows, dtype=np.float32))
    with torch.no_grad():
        cache = trained.cache({"state": torch.from_numpy(rng.standard_normal((windows, 2, 1), dtype=np.float32))})
        shared = trained.expert(noisy, time, cache, draws)
        others = (1,) * (cache.dim() - 1)
        torch.testing.assert_close(shared, trained.expert(noisy, time, cache.repeat(draws, *others)))
        mixed_up = trained.expert(noisy, time, cache.repeat_interleave(draws, 0))
    assert (shared - mixed_up).abs().max() > 1e-3


def test_actions_have_mean_0_and_variance_1_in_the_flows_units() -> None:
    data = prepare(two_ways(), RECIPE)
    units, action = units_of(data, "flow"), data.train.episodes.action
    inside = units.to_flow(action)
    assert abs(inside.mean()) < 1e-5 and inside.std() == pytest.approx(1.0, rel=1e-5)
    np.testing.assert_allclose([units.low, units.high], [action.min(0), action.max(0)], rtol=1e-5)


def test_training_gives_the_cache_a_gradient_through_every_draw() -> None:
    """Encoder and prefix learn through the expert alone; nothing of the last layer's cache is left out."""
    stage = demonstrated_stage(prepare(two_ways(), RECIPE), RECIPE, SPEC)
    torch.manual_seed(0)
    for parameter in stage.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    loss, _ = stage.update(0)
    loss.backward()
    silent = [n for n, p in stage.module.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0.0]
    assert not silent


# --- the exported networks are the trained ones ---


def test_an_export_that_differs_is_not_kept_as_a_bundle(
    tiny_flow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = prepare(two_ways(), RECIPE)
    model = demonstrated_stage(data, RECIPE, SPEC).module
    assert isinstance(model, Flow)
    monkeypatch.setattr(export, "PARITY", -1.0)
    with pytest.raises(BundleError, match=r"encoder\.onnx differs from the trained network by"):
        write_chunk_bundle(tmp_path, {}, RECIPE, model, units_of(data, "flow"))
    assert not (tmp_path / "manifest.json").exists()


# --- an auxiliary readout ---


HIDDEN = "privileged.scene"
AUXILIARY = structs.replace(
    RECIPE, kind="regression", auxiliary=HIDDEN, window=1, chunk=2, layers=2, dropout=0.0, state_noise=0.0, steps=200,
    learning_rate=5e-3, average=0.9,
)  # fmt: skip


def demonstrated(steps: int = 400) -> Episodes:
    """Actions are noise, so that whatever is learned of the hidden numbers is learned from their labels."""
    rng = np.random.default_rng(0)
    state = rng.normal(size=(steps, 2)).astype(np.float32)
    hidden = np.stack([state[:, 0] * state[:, 1], np.abs(state[:, 0]), np.full(steps, 7.0)], axis=1)
    action = rng.uniform(-1.0, 1.0, (steps, 1)).astype(np.float32)
    return Episodes(
        {"state": state, HIDDEN: hidden.astype(np.float32)}, action, np.arange(20, steps + 1, 20), rate_hz=10.0
    )


def stage_of(recipe: ChunkRecipe, shows: Episodes | None = None) -> Stage:
    shows = demonstrated() if shows is None else shows
    spec = observation_of(recipe, recipe, shows, "the policy")
    assert HIDDEN not in spec.fields, "a policy observes it only where its recipe names it"
    return demonstrated_stage(
        prepare(shows, recipe), recipe, ChunkSpec(spec, recipe.chunk, shows.action.shape[1], 10.0)
    )


def test_the_readout_learns_through_the_prefix(tmp_path: Path) -> None:
    stage = stage_of(AUXILIARY)
    with torch.no_grad():
        before = stage.validate(stage.module)["auxiliary"]
        with torch.enable_grad():
            stage.module.load_state_dict(run(stage, tmp_path, lambda done: None))
        assert stage.validate(stage.module)["auxiliary"] < 0.5 * before


def test_the_readouts_error_reaches_the_encoder() -> None:
    """A readout of a detached cache would learn, too, and teach the policy nothing."""
    stage = stage_of(AUXILIARY)
    torch.manual_seed(0)
    for parameter in stage.module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    gradients = []
    for scale in (1.0, 0.0):
        stage.module.zero_grad()
        with torch.no_grad():
            stage.module.readout[2].weight.mul_(scale)  # type: ignore[index, union-attr]
        stage.update(0)[0].backward()
        gradients.append(torch.cat([p.grad.flatten() for p in stage.module.encoder.parameters()]))  # type: ignore[union-attr]
    assert not torch.equal(*gradients)


def test_soft_labels_are_distributions_around_the_value() -> None:
    values = torch.tensor([[-1.0, -0.3, 0.01, 0.77, 1.0]])
    labels = soft_bins(values, 2.0)
    assert labels.shape == (1, 5, BINS)
    torch.testing.assert_close(labels.sum(-1), torch.ones(1, 5))
    centres = torch.linspace(-1.0, 1.0, BINS)
    torch.testing.assert_close((labels * centres).sum(-1)[:, 1:4], values[:, 1:4], atol=1e-4, rtol=0.0)
    spread = ((labels * (centres - values[..., None]).square()).sum(-1).sqrt() * (BINS - 1) / 2)[:, 1:4]
    torch.testing.assert_close(spread, torch.full((1, 3), 2.0), atol=1e-2, rtol=0.0)
    assert torch.equal(labels.argmax(-1)[:, [0, 4]], torch.tensor([[0, BINS - 1]]))
    narrow = soft_bins(values, 0.05)
    assert torch.equal(narrow.argmax(-1), nearest_bins(values)) and float(narrow.max(-1).values.min()) > 0.99


# --- regression ---


SIDE = 0.5
REGRESSION = structs.replace(
    RECIPE, kind="regression", chunk=4, dropout=0.0, state_noise=0.0, steps=300, learning_rate=5e-3, average=0.95
)  # fmt: skip


def test_it_answers_with_the_middle_of_what_was_demonstrated(tmp_path: Path) -> None:
    """The state is held for two steps, so the chunk's first action is known and its last is not.

    The action is minus half the position, whichever of two equally likely noises was added to it.
    """
    rng = np.random.default_rng(0)
    state = rng.uniform(-1.0, 1.0, (600, 1)).astype(np.float32)
    action = (-SIDE * state + rng.choice([-0.1, 0.1], state.shape)).astype(np.float32)
    shown = Episodes({"state": np.repeat(state, 2, 0)}, np.repeat(action, 2, 0), np.arange(12, 1201, 12), 10.0)
    policy: Any = made(shown, REGRESSION, tmp_path)
    states = np.linspace(-0.8, 0.8, 9, dtype=np.float32)
    windows = [Window({"state": np.full((2, 1), state, np.float32)}) for state in states]
    rng = np.random.default_rng(0)
    first = np.array([chunk[0, 0] for chunk in policy.infer_batch(windows, [rng] * len(windows))])
    # Within the noise, which an answer independent of the state exceeds at both ends.
    assert np.abs(first + SIDE * states).max() < 0.2 < SIDE * states.max()
    twice = policy.infer_batch(windows, [np.random.default_rng(7)] * len(windows))
    np.testing.assert_array_equal(first, [chunk[0, 0] for chunk in twice], "it draws nothing")
    far, units = policy.infer(Window({"state": np.full((2, 1), 1e4, np.float32)}), rng), policy.units
    assert units is not None and (np.abs(far - units.centre) <= units.scale * (1.0 + 1e-6)).all()


# --- policies that look through a camera and are told what to do ---


TOLD = ("open the gripper", "close the gripper")
LOOKING = structs.replace(
    RECIPE, sees=("image",), instruction=True, layers=2, width=32, dropout=0.0, state_noise=0.0, steps=700,
    learning_rate=4e-3, encoder=EncoderRecipe(tokens="patches", channels=(16, 32)),
)  # fmt: skip


def told() -> Episodes:
    """The action's first number is the dot's row, the second says what the episode's instruction says."""
    seen, side = dots(1200), np.repeat(np.arange(240) % 2, 5)
    return Episodes(
        seen,
        wanted(seen["place"], side),
        np.arange(5, 1201, 5),
        instructions=tuple(TOLD[number % 2] for number in range(240)),
    )


def wanted(place: np.ndarray, side: np.ndarray | int) -> np.ndarray:
    return np.stack([place[:, 0], np.broadcast_to(1.0 - 2.0 * np.asarray(side), len(place))], -1).astype(np.float32)


def made(shows: Episodes, recipe: ChunkRecipe, folder: Path) -> ChunkPolicy:
    """The policy that a recipe makes of these demonstrations, from its bundle."""
    stage = stage_of(recipe, shows)
    stage.module.load_state_dict(run(stage, folder / "run", lambda done: None))
    module: Any = stage.module
    manifest, units = (
        {"name": "dots", "env": "", "recipe": plain(recipe)},
        units_of(prepare(shows, recipe), recipe.kind),
    )
    write_chunk_bundle(folder / "made", manifest, recipe, module, units)
    if recipe.kind == "flow":
        return load_flow(folder / "made").policy(4)
    return (load_tokens if recipe.kind == "tokens" else load_regression)(folder / "made").policy()


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "tokens"), [("flow", "patches"), ("regression", "keypoints"), ("tokens", "patches")])
def test_it_looks_and_follows_the_instruction(kind: Any, tokens: Any, tmp_path: Path) -> None:
    recipe = structs.replace(LOOKING, kind=kind, encoder=structs.replace(LOOKING.encoder, tokens=tokens))
    policy = made(told(), recipe, tmp_path)
    assert policy.spec.observation.instruction
    scenes = dots(60, seed=9)

    def far(said: int, done: int, blank: bool = False) -> float:
        """Mean distance of the first action from what is to be done, where something is said."""
        windows = [
            Window({"image": np.repeat(frame[None] * (not blank), 2, 0)}, TOLD[said]) for frame in scenes["image"]
        ]
        rngs = [np.random.default_rng(row) for row in range(len(windows))]
        first = np.array([chunk[0] for chunk in policy.infer_batch(windows, rngs)])
        return float(np.abs(first - wanted(scenes["place"], done)).mean())

    right = max(far(0, 0), far(1, 1))
    assert right < 0.2
    assert far(0, 0, blank=True) > right + 0.1, "it must look"
    assert far(0, 1) > 0.6, "it must listen"


def test_actions_beyond_a_disturbance_do_not_count_where_the_recipe_says_so() -> None:
    shows = replace(told(), disturbed=np.arange(1200) % 5 == 2)
    data = prepare(shows, LOOKING)
    units = units_of(data, "flow")
    _, every = chunk_labels(data.train, data, units, skip_disturbed=False)
    _, some = chunk_labels(data.train, data, units, skip_disturbed=True)
    np.testing.assert_array_equal(some, data.train.episodes.followed(LOOKING.chunk))
    assert every[:5].tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]]
    assert some[:5].tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 0], [1, 0, 0]]


def test_patches_come_row_by_row() -> None:
    embedding = PatchEmbedding(EncoderRecipe(tokens="patches", channels=(8, 8)), (32, 32, 3), 4).eval()
    assert embedding.patches == 16
    black = torch.zeros(1, 2, 32, 32, 3, dtype=torch.uint8)
    lit = black.clone()
    lit[:, 1, 24:, :6] = 255
    with torch.no_grad():
        changed = (embedding(lit) - embedding(black)).abs().sum(-1)
    assert changed.shape == (1, 2, 16)
    # Last row, first column, of the newer frame; convolutions overlap with the patch beside it.
    assert changed[0, 1, 12] > 0.0 and set(changed[0, 1].nonzero().flatten().tolist()) <= {12, 13}
    assert changed[0, 0].max() == 0.0


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="do not say"):
        observation_of(LOOKING, LOOKING, replace(told(), instructions=None), "the policy")
    with pytest.raises(ConfigError, match="learns"):
        structs.replace(LOOKING, encoder=EncoderRecipe(learns="pose"))
    for values in ({"tokens": "patches", "learns": "pose"}, {"learns": "pose", "shift": 2}, {"scenes": 10}):
        with pytest.raises(ConfigError, match=r"encoder\."):
            EncoderRecipe(**values)
    with pytest.raises(ConfigError, match="too small"):
        PatchEmbedding(EncoderRecipe(tokens="patches", channels=(8, 8, 8)), (16, 16, 3), 4)


# --- on another device than the CPU: PyTorch's meta device refuses what is not all in one place, too ---


META = torch.device("meta")
MOVING = structs.replace(LOOKING, steps=4, batch=8, warmup=1, encoder=structs.replace(LOOKING.encoder, shift=2))


def codes() -> Stage:
    policy = PolicyRecipe(
        sees=("image", "place"), history={"image": 1}, instruction=True, layers=1, heads=2, width=16, head_width=0,
        steps=4, batch=8, state_noise=0.1, offset_on="sampled", encoder=MOVING.encoder,
    )  # fmt: skip
    tokenizer = TokenizerRecipe(codes=4, latent=4, hidden=8)
    recipe, shown = CodesRecipe(rate_hz=10.0, data=("dots",), tokenizer=tokenizer, policies={"target": policy}), told()
    spec = specs_of(recipe, shown)["target"]
    return policy_stage("target", prepare(shown, recipe), recipe, ResidualVQ(tokenizer, 1, 2), spec)


@pytest.mark.parametrize("kind", ["flow", "regression", "tokens", "codes"])
def test_a_step_happens_where_the_network_is(kind: Any) -> None:
    stage = codes() if kind == "codes" else stage_of(structs.replace(MOVING, kind=kind), told())
    stage.module.to(META).train()
    loss, parts = stage.update(0)
    loss.backward()
    assert loss.device == META and all(part.device == META for part in parts.values())
    assert all(p.grad is None or p.grad.device == META for p in stage.module.parameters())
    assert any(p.grad is not None for p in stage.module.parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_device_the_command_says_so() -> None:
    with pytest.raises(ConfigError, match="CUDA device"):
        loop.accelerator("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_moves_between_both(tmp_path: Path) -> None:
    """Weights differ by a small part of what training changed; rounding after two steps makes 2e-4 of it."""

    def stop_after_two(done: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(stage_of(MOVING, told()), tmp_path, stop_after_two, every=1, on="cuda")
    kept, _ = loop.read_tensors(tmp_path / "flow.checkpoint")
    cuda = run(stage_of(MOVING, told()), tmp_path / "there", lambda done: None, on="cuda")
    assert {value.device.type for value in (*kept.values(), *cuda.values())} == {"cpu"}, "stored for the CPU"
    halfway = run(stage_of(MOVING, told()), tmp_path, lambda done: None, every=1)
    never = run(stage_of(MOVING, told()), tmp_path / "never", lambda done: None, every=1)
    weights = (halfway, never, stage_of(MOVING, told()).module.state_dict())
    resumed, wanted, before = (torch.cat([value.flatten() for value in part.values()]) for part in weights)
    assert (resumed - wanted).norm() < 0.02 * (wanted - before).norm()
