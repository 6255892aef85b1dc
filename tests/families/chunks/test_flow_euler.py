"""Integration along a velocity field, against fields whose outcome is known in closed form."""

import numpy as np
import pytest
from numpy.typing import NDArray

from specact.families.chunks.flow_euler import guidance_weight, integrate, integrate_guided

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
    backwards = integrate(lambda x, time: field(x, 1.0 - time), noise, 400)  # time the other way round
    assert np.abs(backwards - exact).max() > 0.1


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_straight_path_needs_no_more_than_one_step(steps: int) -> None:
    noise, data = noises(2)
    way: NDArray[np.float32] = data - noise
    seen = []

    def straight(x: NDArray[np.float32], time: float) -> NDArray[np.float32]:
        seen.append(time)
        return way

    np.testing.assert_allclose(integrate(straight, noise, steps), data, atol=1e-5)
    assert seen == [step / steps for step in range(steps)]


def test_one_step_is_the_mean_of_the_data() -> None:
    np.testing.assert_allclose(integrate(field, noises(1)[0], 1), MEAN, atol=1e-6)


@pytest.mark.parametrize("time", [0.05, 0.3, 0.5, 0.9])
def test_the_weight_of_the_guidance(time: float) -> None:
    r_squared = (1 - time) ** 2 / (time**2 + (1 - time) ** 2)
    wanted = (1 - time) / (time * r_squared)
    assert guidance_weight(time, 1e9) == pytest.approx(wanted)
    assert guidance_weight(time, 5.0) == pytest.approx(min(5.0, wanted))
    assert guidance_weight(1.0 - time, 1e9) == pytest.approx(wanted)  # early as late


def test_the_weight_is_limited_where_it_would_be_infinite() -> None:
    assert guidance_weight(0.0, 5.0) == guidance_weight(1.0, 5.0) == 5.0
    assert guidance_weight(0.5, 5.0) == pytest.approx(2.0)


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


def test_without_weights_there_is_no_guidance() -> None:
    noise = noises(1)[0]
    np.testing.assert_allclose(guided(np.full((H, 1), 9.0), 0, noise), integrate(field, noise, 50), atol=1e-5)
