"""Motion, edges and budgets from spectra: exact where they are, and how often they are wrong where they are not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specact.systems.freqcache import (
    NO_MOTION,
    Motion,
    Plane,
    edge_energy,
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
