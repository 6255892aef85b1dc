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
from specact.pair import Pair
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.systems.flash import ROUNDS, Rounds, load_flow_pair
from specact.systems.freqcache import (
    FREQCACHE,
    NO_MOTION,
    FreqCached,
    Motion,
    Plane,
    RefreshBundle,
    Reuse,
    edge_energy,
    load_refresh,
    luma,
    patches_of,
    phase_correlation,
    reuse_budget,
    reused,
    source_patches,
    spectral_entropy,
    spectrum,
)

SIZE, PATCH, GRID = 64, (16, 16), (4, 4)
shifts = st.integers(-SIZE // 2, SIZE // 2 - 1)


def moved(before: Plane, now: Plane) -> Motion:
    return phase_correlation(spectrum(before), spectrum(now), now.shape)


def scene(seed: int, size: int = SIZE) -> Plane:
    """Brightness that falls off with frequency as in pictures, 1 / f, with mean 0 and variance 1; it repeats."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.fftfreq(size))
    frequency[0, 0] = np.inf
    made = np.fft.ifft2(np.fft.fft2(np.random.default_rng(seed).standard_normal((size, size))) / frequency).real
    return np.asarray(made / made.std())


@given(seed=st.integers(0, 99), down=shifts, right=shifts)
def test_motion_by_whole_pixels_of_what_repeats_is_found_exactly(seed: int, down: int, right: int) -> None:
    before = scene(seed)
    found = moved(before, np.roll(before, (down, right), (0, 1)))
    assert (found.rows, found.columns) == (down, right)
    assert found.confidence > 1e3


@given(rows=st.integers(4, 9), columns=st.integers(4, 9), data=st.data())
def test_frames_of_any_shape_will_do(rows: int, columns: int, data: st.DataObject) -> None:
    before = np.random.default_rng(rows * columns).standard_normal((rows, columns))
    down, right = (data.draw(st.integers(-(size // 2), (size - 1) // 2)) for size in (rows, columns))
    found = moved(before, np.roll(before, (down, right), (0, 1)))
    assert (found.rows, found.columns) == (down, right)


def test_brightness_and_contrast_are_no_motion() -> None:
    before = scene(0)
    found = moved(before, 3.0 * np.roll(before, 5, 0) + 40.0)
    assert (found.rows, found.columns) == (5, 0)
    flat = moved(np.full((SIZE, SIZE), 7.0), np.full((SIZE, SIZE), 9.0))
    assert flat == Motion(0, 0, 1.0)


def errors(noise: float, cropped: bool, most: int) -> tuple[float, float, float]:
    """Of 100 motions by up to ``most`` pixels: wrong ones, those of confidence 1.5 or more, wrong ones among these."""
    wrong, sure = np.zeros(100, bool), np.zeros(100, bool)
    for seed in range(100):
        rng = np.random.default_rng(seed)
        down, right = rng.integers(-most, most + 1, 2).tolist()
        large = scene(seed, 2 * SIZE if cropped else SIZE)
        at = SIZE // 2 if cropped else 0
        before = large[at : at + SIZE, at : at + SIZE]
        now = np.roll(large, (down, right), (0, 1))[at : at + SIZE, at : at + SIZE]
        found = moved(before, now + noise * rng.standard_normal(now.shape))
        wrong[seed], sure[seed] = (found.rows, found.columns) != (down, right), found.confidence >= 1.5
    return float(wrong.mean()), float(sure.mean()), float((wrong & sure).mean())


# Of 100 motions none was wrong but 5 % at the second; the bounds are three standard deviations of such a count higher.
# There, where noise hides three quarters of the spectrum, hardly any is confident, so that hardly any is used.
@pytest.mark.parametrize(("noise", "cropped", "most", "wrong", "sure"), [
    (0.3, False, 31, 0.015, 0.98), (0.5, False, 31, 0.12, 0.0), (0.0, True, 16, 0.015, 0.98),
    (0.2, True, 8, 0.015, 0.98),
])  # fmt: skip
def test_noise_and_what_enters_at_the_edges_are_borne(
    noise: float, cropped: bool, most: int, wrong: float, sure: float
) -> None:
    found = errors(noise, cropped, most)
    assert found[0] <= wrong
    assert found[1] >= sure
    assert found[2] <= 0.03


@given(down=st.integers(-5, 5), right=st.integers(-5, 5))
def test_places_are_carried_along_and_never_from_outside(down: int, right: int) -> None:
    earlier = source_patches(Motion(16 * down, 16 * right, 9.0), PATCH, GRID).reshape(GRID)
    for row in range(4):
        for column in range(4):
            inside = 0 <= row - down < 4 and 0 <= column - right < 4
            assert earlier[row, column] == ((row - down) * 4 + column - right if inside else -1)


def test_motion_is_rounded_to_whole_patches() -> None:
    still = source_patches(NO_MOTION, PATCH, GRID)
    np.testing.assert_array_equal(still, np.arange(16))
    np.testing.assert_array_equal(source_patches(Motion(7, -7, 9.0), PATCH, GRID), still)
    assert source_patches(Motion(9, 0, 9.0), PATCH, GRID)[4] == 0


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


def test_patches_are_those_of_the_frame_row_by_row() -> None:
    frame = np.arange(48.0).reshape(6, 8)
    patches = patches_of(frame, (2, 4))
    assert patches.shape == (8, 3, 2)
    np.testing.assert_array_equal(patches[5], frame[3:6, 2:4])


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


def test_the_budget_falls_with_entropy_from_most_to_least() -> None:
    assert [reuse_budget(entropy, 0.25, 0.75) for entropy in (0.0, 0.5, 1.0)] == [0.75, 0.5, 0.25]


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


def test_budget_1_without_motion_reuses_all_and_budget_0_nothing() -> None:
    assert reused(np.arange(16), np.arange(16.0), 1.0, 0.0).all()
    assert not reused(np.arange(16), np.arange(16.0), 0.0, 0.0).any()


def test_luma_is_the_mean_of_the_colours() -> None:
    frame = np.array([[[0, 30, 60], [255, 255, 255]]], np.uint8)
    np.testing.assert_array_equal(luma(frame), [[30.0, 255.0]])


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
