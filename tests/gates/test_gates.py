"""Gates: their scores against formulas written down independently, and what they promise about deciding."""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
from scipy import stats
from tests.gates.steps import RNG, A, Fixed, G, K, Told, binomial_bounds, distribution, proposal, scripted, tokenizer

from specact.families.codes.sampling import CodeDistribution, softmax
from specact.gates import ActionDeviation, Always, Gate, Never, Oracle, Random, Uncertainty
from specact.gates.gate import Periodic
from specact.types import Proposal

READINGS = ("euclidean", "path_ratio", "disparity", "zscore", "jump")


def oracle(threshold: float, target: CodeDistribution, **options: Any) -> Oracle:
    return Oracle(threshold, target=Fixed(target), tokenizer=tokenizer(*target.probs.shape), **options)


# ---- action deviation -----------------------------------------------------------------------------------------------


def deviation(reading: str, alpha: float, path: int, past: np.ndarray, action: np.ndarray) -> float:
    """The reading from the whole past, with the moving averages' weights written out; no recursion."""
    ages, epsilon = np.arange(len(past))[::-1], 1e-6
    weights = alpha * (1.0 - alpha) ** ages
    weights[0] = (1.0 - alpha) ** ages[0]  # the first action starts the average
    mean = (weights[:, None] * past).sum(axis=0)
    spread = np.sqrt((weights[:, None] * (past - mean) ** 2).sum(axis=0))
    lengths = np.linalg.norm(np.diff(past, axis=0), axis=1)[-path:]
    away = action - mean
    return float(
        {
            "euclidean": np.linalg.norm(away),
            "path_ratio": np.linalg.norm(away) / (lengths.sum() + epsilon),
            "disparity": np.linalg.norm(away) / (np.linalg.norm(mean) + epsilon),
            "zscore": np.linalg.norm(away / (spread + epsilon)),
            "jump": np.linalg.norm(action - past[-1]),
        }[reading]
    )


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("source", ["executed", "draft"])
def test_every_reading_over_two_episodes(reading: Any, alpha: float, source: Literal["executed", "draft"]) -> None:
    rng = RNG(1)
    gate = ActionDeviation(0.0, reading=reading, alpha=alpha, source=source, path=4)
    for _ in range(2):
        drafted, executed = rng.normal(size=(2, 40, A)).astype(np.float32)
        past = (executed if source == "executed" else drafted).astype(np.float64)
        assert gate.score(proposal(action=drafted[0]), rng) == 0.0  # nothing to look back at
        for t in range(40):
            if t > 0:
                wanted = deviation(reading, alpha, 4, past[:t], drafted[t].astype(np.float64))
                assert gate.score(proposal(t, action=drafted[t]), rng) == pytest.approx(wanted, rel=1e-6)
            given = drafted[t].copy(), executed[t].copy()
            gate.on_action(*given)
            for array in given:
                array[:] = 100.0  # it keeps a copy
        gate.reset()


# ---- from score to decision -----------------------------------------------------------------------------------------


def test_transmits_above_the_threshold_and_where_the_score_is_no_number() -> None:
    gate = Told([0.4999, 0.5, 0.5001, math.nan], 0.5, force_first=False)
    decisions = [gate.decide(proposal(), RNG(0)) for _ in range(4)]
    assert [decision.transmit for decision in decisions] == [False, False, True, True]  # a tie is not above
    assert [decision.reason for decision in decisions] == ["score", "tie", "score", "score"]
    assert (decisions[2].score, decisions[2].threshold) == (0.5001, 0.5)


@pytest.mark.parametrize("max_skips", [0, 1, 3])
def test_no_run_of_skips_is_longer_than_max_skips(max_skips: int) -> None:
    gate, rng = Random(0.1, max_skips=max_skips), RNG(0)
    decisions = [gate.decide(proposal(), rng) for _ in range(400)]
    runs = [len(list(run)) for skipped, run in itertools.groupby(not d.transmit for d in decisions) if skipped]
    assert max(runs, default=0) == max_skips  # reached, but never passed
    for at, decision in enumerate(decisions):
        forced = at >= max_skips and not any(d.transmit for d in decisions[at - max_skips : at])
        assert (decision.reason == "max_skips") == forced
        assert decision.transmit or not forced


def test_the_first_inference_is_forced_and_a_reset_forgets_the_skips() -> None:
    gate, privileged = Told([0.0], 1.0, max_skips=2), Random(0.0, force_first=True, max_skips=2)
    for _ in range(2):
        for candidate in (gate, privileged):
            reasons = [candidate.decide(proposal(), RNG(0)).reason for _ in range(5)]
            assert reasons == ["first", "score", "score", "max_skips", "score"]
            candidate.reset()
    free = Told([0.0], 1.0, max_skips=3, force_first=False)
    for _ in range(3):
        free.decide(proposal(), RNG(0))
    free.reset()
    assert [free.decide(proposal(), RNG(0)).transmit for _ in range(4)] == [False, False, False, True]
    unlimited = Told([0.0], 1.0, force_first=False)
    assert not any(unlimited.decide(proposal(), RNG(0)).transmit for _ in range(100))


# ---- gates that look at nothing -------------------------------------------------------------------------------------


def test_never_always_and_periodic() -> None:
    never, always, periodic, rng = Never(), Always(), Periodic.for_pair(None, 0.0, period=4), RNG(0)
    for t in range(50):
        assert not never.decide(proposal(t), rng).transmit
        assert always.decide(proposal(t), rng).transmit
        assert periodic.decide(proposal(t), rng).transmit == (t % 4 == 0)


@pytest.mark.parametrize(
    ("rate", "uniform", "transmit"),
    [(1.0, 0.0, True), (1.0, 1.0 - 2.0**-53, True), (0.0, 0.0, False), (0.0, 1.0 - 2.0**-53, False),
     (0.25, 0.2499, True), (0.25, 0.2501, False)],
)  # fmt: skip
def test_random_and_ties_at_the_ends_and_near_their_rate(rate: float, uniform: float, transmit: bool) -> None:
    gates = {Random(rate): (0.5, uniform), Told([0.0], 0.0, tie_probability=rate, force_first=False): (uniform,)}
    for gate, numbers in gates.items():
        assert gate.decide(proposal(), scripted(numbers)).transmit is transmit


# ---- the draft's own doubt ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequential", [False, True])
def test_entropy_and_one_minus_q(sequential: bool) -> None:
    """A sequential secondary is read at the drafted primary."""
    draft = distribution(3, sequential=sequential)
    rows = np.stack([draft.probs[0], draft.probs[1] if draft.conditional is None else draft.conditional[2]])
    step = proposal(draft=draft, codes=(2, 1))
    entropy = Uncertainty(0.0, kind="entropy").score(step, RNG(0))
    assert entropy == pytest.approx(float(stats.entropy(rows, axis=1).sum()), abs=1e-12)
    doubt = Uncertainty(0.0, kind="one_minus_q").score(step, RNG(0))
    assert doubt == pytest.approx(1.0 - rows[0, 2] * rows[1, 1], abs=1e-12)


@pytest.mark.parametrize("codes", [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("hottest", [0.5, 2.0])
def test_disagreement_and_temperature_against_quadrature(codes: tuple[int, int], hottest: float) -> None:
    # Given the drafted codes, each of the M perturbations differs independently with the same probability: over the
    # temperature uniform in (0, T_max], one minus the product of the tempered softmaxes at the drafted codes.
    draft, m = distribution(4), 40_000
    temperatures = hottest * (np.arange(4000) + 0.5) / 4000
    tempered = np.stack([softmax(np.log(draft.probs), float(t)) for t in temperatures])
    probability = float(np.mean(1.0 - tempered[:, 0, codes[0]] * tempered[:, 1, codes[1]]))
    step = proposal(draft=draft, codes=codes)
    sampled = Uncertainty(0.0, kind="temperature", perturbations=m, max_temperature=hottest)
    low, high = binomial_bounds(m, probability)
    assert low <= m * sampled.score(step, RNG(0)) <= high
    # 20 evenly spaced temperatures leave an error of the order of 1 / 20.
    for count, slack in ((20, 0.03), (4000, 1e-12)):
        gate = Uncertainty(0.0, kind="disagreement", max_temperature=hottest, perturbations=count)
        assert gate.score(step, RNG(0)) == pytest.approx(probability, abs=slack)


# ---- oracles --------------------------------------------------------------------------------------------------------


def outcomes(p: np.ndarray, q: np.ndarray, code: int) -> np.ndarray:
    """Law of one codebook's final code, given the drafted one."""
    keep = min(1.0, p[code] / q[code])
    law = np.zeros(len(p))
    law[code] = keep
    if keep < 1.0:
        spare = np.clip(p - q, 0.0, None)
        law += (1.0 - keep) * spare / spare.sum()
    return law


def check_oracles(target: CodeDistribution, step: Proposal, law: np.ndarray) -> None:
    """Both oracles against the enumerated law of the verified codes."""
    decoder, change = tokenizer(*target.probs.shape), 0.0
    for final in np.ndindex(law.shape):
        chunk = decoder.decode(np.array(final), target.offsets)
        change += float(law[final]) * float(np.mean([np.linalg.norm(row) for row in chunk - step.actions]))
    # The oracle leaves out outcomes rarer than 1e-6, K^G of them at most; the rest is single precision.
    assert oracle(0.0, target, on="action_change").score(step, RNG(0)) == pytest.approx(change, rel=1e-4)
    rejection = 1.0 - law[tuple(step.evidence.codes)]
    assert oracle(0.0, target).score(step, RNG(0)) == pytest.approx(rejection, abs=1e-12)


@pytest.mark.parametrize("books", [1, 2, 3])
def test_oracles_against_enumerated_verification(books: int) -> None:
    for seed in range(6):
        target, draft = distribution(seed, books=books), distribution(seed + 50, books=books)
        step = proposal(seed, draft=draft)
        rows = [outcomes(p, q, int(z)) for p, q, z in zip(target.probs, draft.probs, step.evidence.codes, strict=True)]
        law = rows[0]
        for row in rows[1:]:
            law = np.multiply.outer(law, row)
        check_oracles(target, step, law)


def test_oracles_of_a_sequential_secondary_against_enumerated_verification() -> None:
    target, draft = distribution(1, sequential=True), distribution(2, sequential=True)
    assert target.conditional is not None and draft.conditional is not None
    for codes in np.ndindex(K, K):
        first = outcomes(target.probs[0], draft.probs[0], codes[0])
        law = first[:, None] * target.conditional  # a replaced primary: the target's own conditional there
        law[codes[0]] = first[codes[0]] * outcomes(target.conditional[codes[0]], draft.conditional[codes[0]], codes[1])
        check_oracles(target, proposal(draft=draft, codes=codes), law)


# ---- for every gate -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "draws"),
    [
        (ActionDeviation, 0),
        (lambda threshold: Uncertainty(threshold, kind="temperature"), 20 + 20 * G),
        (lambda threshold: oracle(threshold, distribution(7), on="action_change"), 0),
        (lambda threshold: Random(float(np.clip(1.0 - threshold, 0.0, 1.0))), 1),
    ],
)
def test_what_a_gate_draws_does_not_depend_on_what_it_decides(make: Callable[[float], Gate], draws: int) -> None:
    """One number for ties and its own, whatever the threshold; the same streams give the same decisions again."""
    decisions = []
    for gate in map(make, (0.5, 0.5, -math.inf, math.inf)):
        for t in range(25):
            step, used, counted = proposal(t), RNG(t), RNG(t)
            decisions.append(gate.decide(step, used))
            counted.random(1 + draws)
            assert used.bit_generator.state == counted.bit_generator.state
            assert decisions[-1].threshold == gate.threshold
            gate.on_action(step.actions[0], -step.actions[0])
    assert decisions[:25] == decisions[25:50]
