"""FreqCache: motion, edges and budgets from spectra, and a prefix of which a part is computed again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.served import verifying

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowBundle, load_flow
from specact.gates.gate import Always
from specact.observation import Window
from specact.pair import LocalTarget, Pair
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.systems.flow import ROUNDS, load_flow_pair
from specact.systems.freqcache import (
    FREQCACHE,
    FreqCached,
    Motion,
    Plane,
    RefreshBundle,
    Reuse,
    ReusingRounds,
    edge_energy,
    load_refresh,
    patches_of,
    phase_correlation,
    reused,
    source_patches,
    spectral_entropy,
    spectrum,
)
from specact.types import Outcome

SIZE, PATCH, GRID = 64, (16, 16), (4, 4)
shifts = st.integers(-SIZE // 2, SIZE // 2 - 1)


def moved(before: Plane, now: Plane) -> Motion:
    """Between pictures that repeat at their borders."""
    return phase_correlation(spectrum(before), spectrum(now), now.shape, floor=1e-12)


def scene(seed: int, size: int = SIZE) -> Plane:
    """Brightness that falls off with frequency as in pictures, 1 / f, with mean 0 and variance 1; it repeats."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    frequency[0, 0] = np.inf
    made = np.fft.ifft2(np.fft.fft2(np.random.default_rng(seed).standard_normal((size, size))) / frequency).real
    return np.asarray(made / made.std())


@given(seed=st.integers(0, 99), down=shifts, right=shifts)
def test_motion_by_whole_pixels_of_what_repeats_is_found_exactly(seed: int, down: int, right: int) -> None:
    before = scene(seed)
    motion = moved(before, np.roll(before, (down, right), (0, 1)))
    assert (motion.rows, motion.columns) == (down, right)
    assert motion.confidence > 1e3


def test_brightness_and_contrast_are_no_motion() -> None:
    before = scene(0)
    motion = moved(before, 3.0 * np.roll(before, 5, 0) + 40.0)
    assert (motion.rows, motion.columns) == (5, 0)
    flat = moved(np.full((SIZE, SIZE), 7.0), np.full((SIZE, SIZE), 9.0))
    assert flat == Motion(0, 0, 1.0)


@pytest.mark.parametrize(("down", "right"), [(16, 0), (0, -16), (32, 16)])
def test_carried_patches_show_the_same_and_with_the_wrong_sign_or_without_the_overlap_they_do_not(
    down: int, right: int
) -> None:
    before = scene(1, 2 * SIZE)
    now = np.roll(before, (down, right), (0, 1))[:SIZE, :SIZE]
    before = before[:SIZE, :SIZE]
    old, new = patches_of(before, GRID), patches_of(now, GRID)
    earlier = source_patches(Motion(down, right, 9.0), PATCH, GRID)
    np.testing.assert_array_equal(old[earlier[earlier >= 0]], new[earlier >= 0])
    backwards = source_patches(Motion(-down, -right, 9.0), PATCH, GRID)
    assert np.abs(old[backwards[backwards >= 0]] - new[backwards >= 0]).mean() > 0.3
    # Without the mask of the overlap, -1 is the last patch of the frame.
    assert np.abs(old[earlier[earlier < 0]] - new[earlier < 0]).mean() > 0.3


def test_edge_energy_is_the_share_beyond_half_the_nyquist_frequency() -> None:
    step = np.arange(16)
    waves = [np.cos(np.pi * (step + 0.5) * k / 16) for k in (0, 8, 9, 15)]
    columns = np.stack([np.broadcast_to(wave, (16, 16)) for wave in waves])
    np.testing.assert_allclose(edge_energy(columns), [0.0, 0.0, 1.0, 1.0], atol=1e-12)
    np.testing.assert_allclose(edge_energy(columns.swapaxes(1, 2)), [0.0, 0.0, 1.0, 1.0], atol=1e-12)
    diagonal = np.outer(waves[1], waves[1])[None]
    np.testing.assert_allclose(edge_energy(diagonal), [1.0], atol=1e-12)
    assert edge_energy(np.zeros((1, 16, 16))) == [0.0]
    # Parseval: the two halves are all there is.
    both = np.stack([3.0 * columns[1] + 4.0 * columns[3]])
    np.testing.assert_allclose(edge_energy(both), [16.0 / 25.0], rtol=1e-12)


def test_entropy_is_0_for_one_wave_1_for_a_point_and_nothing_for_no_picture() -> None:
    step = np.arange(SIZE)
    wave = np.cos(2.0 * np.pi * 5.0 * step / SIZE)
    assert spectral_entropy(spectrum(np.broadcast_to(wave, (SIZE, SIZE)) + 3.0)) == pytest.approx(0.0, abs=1e-9)
    point = np.zeros((SIZE, SIZE))
    point[3, 7] = 1.0
    assert spectral_entropy(spectrum(point)) == pytest.approx(1.0)
    assert spectral_entropy(spectrum(np.full((SIZE, SIZE), 9.0))) == 0.0
    assert 0.0 < spectral_entropy(spectrum(scene(0))) < spectral_entropy(spectrum(scene(0) + 0.3 * point)) < 1.0


@given(seed=st.integers(0, 99), budget=st.floats(0.0, 1.0), refreshed=st.floats(0.0, 1.0))
def test_reused_are_the_lowest_of_the_overlap_within_budget(seed: int, budget: float, refreshed: float) -> None:
    rng = np.random.default_rng(seed)
    rank, earlier = rng.random(16), np.where(rng.random(16) < 0.3, -1, np.arange(16))
    mask = reused(earlier, rank, budget, refreshed)
    highest = np.argsort(rank)[16 - round(refreshed * 16) :]
    assert not mask[earlier < 0].any()
    assert not mask[highest].any()
    allowed = np.setdiff1d(np.flatnonzero(earlier >= 0), highest)
    assert mask.sum() == min(round(16 * budget), len(allowed))
    left = np.setdiff1d(allowed, np.flatnonzero(mask))
    assert not (mask.any() and left.size) or rank[mask].max() <= rank[left].min()


FLOW = load_flow("metaworld-flow")
MADE = load_refresh(FLOW.path / FREQCACHE, FLOW)
GRIPPER, FRONT = "image.gripper", "image.corner2"
ALL = Reuse(least=1.0, most=1.0, refreshed=0.0)
COUNT = 43


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


def share(parts: FreqCached) -> float:
    return float(np.mean([mask.mean() for mask in parts.masks.values()])) if parts.masks else 0.0


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


def test_all_tokens_computed_again_are_the_full_prefix_and_none_the_old_cache() -> None:
    cache = MADE.refreshed(tokens_of(window(1)), np.full(COUNT, -1), whole(window(0)))
    np.testing.assert_allclose(cache, whole(window(1)), atol=1e-4)
    backwards = np.arange(COUNT)[::-1]
    old = whole(window(0))
    np.testing.assert_array_equal(MADE.refreshed(tokens_of(window(1)), backwards, old), old[..., backwards, :])


@pytest.mark.parametrize("seed", range(2))
def test_the_same_tokens_computed_again_change_nothing(seed: int) -> None:
    """Attending to all of the cache, they find what they found before; attending to themselves alone they would not."""
    old, some = whole(window(seed)), np.random.default_rng(seed).random(COUNT) < 0.4
    cache = MADE.refreshed(tokens_of(window(seed)), np.where(some, -1, np.arange(COUNT)), old)
    np.testing.assert_allclose(cache, old, atol=1e-4)
    np.testing.assert_array_equal(cache[..., ~some, :], old[..., ~some, :])


def test_what_is_computed_again_attends_to_what_is_reused() -> None:
    sources = np.arange(COUNT)
    sources[-1] = -1
    first, second = (MADE.refreshed(tokens_of(window(2)), sources, whole(window(seed))) for seed in (0, 1))
    np.testing.assert_array_equal(first[:, 0, ..., -1, :], second[:, 0, ..., -1, :])
    assert np.abs(first[:, 1:, ..., -1, :] - second[:, 1:, ..., -1, :]).max() > 0.01


def test_a_standing_picture_with_all_of_the_budget_is_reused_whole_and_everything_else_is_not() -> None:
    parts, seen = cached(ALL), window(0)
    first = parts.cache(seen)
    np.testing.assert_array_equal(first, whole(seen))
    assert share(parts) == 0.0
    later = Window({**seen.arrays, "state": seen["state"] + np.float32(0.1)}, "close the window")
    second = parts.cache(later)
    assert share(parts) == 1.0
    cameras = rows(FRONT, GRIPPER)
    np.testing.assert_array_equal(second[..., cameras, :], first[..., cameras, :])
    others = np.setdiff1d(np.arange(COUNT), cameras)
    # Before any attention, they are those of the full prefix.
    np.testing.assert_allclose(second[:, 0][..., others, :], whole(later)[:, 0][..., others, :], atol=1e-5)


@pytest.mark.parametrize("how", [Reuse(least=0.0, most=0.0), Reuse(refreshed=1.0), Reuse(confidence=1e9)])
def test_without_budget_or_confidence_the_cache_is_the_full_one(how: Reuse) -> None:
    parts = cached(how)
    for seed in range(3):
        np.testing.assert_allclose(parts.cache(window(seed)), whole(window(seed)), atol=1e-4)
        assert share(parts) == 0.0


@pytest.mark.parametrize(("down", "right"), [(1, 0), (0, -1), (-1, 1)])
def test_tokens_move_with_the_picture_and_only_inside_of_it(down: int, right: int) -> None:
    seen = window(0)
    moved = np.roll(seen[GRIPPER], (16 * down, 16 * right), (1, 2))
    later = Window({**seen.arrays, GRIPPER: moved}, seen.instruction)
    parts = cached(ALL)
    old, new = parts.cache(seen), parts.cache(later)
    motion = parts.motions[GRIPPER]
    assert (motion.rows, motion.columns) == (16 * down, 16 * right)
    mask = parts.masks[GRIPPER].reshape(4, 4)
    first = MADE.spec.cameras[GRIPPER].first
    for row, column in np.ndindex(4, 4):
        before = row - down, column - right
        assert mask[row, column] == (0 <= before[0] < 4 and 0 <= before[1] < 4)
        if mask[row, column]:
            kept, came = new[..., first + 4 * row + column, :], old[..., first + 4 * before[0] + before[1], :]
            np.testing.assert_array_equal(kept, came)


def test_bounds_of_the_budget_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="least"):
        Reuse(least=0.8)


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


REUSING = ReusingRounds("", reuse=ALL)


def played(pair: Pair[Any], seeds: list[int], episode: int = 0, policy: SpeculativePolicy | None = None) -> Any:
    policy = policy or SpeculativePolicy(pair, Always())
    policy.reset(episode)
    actions, rounds = [], []
    for seed in seeds:
        actions.append(policy.act_on(window(seed)))
        assert policy.record is not None and policy.record.outcome is not None
        rounds.append(policy.record.outcome.evidence)
        while not policy.wants_inference:
            actions.append(policy.act_on(window(seed)))
    return np.array(actions), rounds


@pytest.fixture(scope="module")
def pair() -> Pair[Any]:
    return load_flow_pair(FLOW)


def test_rounds_without_budget_are_full_ones_and_with_it_they_are_not(pair: Pair[Any]) -> None:
    full, _ = played(pair, [0, 0, 1])
    none, rounds = played(pair.composed(rounds=replace(REUSING, reuse=Reuse(least=0.0, most=0.0))), [0, 0, 1])
    np.testing.assert_allclose(none, full, atol=1e-3)
    assert not any(evidence.reused_share for evidence in rounds)
    some, rounds = played(pair.composed(rounds=REUSING), [0, 0, 1])
    assert [evidence.reused_share for evidence in rounds[:2]] == [0.0, 1.0]
    np.testing.assert_allclose(some[: 2 * pair.execute], full[: 2 * pair.execute], atol=1e-3)


@pytest.mark.parametrize("episodes", [(0, 1), (0, 0)])
def test_an_episode_begins_with_a_new_prefix(pair: Pair[Any], episodes: tuple[int, int]) -> None:
    policy = SpeculativePolicy(pair.composed(rounds=REUSING), Always())
    for episode in episodes:
        _, rounds = played(pair, [0, 0], episode, policy)
        assert [evidence.reused_share for evidence in rounds] == [0.0, 1.0]


def test_two_robots_do_not_share_a_prefix(pair: Pair[Any]) -> None:
    reusing, address = pair.composed(rounds=REUSING), StepAddress(0, 0, 0, 0)
    target = LocalTarget(reusing.target())
    for seed in (0, 1):
        proposal = reusing.drafter().propose(window(seed), np.random.default_rng(0))
        outcome, full = (variant.verifier(target).submit(proposal, address).result() for variant in (reusing, pair))
        assert isinstance(outcome, Outcome) and isinstance(full, Outcome)
        np.testing.assert_array_equal(outcome.actions, full.actions)


def test_it_needs_a_refresh_and_a_target_in_its_process(pair: Pair[Any]) -> None:
    reusing = pair.composed(rounds=ROUNDS["freqcache"])
    proposal = reusing.drafter().propose(window(0), np.random.default_rng(0))
    with pytest.raises(ConfigError, match="keeps no cache of a robot"):
        verifying(reusing).request(proposal)
    with pytest.raises(ConfigError, match="specact export --refresh"):
        reusing.composed(refresh=None).verifier(LocalTarget(reusing.target()))
