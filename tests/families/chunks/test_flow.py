"""A flow policy on ONNX Runtime: what its networks answer, and what is made of it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import (
    Array,
    FlowBundle,
    guidance_weight,
    integrate,
    integrate_guided,
    load_flow,
)
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.observation import Window

H = 6
# Data of one action dimension: smooth paths about a mean, neighbours correlated with 0.9.
MEAN = np.linspace(-1.0, 1.0, H)[:, None]
COVARIANCE = 0.9 ** np.abs(np.subtract.outer(np.arange(H), np.arange(H)))


def slope(time: float) -> NDArray[np.float64]:
    """``V = (t S - (1 - t) I) (t^2 S + (1 - t)^2 I)^-1``: ``E[x_1 - x_0 | x_t = x] = m + V (x - t m)``."""
    rest = 1.0 - time
    together = time**2 * COVARIANCE + rest**2 * np.eye(H)
    return np.asarray((time * COVARIANCE - rest * np.eye(H)) @ np.linalg.inv(together))


def field(x: NDArray[np.float32], time: float) -> NDArray[np.float32]:
    return (MEAN + slope(time) @ (x - time * MEAN)).astype(np.float32)


def noises(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((count, H, 1)).astype(np.float32)


def test_a_gaussian_comes_out_as_it_should() -> None:
    """The exact flow takes noise x to ``m + S^(1/2) x``; the error falls as 1 / n."""
    values, vectors = np.linalg.eigh(COVARIANCE)
    noise = noises(1)[0]
    exact = MEAN + vectors * np.sqrt(values) @ vectors.T @ noise
    errors = [np.abs(integrate(field, noise, steps) - exact).max() for steps in (100, 200, 400)]
    assert errors[2] < 0.005
    assert errors[0] / errors[1] == pytest.approx(2.0, rel=0.1) and errors[1] / errors[2] == pytest.approx(2.0, rel=0.1)
    np.testing.assert_allclose(integrate(field, noise, 1), MEAN, atol=1e-6)  # one step gives the mean of the data
    np.testing.assert_allclose(guided(np.full((H, 1), 9.0), 0, noise), integrate(field, noise, 50), atol=1e-5)
    backwards = integrate(lambda x, time: field(x, 1.0 - time), noise, 400)  # time the other way round
    assert np.abs(backwards - exact).max() > 0.1


@pytest.mark.parametrize("time", [0.05, 0.3, 0.5, 0.9])
def test_the_weight_of_the_guidance(time: float) -> None:
    r_squared = (1 - time) ** 2 / (time**2 + (1 - time) ** 2)
    wanted = (1 - time) / (time * r_squared)
    assert guidance_weight(time, 1e9) == pytest.approx(wanted)
    assert guidance_weight(time, 5.0) == pytest.approx(min(5.0, wanted))
    assert guidance_weight(1.0 - time, 1e9) == pytest.approx(wanted)  # early as late
    assert guidance_weight(0.0, 5.0) == guidance_weight(1.0, 5.0) == 5.0


def guided(given: NDArray[np.float64], known: int, noise: NDArray[np.float32], steps: int = 50) -> NDArray[np.float32]:
    weights = (np.arange(H) < known).astype(np.float64)[:, None]

    def guide(x: NDArray[np.float32], time: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        velocity, rest = field(x, time), 1.0 - time
        jacobian = np.eye(H) + rest * slope(time)  # of x^_1 = x + (1 - t) v
        pull = jacobian.T @ (weights * (given - (x + rest * velocity)))
        return velocity, pull.astype(np.float32)

    return integrate_guided(guide, noise, steps, beta=100.0)


def strangeness(chunks: NDArray[np.float32]) -> float:
    """Mean squared Mahalanobis distance from the data; H for chunks of the data themselves."""
    away = (chunks - MEAN)[..., 0]
    return float(np.einsum("ni,ij,nj->n", away, np.linalg.inv(COVARIANCE), away).mean())


def test_guided_chunks_begin_as_given_and_go_on_as_the_data_might() -> None:
    """The given rows are met, and the others follow so that the whole is like the data; pasted in, it is not.

    Over 200 noises the mean squared distance of free chunks, H = 6, has a standard error of 0.25.
    """
    known = 3
    given = MEAN + np.array([1.5, 1.2, 1.0, 0.0, 0.0, 0.0])[:, None]
    chunks = np.array([guided(given, known, noise) for noise in noises(200)])
    free = np.array([integrate(field, noise, 50) for noise in noises(200)])
    assert np.abs(chunks[:, :known] - given[:known]).max() < 0.01
    assert np.sqrt(((free[:, :known] - given[:known]) ** 2).mean()) > 1.0
    pasted = free.copy()
    pasted[:, :known] = given[:known]
    assert strangeness(chunks) == pytest.approx(strangeness(free), abs=1.0)
    assert strangeness(pasted) > strangeness(free) + 5.0
    # What the known rows say of the others. The isotropic r_t of the paper makes too much of it for correlated data.
    follow = COVARIANCE[known:, :known] @ np.linalg.solve(COVARIANCE[:known, :known], (given - MEAN)[:known, 0])
    moved = (chunks - MEAN)[:, known:, 0].mean(0)
    assert (moved > 0.8 * follow).all() and (moved < 2.0 * follow).all()
    assert np.abs((free - MEAN)[:, known:, 0].mean(0)).max() < 0.25


@pytest.fixture(scope="module")
def bundle(tiny_flow: Path) -> FlowBundle:
    return load_flow(tiny_flow)


def some_window(seed: int = 0) -> Window:
    rng = np.random.default_rng(seed)
    state = 0.5 * rng.standard_normal((2, 8), dtype=np.float32)
    return Window({"state": state, "goal": 0.5 * rng.standard_normal(2, dtype=np.float32)})


def noisy(count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(count)
    return rng.standard_normal((count, 6, 2), dtype=np.float32), rng.random(count, dtype=np.float32)


def test_one_cache_serves_many_chunks_and_times(bundle: FlowBundle) -> None:
    """What a method needs that drafts and verifies several Euler steps at once."""
    networks, (chunks, times) = bundle.networks, noisy(7)
    cache = networks.cache([some_window()])
    assert cache.shape == (1, 2, 2, 2, 3, 8)  # layers, keys and values, heads, goal and two observations, width
    together = networks.velocity(chunks, times, cache)
    for chunk, time, velocity in zip(chunks, times, together, strict=True):
        np.testing.assert_allclose(networks.velocity(chunk[None], time[None], cache)[0], velocity, atol=1e-5)
    caches = [networks.cache([some_window(seed)]) for seed in range(7)]
    several = networks.velocity(chunks, times, np.concatenate(caches))
    for row, row_cache in enumerate(caches):
        alone = networks.velocity(chunks[row : row + 1], times[row : row + 1], row_cache)
        np.testing.assert_allclose(alone[0], several[row], atol=1e-5)
    assert np.abs(together - networks.velocity(chunks, 1.0 - times, cache)).max() > 0.01
    assert np.abs(together - networks.velocity(chunks, times, networks.cache([some_window(1)]))).max() > 0.01


def test_a_chunk_is_the_sum_of_its_euler_steps(bundle: FlowBundle) -> None:
    policy: ChunkPolicy = bundle.policy(steps=3)
    assert policy.inpaints
    x = np.random.default_rng(5).standard_normal((1, 6, 2), dtype=np.float32)
    cache = bundle.networks.cache([some_window()])
    for step in range(3):
        x = x + bundle.networks.velocity(x, np.array([step / 3], np.float32), cache) / np.float32(3)
    actions = policy.infer(some_window(), np.random.default_rng(5))
    np.testing.assert_allclose(actions, bundle.units.to_environment(x[0]), atol=1e-5)
    assert actions.shape == (6, 2) and actions.dtype == np.float32
    assert not np.allclose(actions, policy.infer(some_window(), np.random.default_rng(6)))
    assert not np.allclose(actions, bundle.policy(steps=1).infer(some_window(), np.random.default_rng(5)))


def test_actions_stay_within_what_was_demonstrated(bundle: FlowBundle) -> None:
    units = bundle.units
    wild = units.to_environment(np.array([[9.0, -9.0], [0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(wild[0], [units.high[0], units.low[1]])
    np.testing.assert_array_equal(wild[1], units.centre)
    inside = (0.3 * units.low + 0.7 * units.high).astype(np.float32)
    np.testing.assert_allclose(units.to_environment(units.to_flow(inside)), inside, rtol=1e-5)


def test_the_pull_is_the_exact_gradient(bundle: FlowBundle) -> None:
    """``g . d = (Y - x^_1)^T diag(W) dx^_1/dx d`` in random directions d, by central differences of the expert itself.

    Taking the Jacobian for the identity, as some do to save the way back, is far off.
    """
    networks, rng = bundle.networks, np.random.default_rng(0)
    cache, (wanted, _) = networks.cache([some_window()]), noisy(1)
    chunk, weights = rng.standard_normal((1, 6, 2), dtype=np.float32), rng.random((1, 6), dtype=np.float32)
    worst, identity = 0.0, 0.0
    for time in (0.0, 0.4, 0.9):
        now = np.array([time], np.float32)
        velocity, pull = networks.guide(chunk, now, cache, wanted, weights)
        np.testing.assert_allclose(velocity, networks.velocity(chunk, now, cache), atol=1e-5)
        missing = weights[..., None] * (wanted - (chunk + (1 - now) * velocity))
        for _ in range(5):
            way = rng.standard_normal(chunk.shape, dtype=np.float32)
            ends = [chunk + side * 0.003 * way for side in (-1, 1)]
            low, high = (end + (1 - now) * networks.velocity(end, now, cache) for end in ends)
            slope = float((missing * (high - low)).sum()) / 0.006
            worst = max(worst, abs(float((pull * way).sum()) - slope))
            identity = max(identity, abs(float((missing * way).sum()) - slope))
    assert worst < 0.02
    assert identity > 0.2


def test_inpainting_without_weights_changes_nothing_even_where_there_is_nothing_to_read(bundle: FlowBundle) -> None:
    nothing = Inpainting(np.full((6, 2), np.nan, np.float32), np.zeros(6, np.float32))
    policy = bundle.policy(steps=4)
    free = policy.infer(some_window(), np.random.default_rng(1))
    np.testing.assert_allclose(policy.infer(some_window(), np.random.default_rng(1), nothing), free, atol=1e-5)


def test_what_cannot_be_used_is_refused(bundle: FlowBundle) -> None:
    for wrong in ({"steps": 0}, {"spread": -1.0}, {"spread": float("nan")}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            bundle.policy(**wrong)
    short = Inpainting(np.zeros((5, 2), np.float32), np.zeros(5, np.float32))
    with pytest.raises(ConfigError, match=r"\(6, 2\), got \(5, 2\)"):
        bundle.policy().infer(some_window(), np.random.default_rng(0), short)
    lost = Window({"state": np.full((2, 8), np.nan, np.float32), "goal": np.zeros(2, np.float32)})
    assert np.isnan(bundle.policy().infer(lost, np.random.default_rng(0))).all()


@pytest.mark.parametrize("delays", ["many", -1, 16, 1.0, None])
def test_delays_of_a_manifest_that_are_no_number_of_actions_are_refused(delays: Any, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(load_flow("ball-chase-flow").path, tmp_path / "copy"))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["recipe"]["delays"] = delays
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=r"recipe\.delays"):
        load_flow(copy)
