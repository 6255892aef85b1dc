"""The gain of speculative token decodings over greedy decoding, measured on the same inferences."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specact.families.tokens.acceptance import relaxed
from specact.families.tokens.decoding import load_decoding
from specact.families.tokens.drafting import TokenDrafter
from specact.families.tokens.pair import TokenPair
from specact.families.tokens.speculative import DRAFT, TAIL, Decoded
from specact.lab.envs import load_task
from specact.lab.envs.robot import SimulatedRobot
from specact.lab.rollout.rollout import episode_seed
from specact.lab.statistics import mean_interval
from specact.observation import ObservationHistory, Window
from specact.rng import Role, StepAddress, stream
from specact.verification import LocalTarget, Target

# Episodes that are used for neither training, calibration nor evaluation.
_FIRST_EPISODE = 30_000_000


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
    pair_target: Target[Any] = LocalTarget(pair.target)
    drafters = {name: pair.drafter_of(load_decoding(name)) for name in names}
    robot = SimulatedRobot(load_task(env, pair.observation))
    history = ObservationHistory(pair.observation)
    order, address = stream(seed, Role.GATE), StepAddress(seed, 0, 0, 0)
    rows: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    # Of each episode's inferences: the proposal's time, and the whole.
    seconds: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in names}
    for episode in range(_FIRST_EPISODE, _FIRST_EPISODE + episodes):
        history.reset()
        robot.start(episode_seed(seed, episode, robot.task))
        for name, drafter in drafters.items():
            drafter.reset()
            seconds[name].append([])
        while not robot.done:
            window = history.push(robot.observe())
            greedy = pair.policy.decode([pair.policy.spec.observation.select(window)], [order])[0]
            for name in order.permutation(list(names)).tolist():
                decoded, *spent = _decode(pair, pair_target, drafters[name], window, address, order)
                seconds[name][-1].append((spent[0], spent[1]))
                rows[name].append(_row(decoded, greedy[0], _free(pair)))
            for number, action in enumerate(pair.policy.to_environment(greedy)[0]):
                if number:
                    history.push(robot.observe())
                robot.act(action)
                for drafter in drafters.values():
                    drafter.update(action, pair.units.from_environment(action))
                if robot.done:
                    break
        progress(episode + 1 - _FIRST_EPISODE, episodes)
    totals = {name: np.array([np.sum(one, axis=0) for one in seconds[name]]) for name in names}
    greedy_s = totals["ar"][:, 1] if "ar" in totals else None
    return {name: _summary(rows[name], seconds[name], totals[name], greedy_s) for name in names}


def _decode(
    pair: TokenPair, target: Target[Any], drafter: TokenDrafter, window: Window, address: StepAddress,
    rng: np.random.Generator,
) -> tuple[Decoded, float, float]:  # fmt: skip
    """The chunk, and the seconds that the proposal and the whole inference took."""
    started = time.perf_counter()
    proposal = drafter.propose(window, rng)
    proposed = time.perf_counter()
    outcome: Any = pair.verifier(target).submit(proposal, address).result()
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
