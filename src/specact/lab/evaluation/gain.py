"""The gain of speculative token decodings over greedy decoding, measured on the same inferences."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specact.families.tokens.acceptance import relaxed
from specact.families.tokens.decoding import Decoding, load_decoding
from specact.families.tokens.drafting import TokenDrafter
from specact.families.tokens.network import Tokens
from specact.families.tokens.pair import TokenPair
from specact.families.tokens.speculative import DRAFT, TAIL, Decoded
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.rollout import episode_seed
from specact.lab.statistics import mean_interval
from specact.observation import ObservationHistory, Window
from specact.rng import Role, StepAddress, stream
from specact.verification import LocalTarget

# Episodes that are used for neither training, calibration nor evaluation.
_FIRST_EPISODE = 30_000_000
# Greedy decoding draws nothing.
_ADDRESS = StepAddress(0, 0, 0, 0)

# Bins.
TOLERANCES = (0, 5, 9, 15, 20)
# Drafters by themselves; each is measured at every tolerance.
_DRAFTERS = {
    "the head": Decoding("", then="head"),
    "the memory": Decoding("", "retrieval"),
    "the last action": Decoding("", "last"),
    "the filter": Decoding("", "filter"),
    "the bigram table": Decoding("", then="bigram"),
    "the draft policy": Decoding("", "draft"),
    "random tokens": Decoding("", "random"),
    "the target's own tokens": Decoding("", "perfect"),
}


def measure_gain(
    pair: TokenPair,
    env: str,
    names: Sequence[str],
    episodes: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, float]]:
    """Rolls out the target with greedy decoding, and runs every decoding on each observation.

    The decodings' state is updated with the executed actions, which are the target's, so that all of them decode under
    the same conditions. Each inference times them in random order.

    Args:
        pair: the target and its drafters.
        env: name of the environment.
        names: of decodings.
        episodes: number of rollouts.
        seed: of the initial states and the order.
        progress: called with (done, total) after every episode.

    Returns:
        For each decoding, means over all inferences: ``passes`` of the target's decoder, with the one over the prefix;
        ``read``, tokens they read after it; ``accepted``, drafted tokens that were accepted, and ``accepted_free``
        without those of dimensions that have no tolerance; ``greedy``, share of chunks that equal greedy decoding's;
        ``compensated``, tokens from a tail; ``ms``, median time of an inference, proposal included, and ``relative``,
        the mean ratio to greedy decoding's with its interval ``relative_low``, ``relative_high`` over episodes;
        ``proposal``, the same ratio of the proposal alone, which is the time of an inference that is not verified;
        ``inferences``, their number. Every inference is verified here.
    """
    drafters = {name: pair.drafter_of(load_decoding(name)) for name in names}
    order = stream(seed, Role.GATE)
    rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    # Of each episode's inferences: the proposal's time, and the whole.
    seconds: dict[str, list[list[tuple[float, float]]]] = {name: [[] for _ in range(episodes)] for name in names}
    for episode, window, greedy in _target_path(pair, env, list(drafters.values()), episodes, seed, progress):
        for name in order.permutation(list(names)).tolist():
            decoded, *spent = _decode(pair, drafters[name], window, order)
            seconds[name][episode].append((spent[0], spent[1]))
            rows[name].append(_row(decoded, greedy, _free(pair)))
    totals = {name: np.array([np.sum(one, axis=0) for one in seconds[name]]) for name in names}
    greedy_s = totals["ar"][:, 1] if "ar" in totals else None
    return {name: _summary(rows[name], seconds[name], totals[name], greedy_s) for name in names}


def measure_drafters(
    pair: TokenPair,
    env: str,
    episodes: int,
    *,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, dict[str, list[float]]]:
    """Passes of the target with every drafter by itself at every tolerance, on the target's own rollouts.

    Args:
        pair: the target and its drafters, with a draft policy or none.
        env, episodes, seed, progress: as for :func:`measure_gain`.

    Returns:
        For each drafter a list over :data:`TOLERANCES` of each of these means over all inferences: ``passes`` of the
        target's decoder for a chunk, with the interval over episodes ``passes_low``, ``passes_high``; ``accepted``
        tokens of a chunk, and ``accepted_free`` of those that are not a gripper's.

    Raises:
        ConfigError: if the pair has no trained drafters.
    """
    grids = {
        name: [pair.drafter_of(replace(decoding, bins=bins)) for bins in TOLERANCES]
        for name, decoding in _DRAFTERS.items()
        if decoding.proposes != "draft" or pair.draft is not None
    }
    rng = stream(seed, Role.GATE)
    rows: dict[str, list[list[list[tuple[float, ...]]]]] = {
        name: [[[] for _ in range(episodes)] for _ in grid] for name, grid in grids.items()
    }
    every = [drafter for grid in grids.values() for drafter in grid]
    for episode, window, greedy in _target_path(pair, env, every, episodes, seed, progress):
        for name, grid in grids.items():
            for at, drafter in enumerate(grid):
                rows[name][at][episode].append(_row(_decode(pair, drafter, window, rng)[0], greedy, _free(pair)))
    return {name: _by_tolerance(grid) for name, grid in rows.items()}


def _by_tolerance(grid: list[list[list[tuple[float, ...]]]]) -> dict[str, list[float]]:
    """The lists of one drafter, of its rows by tolerance, episode and inference."""
    counts = np.array([len(episode) for episode in grid[0]])
    sums = np.array([[np.sum(episode, axis=0) for episode in episodes] for episodes in grid])
    means, at = sums.sum(axis=1) / counts.sum(), _COLUMNS.index("passes")
    # A ratio of sums, linearised: its value, and an interval over episodes of different lengths.
    passes = [
        mean_interval(mean + (total - mean * counts) / counts.mean())
        for mean, total in zip(means[:, at], sums[:, :, at], strict=True)
    ]
    found = {"passes": [one.mean for one in passes]}
    found |= {"passes_low": [one.low for one in passes], "passes_high": [one.high for one in passes]}
    return found | {name: means[:, _COLUMNS.index(name)].tolist() for name in ("accepted", "accepted_free")}


def _target_path(
    pair: TokenPair, env: str, drafters: Sequence[TokenDrafter], episodes: int, seed: int,
    progress: Callable[[int, int], None],
) -> Iterator[tuple[int, Window, Tokens]]:  # fmt: skip
    """Every inference of the target's own rollouts: number of the episode, observation, and greedy decoding's chunk.

    The drafters are told the executed actions.
    """
    robot = SimulatedRobot(load_task(env, pair.observation))
    history, unused = ObservationHistory(pair.observation), np.random.default_rng(0)
    for number in range(episodes):
        history.reset()
        robot.start(episode_seed(seed, _FIRST_EPISODE + number, robot.task))
        for drafter in drafters:
            drafter.reset()
        while not robot.done:
            window = history.push(robot.observe())
            greedy = pair.policy.decode([pair.policy.spec.observation.select(window)], [unused])[0]
            yield number, window, greedy[0]
            for step, action in enumerate(pair.policy.to_environment(greedy)[0]):
                if step:
                    history.push(robot.observe())
                robot.act(action)
                for drafter in drafters:
                    drafter.on_action(action, pair.units.from_environment(action))
                if robot.done:
                    break
        progress(number + 1, episodes)


def _decode(
    pair: TokenPair, drafter: TokenDrafter, window: Window, rng: np.random.Generator
) -> tuple[Decoded, float, float]:
    """The chunk, and the seconds that the proposal and the whole inference took."""
    verifier = pair.verifier(LocalTarget(pair.target))
    started = time.perf_counter()
    proposal = drafter.propose(window, rng)
    proposed = time.perf_counter()
    outcome: Any = verifier.submit(proposal, _ADDRESS).result()
    decoded: Decoded = outcome.evidence
    drafter.verified(decoded)
    return decoded, proposed - started, time.perf_counter() - started


def _free(pair: TokenPair) -> np.ndarray:
    """Tokens of dimensions that have a tolerance, bool ``[T]``."""
    spec = pair.policy.spec
    strict = () if pair.drafters is None else pair.drafters.settings.strict
    return relaxed(1, spec.chunk * spec.actions, spec.actions, strict).each > 0


_COLUMNS = ("passes", "read", "accepted", "accepted_free", "greedy", "compensated")


def _row(decoded: Decoded, greedy: np.ndarray, free: np.ndarray) -> tuple[float, ...]:
    drafted = decoded.sources == DRAFT
    return (
        1 + len(decoded.accepted), sum(decoded.read), drafted.sum(), (drafted & free).sum(),
        (decoded.tokens == greedy).all(), (decoded.sources == TAIL).sum(),
    )  # fmt: skip


def _summary(
    rows: list[tuple[float, ...]],
    seconds: list[list[tuple[float, float]]],
    totals: np.ndarray,
    greedy_s: np.ndarray | None,
) -> dict[str, float]:
    summary = dict(zip(_COLUMNS, np.mean(rows, axis=0).tolist(), strict=True))
    summary |= {"ms": 1e3 * float(np.median(np.concatenate(seconds)[:, 1])), "inferences": len(rows)}
    if greedy_s is not None:
        ratios = mean_interval(totals[:, 1] / greedy_s)
        summary |= {
            "relative": ratios.mean, "relative_low": ratios.low, "relative_high": ratios.high,
            "proposal": float((totals[:, 0] / greedy_s).mean()),
        }  # fmt: skip
    return summary
