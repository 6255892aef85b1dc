"""FLASH's block learns a flow's noiseless chunks; and what its check tells of a flow is measured."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.families.tokens.dots import played
from tests.tiny import quiet, write_npz

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowPolicy, FlowUnits, load_flow
from specact.families.chunks.policy import ChunkSpec
from specact.lab.data.generate import generate
from specact.lab.envs.ball import TASK
from specact.lab.rollout.processes import serving
from specact.lab.train.flash import KINDS, LEVELS, fit_check, measure_check, prefix_weights
from specact.lab.train.recipe import CorrectorRecipe, FlashRecipe
from specact.lab.train.train import train
from specact.load import load_exchange, load_pair, load_policy
from specact.observation import Window, vectors
from specact.pair import Pair
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.target import remote_verifier
from specact.rng import StepAddress
from specact.systems.flash import Block, Check, FlashSettings, FlashTarget, RoundRequest
from specact.systems.flow import FLASH_PARTS, ROUNDS, FlowParts, load_flash


def test_the_block_answers_as_the_target_without_noise(block: Path, tiny_flow: Path) -> None:
    target, made = load_flow(tiny_flow), load_flash(block, load_policy("my_flow:padded"))
    assert made.spec.settings.execute == 3 and made.spec.settings.levels[0] in LEVELS
    told = json.loads((block / "manifest.json").read_text())["check"]
    assert list(told["levels"]) == [f"{level:g}" for level in LEVELS]
    calm, seen = target.policy(spread=0.0), windows(target.spec, 64)
    drafted = made.block.chunks(target.networks.tokens(seen))
    wanted = np.stack([target.units.to_flow(calm.infer(window, np.random.default_rng(0))) for window in seen])
    error = np.square(drafted - wanted).mean()
    # What an answer that does not look would reach.
    assert error < 0.5 * wanted.var(axis=0).mean()
    assert np.square(drafted - np.roll(wanted, 1, axis=0)).mean() > 2.0 * error


@pytest.mark.parametrize(("changes", "said"), [
    ({"execute": 7}, "execute and grippers"), ({"grippers": (2,)}, "execute and grippers"), ({"heads": 3}, "heads"),
])  # fmt: skip
def test_what_does_not_fit_the_target_is_refused(
    tiny_flow: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(structs.replace(NAMED, target=str(tiny_flow), data=(), **changes), Path(), tmp_path / "run", quiet)


def test_a_bundles_recipe_runs_no_code_that_the_user_did_not_name(tiny_flow: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_flow, tmp_path / "bundle")
    manifest = json.loads((tmp_path / "bundle/manifest.json").read_text())
    manifest["recipe"]["env"] = "tests.lab.train.dots:TASK"
    (tmp_path / "bundle/manifest.json").write_text(json.dumps(manifest))
    common: dict[str, Any] = {"bundle": "b", "target": str(tmp_path / "bundle")}
    flash = FlashRecipe(kind="flash", execute=3, **common)
    for recipe in (flash, CorrectorRecipe(kind="corrector", method="a2c2", env="ball", **common)):
        with pytest.raises(ConfigError, match=r"which is code .* tests\.lab\.train\.dots:TASK"):
            train(recipe, Path(), tmp_path / "run", quiet)
    # Whoever names it trusts it: its demonstrations are read, which this target does not fit.
    with pytest.raises(ConfigError, match=r"generate|expert|demonstrat"):
        train(structs.replace(flash, env="tests.lab.train.dots:TASK"), Path(), tmp_path / "run", quiet)


def test_weights_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(
        prefix_weights(np.array([1, 3]), 4), [[1, 0.1, 0.1, 0.1], [1, 0.9, 0.81, 0.1]], rtol=1e-6
    )


class Known:
    """A flow whose only clean chunk for a window is known: all its actions are what the window shows.

    Args:
        expert: ``denoiser``, the ideal one, or ``smooth``, whose velocity does not grow towards the data.
    """

    def __init__(self, expert: str) -> None:
        self._expert = expert

    def tokens(self, windows: Any) -> np.ndarray:
        return np.stack([window["state"] for window in windows])

    def cache(self, windows: Any, tokens: np.ndarray | None = None) -> np.ndarray:
        return self.tokens(windows)

    def velocity(self, chunks: np.ndarray, times: np.ndarray, cache: np.ndarray) -> np.ndarray:
        rest = np.maximum(1.0 - times, 1e-3)[:, None, None]
        if self._expert == "denoiser":
            return np.asarray((cache - chunks) / rest, np.float32)
        return np.asarray(cache - chunks, np.float32)


class Same:
    """Drafts what the window shows."""

    def chunks(self, tokens: np.ndarray) -> np.ndarray:
        return np.repeat(tokens, 4, axis=1)


def measured(expert: str) -> Any:
    units = FlowUnits(*(np.full(2, value, np.float32) for value in (0.0, 1.0, -9.0, 9.0)))
    policy = FlowPolicy(Known(expert), units, ChunkSpec(vectors(1, state=2), 4, 2, 10.0))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    windows = [Window({"state": rng.uniform(-2.0, 2.0, (1, 2)).astype(np.float32)}) for _ in range(40)]
    return measure_check(policy, Same(), FlashSettings(3), windows, 0, lambda done: None)  # type: ignore[arg-type]


def test_the_deviation_of_an_ideal_denoiser_is_the_error() -> None:
    check = measured("denoiser").describe()
    for level in check["levels"].values():
        assert level["slope"] == pytest.approx(1.0, abs=0.02) and level["auroc"] == 1.0
    assert check["error"]["block"] == pytest.approx(0.0, abs=1e-5)


def test_a_smooth_expert_is_told_by_its_slope() -> None:
    levels = measured("smooth").describe()["levels"]
    slopes = [level["slope"] for level in levels.values()]
    assert slopes == sorted(slopes) and slopes[0] < 0.15
    # What the paper's noise levels accept of chunks for other windows.
    assert levels["0.05"]["accepted_wrong"] > 0.8 and levels["1"]["accepted_wrong"] < 0.2


def test_nine_of_ten_of_the_target_s_own_samples_pass_a_fitted_check() -> None:
    check = measured("smooth")
    level, within = fit_check(check)
    samples = check.most[:, KINDS.index("own"), LEVELS.index(level)]
    assert (samples <= within).mean() == pytest.approx(0.9, abs=0.03)


# --- a target that is no bundle: the recipe names it and its demonstrations, its users name it ---


NAMED = FlashRecipe(
    kind="flash", bundle="small", target="my_flow:padded", execute=3, data=("made.npz",), heads=2, steps=150, batch=32,
    learning_rate=5e-3, warmup=5, average=0.95, seed=3,
)  # fmt: skip
# Somebody's module: the tiny flow, with as many dimensions of padding as it has actions, and a policy without parts.
MODULE = """
import numpy as np
import specact
from specact.families.chunks.flow import load_flow
from tests.lab.train.test_flash import padded_flow

bundle = load_flow({path!r})
plain, padded, unnamed = bundle.policy(), padded_flow(bundle.path), bundle.policy()
plain.fingerprint, padded.fingerprint = "plain", "padded"


@specact.chunk_policy(observation={{"state": (8,)}}, chunk=6, actions=2, rate_hz=20.0, fingerprint="whole")
def whole(inputs):
    return np.zeros((len(inputs["state"]), 6, 2), np.float32)
"""


class Padded:
    """Parts whose expert leads what pads an action somewhere."""

    def __init__(self, networks: Any, somewhere: float) -> None:
        self._networks, self._somewhere = networks, somewhere
        self.tokens, self.cache = networks.tokens, networks.cache

    def velocity(self, chunks: np.ndarray, times: np.ndarray, cache: np.ndarray) -> np.ndarray:
        velocity = self._networks.velocity(np.ascontiguousarray(chunks[..., :2]), times, cache)
        return np.concatenate([velocity, np.full_like(velocity, self._somewhere)], axis=-1)


def padded_flow(path: Path, somewhere: float = 7.0) -> FlowPolicy:
    bundle = load_flow(path)
    units = (bundle.units.centre, bundle.units.scale, bundle.units.low, bundle.units.high)
    wide = (np.pad(row, (0, 2), constant_values=rest) for row, rest in zip(units, (0, 1, -np.inf, np.inf), strict=True))
    return FlowPolicy(Padded(bundle.networks, somewhere), FlowUnits(*wide), bundle.spec)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tiny_flow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The module, and the demonstrations that the tiny flow was trained on."""
    made = tmp_path_factory.mktemp("named")
    (made / "my_flow.py").write_text(MODULE.format(path=str(tiny_flow)))
    write_npz(made / "made.npz", generate(TASK, 20, seed=3, noise=0.5))
    return made


@pytest.fixture(autouse=True)
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture(scope="module")
def block(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        return train(NAMED, folder, folder / "run", quiet).bundles[0]


def windows(pair_or_policy: Any, count: int) -> list[Window]:
    """Random observations of a pair, or of a policy's spec."""
    rng, fields = np.random.default_rng(0), pair_or_policy.observation.fields
    return [
        Window({name: rng.uniform(-0.5, 0.5, field.window_shape).astype(np.float32) for name, field in fields.items()})
        for _ in range(count)
    ]


def test_where_the_target_comes_from_makes_no_difference(
    block: Path, tiny_flow: Path, folder: Path, tmp_path: Path
) -> None:
    """Neither does what pads its actions: the block learns the real ones, from the same split of the same data."""
    bundle = train(structs.replace(NAMED, target=str(tiny_flow), data=()), folder, tmp_path, quiet).bundles[0]
    assert (bundle / "block.onnx").read_bytes() == (block / "block.onnx").read_bytes()
    told, manifest = (json.loads((made / "manifest.json").read_text()) for made in (block, bundle))
    assert told["check"]["error"]["block"] == manifest["check"]["error"]["block"]
    assert told["spec"]["target"] == "padded" != manifest["spec"]["target"]
    assert sorted(path.name for path in block.iterdir()) == ["block.onnx", "manifest.json"]


def test_what_pads_actions_is_no_part_of_the_distance(block: Path, tiny_flow: Path) -> None:
    rounds, measured = [], []
    for somewhere in (7.0, -90.0):
        policy = padded_flow(tiny_flow, somewhere)
        network = Block(block / FLASH_PARTS["block"], (6, 2))
        seen = windows(policy.spec, 8)
        target = FlashTarget(policy, FlashSettings(3), network)
        answer = target.answer(seen[0], StepAddress(0, 0, 0, 0))
        rounds.append(answer.round(RoundRequest(False, check=Check((0.4, 0.8), 100.0))))
        measured.append(measure_check(policy, network, FlashSettings(3), seen, 0, lambda done: None))
    assert rounds[0].accepted == 3 and rounds[0].chunk.shape == (6, 2)
    np.testing.assert_array_equal(rounds[0].deviation, rounds[1].deviation)
    np.testing.assert_array_equal(measured[0].deviation, measured[1].deviation)
    np.testing.assert_array_equal(measured[0].error, measured[1].error)


def loaded(block: Path, target: str | None, rounds: str) -> Pair[Any]:
    pair = load_pair(block, target=target, decoding=rounds)
    assert isinstance(pair.parts, FlowParts)
    return pair


def driven(pair: Pair[Any], **parts: Any) -> tuple[np.ndarray, list[int]]:
    """Actions, and how many of each chunk were accepted."""
    actions, records = played(pair, windows(pair, 12), **parts)
    return actions, [record.outcome.evidence.accepted for record in records if record.outcome is not None]


@pytest.mark.parametrize("target", [None, "my_flow:padded"])
def test_a_device_needs_the_target_only_where_its_encoder_runs(
    block: Path, folder: Path, target: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server has block and target; the device's answers are those of one process, bit for bit."""
    rounds = "flash" if target is None else "flash_device"
    actions, accepted = driven(loaded(block, "my_flow:padded", rounds))
    assert any(accepted) and len(accepted) == 12
    paths = f"{folder}:{Path(__file__).parents[3]}:{Path(load_pair.__code__.co_filename).parents[1]}"
    with serving(block, "--target", "my_flow:padded", environment={"PYTHONPATH": paths}) as process:
        monkeypatch.delitem(sys.modules, "my_flow")
        pair = loaded(block, target, rounds)
        with Client(Endpoint("ws", "127.0.0.1", process.port), pair.exchange.contract, "test") as client:
            client.connect(30.0)
            remote = driven(pair, verifier=remote_verifier(client, pair, 30_000.0))
    assert ("my_flow" in sys.modules) == (target is not None)
    np.testing.assert_array_equal(remote[0], actions)
    assert remote[1] == accepted


def test_what_is_not_here_is_refused_before_anything_moves(block: Path) -> None:
    pair = loaded(block, None, "flash")
    whole = load_pair(block, target="my_flow:padded")
    assert pair.fingerprint == whole.fingerprint
    assert pair.exchange.contract.fingerprint == whole.exchange.contract.fingerprint == "padded"
    for rounds in ("flash_device", "block"):
        with pytest.raises(BundleError, match=r"small drafts for is not here; name it with --target"):
            pair.composed(rounds=ROUNDS[rounds]).drafter()
    with pytest.raises(BundleError, match=r"small drafts for is not here"):
        pair.target()
    with pytest.raises(ConfigError, match=r"is FLASH's block alone; name .* --target lerobot:PATH@HZ"):
        load_exchange(str(block))
    with pytest.raises(ConfigError, match="--target"):
        load_exchange("ball", target="my_flow:padded")


@pytest.mark.parametrize(("target", "said"), [
    ("my_flow:plain", r"made for the target 'padded', but plain is 'plain'; .* kind = \"flash\""),
    ("my_flow:whole", r"whole answers with whole chunks and has no parts .* SmolVLA, pi0 or pi05"),
    ("my_flow:unnamed", r"unnamed must say the range of its actions, and have a fingerprint"),
])  # fmt: skip
def test_another_target_is_refused(block: Path, folder: Path, tmp_path: Path, target: str, said: str) -> None:
    with pytest.raises((BundleError, ConfigError), match=said):
        load_pair(block, target=target)
    if target != "my_flow:plain":
        with pytest.raises(ConfigError, match=said):
            train(structs.replace(NAMED, target=target), folder, tmp_path / "run", quiet)
        assert not (tmp_path / "run").exists()
