"""The gain of speculative decodings over greedy decoding, measured on the same inferences."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from experiments.measure import target_path
from experiments.tokens.methods import METHODS
from specact.families.tokens.pair import Decoding, TokenDrafter
from specact.families.tokens.speculative import DRAFT, DROPPED, TAIL, Decoded, relaxed
from specact.lab.rollout.rollout import EpisodeRange
from specact.lab.rollout.statistics import mean_interval
from specact.observation import Window
from specact.pair import LocalTarget, Pair
from specact.rng import Role, StepAddress, stream

# Greedy decoding draws nothing.
_ADDRESS = StepAddress(0, 0, 0, 0)
_COLUMNS = ("passes", "read", "accepted", "accepted_free", "greedy", "compensated", "executed")
# The columns of an inference, and the seconds of the proposal and of the whole.
Row = tuple[float, ...]


def measure_gain(pair: Pair[Any], names: Sequence[str], episodes: int, seed: int) -> dict[str, dict[str, float]]:
    """Runs every decoding on each observation of the target's rollouts with greedy decoding, in random order.

    Their state is updated with the executed actions, which are the target's; every inference is verified. Of each the
    means over all inferences: ``passes`` of the target's decoder, with the one over the prefix; tokens that they
    ``read`` after it; drafted tokens that were ``accepted``, and ``accepted_free`` without those of dimensions that
    have no tolerance; the share of chunks that equal ``greedy`` decoding's; tokens ``compensated`` by a tail; the
    share of a chunk's actions ``executed``; ``ms``, the median time of an inference. The time for an executed action is
    ``relative`` to greedy decoding's, the mean ratio with its interval over episodes; ``proposal``, of that alone.
    """
    rows = decode_path(pair, {name: cast(Decoding, METHODS[name].composition) for name in names}, episodes, seed)
    totals = {name: np.array([np.sum(array, axis=0)[-3:] for array in arrays]) for name, arrays in rows.items()}
    totals = {name: sums[:, 1:] / sums[:, :1] for name, sums in totals.items()}
    summaries = {}
    for name, arrays in rows.items():
        every = np.concatenate(arrays)
        summary = dict(zip(_COLUMNS, every.mean(axis=0).tolist(), strict=False))
        summary |= {"ms": 1e3 * float(np.median(every[:, -1])), "inferences": len(every)}
        proposal, whole = (totals[name] / totals["ar"][:, 1:]).T
        ratio = mean_interval(whole)
        summaries[name] = summary | {
            "relative": ratio.mean, "relative_low": ratio.low, "relative_high": ratio.high,
            "proposal": float(proposal.mean()),
        }  # fmt: skip
    return summaries


def decode_path(
    pair: Pair[Any], decodings: Mapping[Any, Decoding], episodes: int, seed: int
) -> dict[Any, list[np.ndarray]]:
    """Every decoding on each observation of the target's own rollouts: rows by episode."""
    pairs = {name: pair.composed(decoding=decoding) for name, decoding in decodings.items()}
    drafters: dict[Any, Any] = {name: composed.drafter() for name, composed in pairs.items()}
    order, keys = stream(seed, Role.GATE), list(drafters)
    spec, strict = pair.parts.policy.spec, () if pair.parts.drafters is None else pair.parts.drafters.settings.strict
    # Tokens of dimensions that have a tolerance.
    free = relaxed(1, spec.chunk * spec.actions, spec.actions, strict).each > 0
    rows: dict[Any, dict[int, list[Row]]] = {key: defaultdict(list) for key in keys}
    for episode, window, greedy in _greedy_path(pair, list(drafters.values()), episodes, seed):
        for at in order.permutation(len(keys)).tolist():
            decoded, *seconds = _decode(pairs[keys[at]], drafters[keys[at]], window, order)
            drafted = decoded.sources == DRAFT
            columns = (
                1 + len(decoded.accepted), sum(decoded.read), drafted.sum(), (drafted & free).sum(),
                (decoded.tokens == greedy).all(), (decoded.sources == TAIL).sum(),
                (decoded.sources != DROPPED).mean(), *seconds,
            )  # fmt: skip
            rows[keys[at]][episode].append(columns)
    return {key: [np.array(part, np.float64) for part in of_episodes.values()] for key, of_episodes in rows.items()}


def _greedy_path(
    pair: Pair[Any], drafters: Sequence[TokenDrafter], episodes: int, seed: int
) -> Iterator[tuple[int, Window, np.ndarray]]:
    """Every inference of greedy decoding's rollouts, with its tokens; the drafters are told the executed actions."""

    def update(action: np.ndarray) -> None:
        for drafter in drafters:
            drafter.on_action(action, pair.units.from_environment(action))

    greedy, last = pair.composed(decoding=Decoding("")), -1
    for record in target_path(greedy, pair.env, EpisodeRange.TOKEN_PATHS.episodes(episodes), seed, update):
        if record.address.episode != last:
            last = record.address.episode
            for drafter in drafters:
                drafter.reset()
        assert record.outcome is not None, "everything is verified"
        yield last, record.proposal.window, record.outcome.evidence.tokens


def _decode(
    pair: Pair[Any], drafter: TokenDrafter, window: Window, rng: np.random.Generator
) -> tuple[Decoded, float, float]:
    """The chunk, and the seconds that the proposal and the whole inference took."""
    verifier = pair.verifier(LocalTarget(pair.target()))
    started = time.perf_counter()
    proposal = drafter.propose(window, rng)
    proposed = time.perf_counter()
    outcome: Any = verifier.submit(proposal, _ADDRESS).result()
    drafter.verified(outcome.evidence)
    return outcome.evidence, proposed - started, time.perf_counter() - started
