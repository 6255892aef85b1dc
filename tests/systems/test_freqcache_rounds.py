"""A prefix of which a part is computed again: what is exact, what is reused, and whose cache it is."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.served import verifying

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.gates.baseline import Always
from specact.observation import Window
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.systems.flash import ROUNDS, Rounds, load_flow_pair
from specact.systems.freqcache import FREQCACHE, FreqCached, RefreshBundle, Reuse, load_refresh

FLOW = load_flow("metaworld-flow")
MADE = load_refresh(FLOW.path / FREQCACHE, FLOW)
GRIPPER, FRONT = "image.gripper", "image.corner2"
ALL = Reuse(least=1.0, most=1.0, refreshed=0.0)
COUNT = 43
FROZEN = Rounds("", reuse=Reuse(least=1.0, most=1.0, refreshed=0.0, remaps=False))


def window(seed: int, **arrays: np.ndarray) -> Window:
    """Smooth pictures that repeat at their edges, and a state."""
    rng = np.random.default_rng(seed)
    fields = FLOW.spec.observation.fields
    frequency = np.hypot(np.fft.fftfreq(64)[:, None, None], np.fft.fftfreq(64)[:, None]) + 0.02
    made = {}
    for name, field in fields.items():
        if field.is_image:
            smooth = np.fft.ifft2(np.fft.fft2(rng.standard_normal((64, 64, 3)), axes=(0, 1)) / frequency, axes=(0, 1))
            made[name] = np.clip(128.0 + 40.0 * smooth.real / smooth.real.std(), 0, 255).astype(np.uint8)[None]
        else:
            made[name] = rng.uniform(-0.3, 0.3, field.window_shape).astype(np.float32)
    return Window({**made, **{name.replace("_", "."): array for name, array in arrays.items()}}, "open the door")


def tokens_of(seen: Window) -> np.ndarray:
    return FLOW.networks.tokens([seen])


def whole(seen: Window) -> np.ndarray:
    return FLOW.networks.cache([seen])


def cached(how: Reuse) -> FreqCached:
    return FreqCached(FLOW.networks, MADE, how)


def rows(*cameras: str) -> np.ndarray:
    return np.concatenate([MADE.spec.cameras[name].first + np.arange(16) for name in cameras])


def test_cameras_tokens_are_where_the_bundle_says() -> None:
    """Convolutions reach 12 pixels further up and left: a change in a patch changes its neighbours' tokens too."""
    seen = window(0)
    for name, patches in MADE.spec.cameras.items():
        frame = seen[name].copy()
        frame[:, 32:48, 16:32] = 0
        changed = np.abs(tokens_of(Window({**seen.arrays, name: frame}, seen.instruction)) - tokens_of(seen))[0].sum(-1)
        assert np.flatnonzero(changed).tolist() == [patches.first + place for place in (9, 10, 13, 14)]


def test_all_tokens_computed_again_are_the_full_prefix() -> None:
    found = MADE.refreshed(tokens_of(window(1)), np.full(COUNT, -1), whole(window(0)))
    np.testing.assert_allclose(found, whole(window(1)), atol=1e-4)


def test_no_token_computed_again_is_the_old_cache() -> None:
    old = whole(window(0))
    np.testing.assert_array_equal(MADE.refreshed(tokens_of(window(1)), np.arange(COUNT), old), old)
    backwards = np.arange(COUNT)[::-1]
    np.testing.assert_array_equal(MADE.refreshed(tokens_of(window(1)), backwards, old), old[..., backwards, :])


@pytest.mark.parametrize("seed", range(3))
def test_the_same_tokens_computed_again_change_nothing(seed: int) -> None:
    """Attending to all of the cache, they find what they found before; attending to themselves alone they would not."""
    old, some = whole(window(seed)), np.random.default_rng(seed).random(COUNT) < 0.4
    found = MADE.refreshed(tokens_of(window(seed)), np.where(some, -1, np.arange(COUNT)), old)
    np.testing.assert_allclose(found, old, atol=1e-4)
    np.testing.assert_array_equal(found[..., ~some, :], old[..., ~some, :])


def test_what_is_computed_again_attends_to_what_is_reused() -> None:
    sources = np.arange(COUNT)
    sources[-1] = -1
    first, second = (MADE.refreshed(tokens_of(window(2)), sources, whole(window(seed))) for seed in (0, 1))
    np.testing.assert_array_equal(first[:, 0, ..., -1, :], second[:, 0, ..., -1, :])
    assert np.abs(first[:, 1:, ..., -1, :] - second[:, 1:, ..., -1, :]).max() > 0.01


def test_a_standing_picture_with_all_of_the_budget_is_reused_whole_and_everything_else_is_not() -> None:
    parts, seen = cached(ALL), window(0)
    first = parts.cache([seen])
    np.testing.assert_array_equal(first, whole(seen))
    assert parts.share == 0.0
    later = Window({**seen.arrays, "state": seen["state"] + np.float32(0.1)}, "close the window")
    second = parts.cache([later])
    assert parts.share == 1.0
    cameras = rows(FRONT, GRIPPER)
    np.testing.assert_array_equal(second[..., cameras, :], first[..., cameras, :])
    others = np.setdiff1d(np.arange(COUNT), cameras)
    # Before any attention, they are those of the full prefix.
    np.testing.assert_allclose(second[:, 0][..., others, :], whole(later)[:, 0][..., others, :], atol=1e-5)


@pytest.mark.parametrize("how", [Reuse(least=0.0, most=0.0), Reuse(refreshed=1.0), Reuse(confidence=1e9)])
def test_without_budget_or_confidence_the_cache_is_the_full_one(how: Reuse) -> None:
    parts = cached(how)
    for seed in range(3):
        np.testing.assert_allclose(parts.cache([window(seed)]), whole(window(seed)), atol=1e-4)
        assert parts.share == 0.0


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, -1), (-1, 1)])
def test_tokens_move_with_the_picture_and_only_inside_of_it(down: int, right: int) -> None:
    seen = window(0)
    moved = np.roll(seen[GRIPPER], (16 * down, 16 * right), (1, 2))
    later = Window({**seen.arrays, GRIPPER: moved}, seen.instruction)
    parts = cached(replace(ALL, cameras=(GRIPPER,)))
    old, new = parts.cache([seen]), parts.cache([later])
    motion = parts.last[GRIPPER].motion
    assert (motion.rows, motion.columns) == (16 * down, 16 * right)
    mask = parts.last[GRIPPER].mask.reshape(4, 4)
    first = MADE.spec.cameras[GRIPPER].first
    for row, column in np.ndindex(4, 4):
        before = row - down, column - right
        assert mask[row, column] == (0 <= before[0] < 4 and 0 <= before[1] < 4)
        if mask[row, column]:
            kept, came = new[..., first + 4 * row + column, :], old[..., first + 4 * before[0] + before[1], :]
            np.testing.assert_array_equal(kept, came)
    still = cached(replace(ALL, cameras=(GRIPPER,), remaps=False))
    still.cache([seen])
    np.testing.assert_array_equal(still.cache([later])[..., rows(GRIPPER), :], old[..., rows(GRIPPER), :])


@pytest.mark.parametrize("first", ["edges", "changed", "oldest", "random"])
def test_every_choice_reuses_as_many(first: str) -> None:
    parts = cached(Reuse(least=0.5, most=0.5, refreshed=0.25, confidence=0.0, remaps=False, first=first))  # type: ignore[arg-type]
    parts.cache([window(0)])
    parts.cache([window(1)])
    assert parts.share == 0.5


def test_the_patches_that_changed_are_computed_again() -> None:
    seen = window(0)
    frame = seen[FRONT].copy()
    frame[:, :16, 32:] = 255 - frame[:, :16, 32:]
    parts = cached(Reuse((FRONT,), 1.0, 1.0, 2 / 16, 0.0, remaps=False, first="changed"))
    parts.cache([seen])
    parts.cache([Window({**seen.arrays, FRONT: frame}, seen.instruction)])
    assert np.flatnonzero(~parts.last[FRONT].mask).tolist() == [2, 3]


def test_the_oldest_are_computed_again_so_that_none_is_older_than_the_budget_says() -> None:
    parts = cached(Reuse((FRONT,), 0.75, 0.75, 0.0, 0.0, remaps=False, first="oldest"))
    parts.cache([window(0)])
    again = np.zeros(16, int)
    for seed in range(1, 5):
        parts.cache([window(seed)])
        again += ~parts.last[FRONT].mask
    # A quarter each time, so that every token had its turn after four.
    np.testing.assert_array_equal(again, 1)


def test_an_episode_begins_with_a_whole_prefix_and_the_same_chance() -> None:
    parts = cached(Reuse(confidence=0.0, first="random"))
    first = [parts.cache([window(seed)]) for seed in range(3)]
    parts.reset()
    assert parts.share == 0.0
    again = [parts.cache([window(seed)]) for seed in range(3)]
    np.testing.assert_array_equal(first, again)


def test_it_belongs_to_one_robot() -> None:
    with pytest.raises(ConfigError, match="one robot"):
        cached(Reuse()).cache([window(0), window(1)])
    with pytest.raises(ConfigError, match=r"no camera image\.top"):
        cached(Reuse(cameras=("image.top",)))


@pytest.mark.parametrize("changes", [{"least": 0.8}, {"most": 1.1}, {"refreshed": -0.1}, {"confidence": -1.0}])
def test_settings_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(Reuse(), **changes)  # type: ignore[arg-type]


@pytest.fixture
def copied(tmp_path: Path) -> FlowBundle:
    return load_flow(Path(shutil.copytree(FLOW.path, tmp_path / "copy")))


def rewritten(bundle: FlowBundle, **changes: object) -> RefreshBundle:
    file = bundle.path / FREQCACHE / "manifest.json"
    told = json.loads(file.read_text())
    told["spec"] |= changes
    file.write_text(json.dumps(told))
    return load_refresh(bundle.path / FREQCACHE, bundle)


@pytest.mark.parametrize(("changes", "said"), [
    ({"target": "0" * 16}, "was made for the target"), ({"cameras": 3}, "cameras"),
    ({"cameras": {"image.top": {"first": 0, "rows": 4, "columns": 4}}}, "does not have"),
    ({"cameras": {"state": {"first": 0, "rows": 1, "columns": 1}}}, "does not have"),
    ({"cameras": {GRIPPER: {"first": 28, "rows": 4, "columns": 4}}}, "does not have"),
    ({"cameras": {GRIPPER: {"first": 10, "rows": 3, "columns": 4}}}, "does not have"),
    ({"cameras": {GRIPPER: {"first": 10, "rows": 0, "columns": 4}}}, "does not have"),
])  # fmt: skip
def test_a_refresh_that_does_not_fit_is_refused(copied: FlowBundle, changes: dict[str, object], said: str) -> None:
    with pytest.raises(BundleError, match=said):
        rewritten(copied, **changes)


def test_another_network_is_refused(copied: FlowBundle) -> None:
    folder = copied.path / FREQCACHE
    shutil.copy(copied.path / "prefix.onnx", folder / "refresh.onnx")
    with pytest.raises(BundleError, match="fingerprint"):
        load_refresh(folder, copied)


def played(pair: Pair[Any], seeds: list[int], episode: int = 0) -> list[np.ndarray]:
    policy = SpeculativePolicy(pair, Always())
    policy.reset(episode)
    actions = []
    for seed in seeds:
        actions.append(policy.act_on(window(seed)))
        while not policy.wants_inference:
            actions.append(policy.act_on(window(seed)))
    return actions


def composed(how: Reuse) -> Pair[Any]:
    return load_flow_pair(FLOW).composed(rounds=replace(ROUNDS["full"], reuse=how))


def test_rounds_without_budget_are_full_ones_and_with_it_they_are_not() -> None:
    full = played(composed(Reuse(least=0.0, most=0.0)), [0, 1, 2])
    np.testing.assert_allclose(full, played(load_flow_pair(FLOW).composed(rounds=ROUNDS["full"]), [0, 1, 2]), atol=1e-3)
    frozen = played(load_flow_pair(FLOW).composed(rounds=FROZEN), [0, 1, 2])
    execute = load_flow_pair(FLOW).execute
    np.testing.assert_allclose(frozen[:execute], full[:execute], atol=1e-3)
    assert np.abs(np.array(frozen[execute:]) - full[execute:]).max() > 0.01


def test_a_drafter_forgets_the_prefix_with_its_episode() -> None:
    drafter: Any = load_flow_pair(FLOW).composed(rounds=FROZEN).drafter()
    parts = drafter.propose(window(0), np.random.default_rng(0)).evidence.parts
    parts.cache([window(0)])
    parts.cache([window(1)])
    assert parts.share == 1.0
    drafter.reset()
    np.testing.assert_array_equal(parts.cache([window(1)]), whole(window(1)))


def test_two_robots_do_not_share_a_prefix() -> None:
    pair = load_flow_pair(FLOW).composed(rounds=FROZEN)
    target, address = pair.target(), StepAddress(0, 0, 0, 0)
    rng = np.random.default_rng(0)
    questions = [pair.drafter().propose(window(seed), rng).evidence for seed in (0, 1)]
    for seed in (0, 1):
        found = target.answer(window(seed), address).round(questions[seed])
        wanted = pair.composed(rounds=ROUNDS["full"]).drafter().propose(window(seed), rng).evidence
        np.testing.assert_array_equal(found.chunk, target.answer(window(seed), address).round(wanted).chunk)


def test_a_server_keeps_no_prefix_of_a_robot() -> None:
    pair = load_flow_pair(FLOW).composed(rounds=ROUNDS["freqcache"])
    proposal = pair.drafter().propose(window(0), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="keeps no cache of a robot"):
        verifying(pair).request(proposal)


def test_a_target_without_a_refresh_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match="specact export --refresh"):
        load_flow_pair(FLOW).composed(refresh=None, rounds=ROUNDS["freqcache"]).drafter()
