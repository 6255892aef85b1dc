"""A flow policy on ONNX Runtime: what its networks answer, and what is made of it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from specact.errors import ConfigError, ObservationError
from specact.families.chunks.flow import (
    Array,
    FlowBundle,
    FlowPolicy,
    guidance_weight,
    integrate,
    integrate_guided,
    load_flow,
)
from specact.families.chunks.policy import ChunkPolicy, Inpainting
from specact.lab.envs import load_task
from specact.observation import ObservationHistory, Window

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


def test_without_weights_there_is_no_guidance() -> None:
    noise = noises(1)[0]
    np.testing.assert_allclose(guided(np.full((H, 1), 9.0), 0, noise), integrate(field, noise, 50), atol=1e-5)


SHELF = Path(__file__).parents[3] / "pretrained"
PUSHT = SHELF / "pusht-flow"


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
    assert np.abs(together - networks.velocity(chunks, 1.0 - times, cache)).max() > 0.01
    assert np.abs(together - networks.velocity(chunks, times, networks.cache([some_window(1)]))).max() > 0.01


def test_as_many_caches_as_chunks(bundle: FlowBundle) -> None:
    networks, (chunks, times) = bundle.networks, noisy(3)
    caches = [networks.cache([some_window(seed)]) for seed in range(3)]
    together = networks.velocity(chunks, times, np.concatenate(caches))
    for row in range(3):
        alone = networks.velocity(chunks[row : row + 1], times[row : row + 1], caches[row])
        np.testing.assert_allclose(alone[0], together[row], atol=1e-5)


def test_a_chunk_is_the_sum_of_its_euler_steps(bundle: FlowBundle) -> None:
    policy: ChunkPolicy = bundle.policy(steps=3)
    assert policy.inpaints
    x = np.random.default_rng(5).standard_normal((1, 6, 2), dtype=np.float32)
    cache = bundle.networks.cache([some_window()])
    for step in range(3):
        x = x + bundle.networks.velocity(x, np.array([step / 3], np.float32), cache) / np.float32(3)
    found = policy.infer(some_window(), np.random.default_rng(5))
    np.testing.assert_allclose(found, bundle.units.to_environment(x[0]), atol=1e-5)
    assert found.shape == (6, 2) and found.dtype == np.float32
    assert not np.allclose(found, policy.infer(some_window(), np.random.default_rng(6)))
    assert not np.allclose(found, bundle.policy(steps=1).infer(some_window(), np.random.default_rng(5)))


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
    for steps, spread in ((0, 1.0), (1, -1.0), (1, float("nan"))):
        with pytest.raises(ConfigError, match="at least 1 step"):
            FlowPolicy(bundle.networks, bundle.units, bundle.spec, steps=steps, spread=spread)
    short = Inpainting(np.zeros((5, 2), np.float32), np.zeros(5, np.float32))
    with pytest.raises(
        ConfigError, match=r"chunks have shape \(6, 2\), but the actions to inpaint have shape \(5, 2\)"
    ):
        bundle.policy().infer(some_window(), np.random.default_rng(0), short)
    lost = Window({"state": np.full((2, 8), np.nan, np.float32), "goal": np.zeros(2, np.float32)})
    with pytest.raises(ObservationError, match="not finite"):
        bundle.policy().infer(lost, np.random.default_rng(0))


def pusht_windows(count: int, seed: int) -> list[Window]:
    """Moments of an episode of PushT, half a second apart, under the policy itself."""
    bundle, env = load_flow(PUSHT), load_task("pusht").make()
    policy, window = bundle.policy(steps=4), ObservationHistory(bundle.spec.observation)
    seen = window.push(env.reset(seed=seed)[0])
    windows = []
    for number in range(count):
        windows.append(seen)
        for action in policy.infer(seen, np.random.default_rng(number))[:5]:
            seen = window.push(env.step(action)[0])
    return windows


def test_a_guided_chunk_goes_on_from_the_last_one() -> None:
    """Real-time chunking on the policy that is shipped.

    The last chunk was drawn 0.5 s earlier; its next 4 actions will run whatever the new one says. A guided chunk begins
    with them, a free one does not, and what follows is as smooth at the seam as anywhere: pasted over it is not.

    In each of six episodes guided chunks missed .18 to .28 of what free ones missed (bound .4), their seams were .85 to
    1.13 times as large as usual steps (bound 1.5), and pasted seams 1.6 to 2.4 times as large as theirs (bound 1.2).
    """
    bundle = load_flow(PUSHT)
    policy, known = bundle.policy(steps=10), 4
    weights = (np.arange(bundle.spec.chunk) < known).astype(np.float32)
    misses: dict[str, list[float]] = {"free": [], "guided": []}
    jumps: dict[str, list[float]] = {"within": [], "guided": [], "pasted": []}
    moments = [pair for seed in (7, 8) for pair in itertools.pairwise(pusht_windows(20, seed))]
    for number, (before, now) in enumerate(moments):
        last = policy.infer(before, np.random.default_rng(number))
        given = np.concatenate([last[5:], np.zeros((5, 2), np.float32)])
        rng = np.random.default_rng(100 + number)
        free = policy.infer(now, rng)
        guided = policy.infer(now, np.random.default_rng(100 + number), Inpainting(given, weights))
        pasted = np.concatenate([given[:known], free[known:]])
        for name, chunk in (("free", free), ("guided", guided)):
            misses[name].append(float(np.abs(chunk[:known] - given[:known]).mean()))
        for name, chunk in (("guided", guided), ("pasted", pasted)):
            jumps[name].append(float(np.abs(chunk[known] - chunk[known - 1]).mean()))
        jumps["within"].append(float(np.abs(np.diff(free, axis=0)).mean()))
    assert np.mean(misses["guided"]) < 0.4 * np.mean(misses["free"])
    usual = np.mean(jumps["within"])
    assert np.mean(jumps["guided"]) < 1.5 * usual
    assert np.mean(jumps["pasted"]) > 1.2 * np.mean(jumps["guided"])
