"""Gates: their scores against formulas written down independently, and what they promise about deciding."""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, cast

import numpy as np
import pytest
from scipy import stats
from tests.gates.fixed import Fixed

from specact.errors import ConfigError
from specact.families.codes.policy import ActionTokenizer
from specact.families.codes.sampling import CodeDistribution, Drafted, softmax
from specact.gates import ActionDeviation, Always, Gate, Never, Oracle, Random, Uncertainty
from specact.observation import Window
from specact.types import Proposal

G, K, CHUNK, A = 2, 3, 2, 2
ERROR_RATE = 1e-6
RNG = np.random.default_rng


def binomial_bounds(n: int, p: float) -> tuple[float, float]:
    """A count outside has probability at most 1e-6."""
    return float(stats.binom.ppf(ERROR_RATE / 2, n, p)), float(stats.binom.isf(ERROR_RATE / 2, n, p))


def distribution(seed: int, *, books: int = G, codes: int = K, sequential: bool = False) -> CodeDistribution:
    rng = RNG([seed, books, codes])
    # At least 1/15 everywhere: no outcome of a verification is too rare to count.
    probs = 0.8 * rng.dirichlet(np.ones(codes), size=books) + 0.2 / codes
    offsets = rng.normal(size=(books, codes, CHUNK, A)).astype(np.float32)
    conditional = rng.dirichlet(np.ones(codes), size=codes) if sequential else None
    return CodeDistribution(probs, offsets, conditional)


def proposal(
    seed: int = 0, *, draft: CodeDistribution | None = None, codes: Iterable[int] | None = None, action: Any = None
) -> Proposal:
    rng = RNG([seed, 99])
    draft = draft or distribution(seed)
    chunk = rng.normal(size=(CHUNK, A)).astype(np.float32)
    if action is not None:
        chunk[0] = action
    drawn = rng.integers(draft.probs.shape[1], size=len(draft.probs)) if codes is None else np.array(list(codes))
    return Proposal(Window({"state": np.zeros((1, 2), np.float32)}), chunk, Drafted(draft, drawn))


class Told(Gate):
    """A gate whose scores are given."""

    def __init__(self, scores: Sequence[float], threshold: float, **limits: Any) -> None:
        super().__init__(threshold, **limits)
        self._scores = iter(itertools.cycle(scores))

    def score(self, proposal: Proposal, rng: np.random.Generator) -> float:
        return next(self._scores)


def tokenizer(books: int = G, codes: int = K) -> ActionTokenizer:
    table = RNG(5).normal(size=(codes**books, CHUNK, A)).astype(np.float32)
    return ActionTokenizer(np.zeros(A, np.float32), np.ones(A, np.float32), table, "none", codes)


def oracle(threshold: float, target: CodeDistribution, **options: Any) -> Oracle:
    return Oracle(threshold, target=Fixed(target), tokenizer=tokenizer(*target.probs.shape), **options)


# ---- action deviation -----------------------------------------------------------------------------------------------

EPSILON = 1e-6


def deviation(reading: str, alpha: float, path: int, past: np.ndarray, action: np.ndarray) -> float:
    """The reading from the whole past, with the moving averages' weights written out; no recursion."""
    ages = np.arange(len(past))[::-1]
    weights = alpha * (1.0 - alpha) ** ages
    weights[0] = (1.0 - alpha) ** ages[0]  # the first action starts the average
    mean = (weights[:, None] * past).sum(axis=0)
    spread = np.sqrt((weights[:, None] * (past - mean) ** 2).sum(axis=0))
    lengths = np.linalg.norm(np.diff(past, axis=0), axis=1)[-path:]
    away = action - mean
    return float(
        {
            "euclidean": np.linalg.norm(away),
            "path_ratio": np.linalg.norm(away) / (lengths.sum() + EPSILON),
            "disparity": np.linalg.norm(away) / (np.linalg.norm(mean) + EPSILON),
            "zscore": np.linalg.norm(away / (spread + EPSILON)),
            "jump": np.linalg.norm(action - past[-1]),
        }[reading]
    )


@pytest.mark.parametrize("reading", ["euclidean", "path_ratio", "disparity", "zscore", "jump"])
@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0])
@pytest.mark.parametrize("source", ["executed", "draft"])
def test_every_reading_over_a_whole_sequence(reading: Any, alpha: float, source: Literal["executed", "draft"]) -> None:
    rng = RNG(1)
    drafted, executed = rng.normal(size=(2, 40, A)).astype(np.float32)
    fed = (executed if source == "executed" else drafted).astype(np.float64)
    gate = ActionDeviation(0.0, reading=reading, alpha=alpha, source=source, path=4)
    assert gate.score(proposal(action=drafted[0]), rng) == 0.0  # nothing to look back at
    for t in range(40):
        if t > 0:
            wanted = deviation(reading, alpha, 4, fed[:t], drafted[t].astype(np.float64))
            assert gate.score(proposal(t, action=drafted[t]), rng) == pytest.approx(wanted, rel=1e-6)
        gate.on_action(drafted[t], executed[t])


def test_with_alpha_one_the_distance_is_the_jump() -> None:
    euclidean = ActionDeviation(0.0, reading="euclidean", alpha=1.0)
    jump = ActionDeviation(0.0, reading="jump", alpha=0.3)  # whatever alpha
    rng = RNG(2)
    for t in range(30):
        action = rng.normal(size=A).astype(np.float32)
        assert euclidean.score(proposal(t), rng) == pytest.approx(jump.score(proposal(t), rng), rel=1e-9)
        euclidean.on_action(-action, action)
        jump.on_action(-action, action)


def test_deviation_keeps_its_own_copy_of_the_actions() -> None:
    gate, action = ActionDeviation(0.0, reading="jump"), np.ones(A, np.float32)
    gate.on_action(action, action)
    action[:] = 100.0
    assert gate.score(proposal(action=[1.0, 1.0]), RNG(0)) == 0.0


def test_reset_forgets_the_actions() -> None:
    rng = RNG(3)
    for reading in ("euclidean", "path_ratio", "disparity", "zscore", "jump"):
        used, fresh = (ActionDeviation(0.1, reading=cast(Any, reading), path=3) for _ in range(2))
        for _ in range(5):
            used.on_action(*rng.normal(size=(2, A)).astype(np.float32))
        used.reset()
        assert used.score(proposal(), rng) == 0.0
        for t in range(5):
            pair = rng.normal(size=(2, A)).astype(np.float32)
            used.on_action(*pair)
            fresh.on_action(*pair)
            assert used.score(proposal(t), rng) == fresh.score(proposal(t), rng)


# ---- from score to decision -----------------------------------------------------------------------------------------


def test_transmits_above_the_threshold_and_skips_below() -> None:
    gate = Told([0.4999, 0.5, 0.5001], 0.5, force_first=False)
    below, at, above = (gate.decide(proposal(), RNG(0)) for _ in range(3))
    assert (below.transmit, below.reason) == (False, "score")
    assert (at.transmit, at.reason) == (False, "tie")  # a tie is not above
    assert (above.transmit, above.reason) == (True, "score")
    assert (above.score, above.threshold) == (0.5001, 0.5)


def test_ties_are_transmitted_with_their_probability() -> None:
    n, wanted = 5000, 0.3
    gate, rng = Told([0.0], 0.0, tie_probability=wanted, force_first=False), RNG(0)
    decisions = [gate.decide(proposal(), rng) for _ in range(n)]
    assert {decision.reason for decision in decisions} == {"tie"}
    low, high = binomial_bounds(n, wanted)
    assert low <= sum(decision.transmit for decision in decisions) <= high


@pytest.mark.parametrize(("tie_probability", "transmitted"), [(0.0, 0), (1.0, 200)])
def test_ties_can_be_settled_for_good(tie_probability: float, transmitted: int) -> None:
    gate, rng = Told([0.0], 0.0, tie_probability=tie_probability, force_first=False), RNG(0)
    assert sum(gate.decide(proposal(), rng).transmit for _ in range(200)) == transmitted


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


def test_without_a_limit_a_gate_may_skip_for_ever() -> None:
    gate = Told([0.0], 1.0, force_first=False)
    assert not any(gate.decide(proposal(), RNG(0)).transmit for _ in range(100))


def test_first_inference_is_forced_and_again_after_a_reset() -> None:
    gate = Told([0.0], 1.0, max_skips=2)
    for _ in range(2):
        assert [gate.decide(proposal(), RNG(0)).reason for _ in range(5)] == [
            "first", "score", "score", "max_skips", "score",
        ]  # fmt: skip
        gate.reset()  # the one skip since the last transmission is forgotten too
    free = Told([0.0], 1.0, force_first=False)
    assert not free.decide(proposal(), RNG(0)).transmit


def test_reset_forgets_the_run_of_skips() -> None:
    gate = Told([0.0], 1.0, max_skips=3, force_first=False)
    for _ in range(3):
        gate.decide(proposal(), RNG(0))
    gate.reset()
    assert [gate.decide(proposal(), RNG(0)).transmit for _ in range(4)] == [False, False, False, True]


# ---- gates that look at nothing -------------------------------------------------------------------------------------


def test_never_and_always() -> None:
    never, always, rng = Never(), Always(), RNG(0)
    for t in range(50):
        assert not never.decide(proposal(t), rng).transmit
        assert always.decide(proposal(t), rng).transmit


@pytest.mark.parametrize("rate", [0.05, 0.4, 0.9])
def test_random_transmits_at_its_rate(rate: float) -> None:
    gate, rng, n = Random(rate), RNG(1), 8000
    step = proposal()
    low, high = binomial_bounds(n, rate)
    assert low <= sum(gate.decide(step, rng).transmit for _ in range(n)) <= high


class Numbers:
    """A generator that returns given numbers."""

    def __init__(self, *numbers: float) -> None:
        self._numbers = list(numbers)

    def random(self) -> float:
        return self._numbers.pop(0)


def test_chance_may_have_the_privileges_of_another_gate() -> None:
    """Of the free steps the share is the rate; the first one comes on top."""
    gate, rng = Random(0.0, force_first=True, max_skips=3), RNG(0)
    assert [gate.decide(proposal(), rng).reason for _ in range(6)] == [
        "first", "score", "score", "score", "max_skips", "score",
    ]  # fmt: skip
    assert not Random(0.0).decide(proposal(), rng).transmit


@pytest.mark.parametrize(
    ("rate", "uniform", "transmit"),
    [
        (1.0, 0.0, True),
        (1.0, 1.0 - 2.0**-53, True),
        (0.0, 2.0**-53, False),
        (0.0, 1.0 - 2.0**-53, False),
        (0.25, 0.2499, True),
        (0.25, 0.2501, False),
        pytest.param(
            0.0, 0.0, False,
        ),
    ],
)  # fmt: skip
def test_random_at_the_ends_and_near_its_rate(rate: float, uniform: float, transmit: bool) -> None:
    rng = cast(np.random.Generator, Numbers(0.5, uniform))
    assert Random(rate).decide(proposal(), rng).transmit is transmit


# ---- the draft's own doubt ------------------------------------------------------------------------------------------


def test_entropy_and_one_minus_q() -> None:
    draft = CodeDistribution(np.array([[0.5, 0.25, 0.25], [0.1, 0.9, 0.0]]), np.zeros((2, 3, CHUNK, A), np.float32))
    step = proposal(draft=draft, codes=(1, 1))
    wanted = 1.5 * math.log(2.0) - 0.1 * math.log(0.1) - 0.9 * math.log(0.9)
    assert Uncertainty(0.0, kind="entropy").score(step, RNG(0)) == pytest.approx(wanted, abs=1e-12)
    assert Uncertainty(0.0, kind="one_minus_q").score(step, RNG(0)) == pytest.approx(1.0 - 0.25 * 0.9, abs=1e-12)


def test_a_sequential_secondary_is_read_at_the_drafted_primary() -> None:
    draft = distribution(3, sequential=True)
    assert draft.conditional is not None
    step = proposal(draft=draft, codes=(2, 1))
    rows = np.stack([draft.probs[0], draft.conditional[2]])
    entropy = Uncertainty(0.0, kind="entropy").score(step, RNG(0))
    assert entropy == pytest.approx(float(stats.entropy(rows, axis=1).sum()), abs=1e-12)
    doubt = Uncertainty(0.0, kind="one_minus_q").score(step, RNG(0))
    assert doubt == pytest.approx(1.0 - rows[0, 2] * rows[1, 1], abs=1e-12)


@pytest.mark.parametrize("codes", [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("hottest", [0.5, 2.0])
def test_temperature_share_against_quadrature(codes: tuple[int, int], hottest: float) -> None:
    # Given the drafted codes, each of the M perturbations differs independently with the same probability: over the
    # temperature uniform in (0, T_max], one minus the product of the tempered softmaxes at the drafted codes.
    draft, m = distribution(4), 40_000
    temperatures = hottest * (np.arange(4000) + 0.5) / 4000
    tempered = np.stack([softmax(np.log(draft.probs), float(t)) for t in temperatures])
    probability = float(np.mean(1.0 - tempered[:, 0, codes[0]] * tempered[:, 1, codes[1]]))
    gate = Uncertainty(0.0, kind="temperature", perturbations=m, max_temperature=hottest)
    low, high = binomial_bounds(m, probability)
    assert low <= m * gate.score(proposal(draft=draft, codes=codes), RNG(0)) <= high


@pytest.mark.parametrize("books", [1, 2])
def test_temperature_share_of_a_certain_and_of_a_clueless_draft(books: int) -> None:
    offsets, m = np.zeros((books, 4, CHUNK, A), np.float32), 20_000
    certain = CodeDistribution(np.tile(np.eye(4)[1], (books, 1)), offsets)
    clueless = CodeDistribution(np.full((books, 4), 0.25), offsets)
    gate = Uncertainty(0.0, kind="temperature", perturbations=m)
    assert gate.score(proposal(draft=certain, codes=[1] * books), RNG(0)) == 0.0
    assert gate.score(proposal(draft=certain, codes=[2] * books), RNG(0)) == 1.0
    low, high = binomial_bounds(m, 1.0 - 4.0**-books)
    assert low <= m * gate.score(proposal(draft=clueless, codes=[2] * books), RNG(0)) <= high


@pytest.mark.parametrize("codes", [(0, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("hottest", [0.5, 2.0])
def test_disagreement_is_the_share_in_expectation(codes: tuple[int, int], hottest: float) -> None:
    """Against a fine quadrature; 20 evenly spaced temperatures leave an error of the order of 1 / 20."""
    draft = distribution(4)
    temperatures = hottest * (np.arange(4000) + 0.5) / 4000
    tempered = np.stack([softmax(np.log(draft.probs), float(t)) for t in temperatures])
    probability = float(np.mean(1.0 - tempered[:, 0, codes[0]] * tempered[:, 1, codes[1]]))
    step = proposal(draft=draft, codes=codes)
    gate = Uncertainty(0.0, kind="disagreement", max_temperature=hottest)
    assert gate.score(step, RNG(0)) == pytest.approx(probability, abs=0.03)
    fine = Uncertainty(0.0, kind="disagreement", max_temperature=hottest, perturbations=4000)
    assert fine.score(step, RNG(0)) == pytest.approx(probability, abs=1e-12)


def test_disagreement_tells_steps_apart_where_every_sample_differs() -> None:
    """Two unlikely codes of 16: of 20 samples the share is 1 for both, and no threshold separates them."""
    probs = np.full((2, 16), 0.02)
    probs[:, 0], probs[:, 1] = 0.71, 0.01
    draft = CodeDistribution(probs, np.zeros((2, 16, CHUNK, A), np.float32))
    steps = [proposal(draft=draft, codes=codes) for codes in ((1, 1), (2, 2))]
    shares = [Uncertainty(0.0, kind="temperature").score(step, RNG(0)) for step in steps]
    assert shares == [1.0, 1.0]
    doubts = [Uncertainty(0.0).score(step, RNG(0)) for step in steps]
    assert doubts[1] < doubts[0] < 1.0


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


def expected_change(law: np.ndarray, target: CodeDistribution, step: Proposal) -> float:
    decoder = tokenizer(*target.probs.shape)
    total = 0.0
    for final in np.ndindex(law.shape):
        chunk = decoder.decode(np.array(final), target.offsets)
        total += float(law[final]) * float(np.mean([np.linalg.norm(row) for row in chunk - step.actions]))
    return total


@pytest.mark.parametrize("books", [1, 2, 3])
def test_oracles_against_enumerated_verification(books: int) -> None:
    for seed in range(6):
        target, draft = distribution(seed, books=books), distribution(seed + 50, books=books)
        step = proposal(seed, draft=draft)
        rows = [outcomes(p, q, int(z)) for p, q, z in zip(target.probs, draft.probs, step.evidence.codes, strict=True)]
        law = rows[0]
        for row in rows[1:]:
            law = np.multiply.outer(law, row)
        change = oracle(0.0, target, on="action_change").score(step, RNG(0))
        # The oracle leaves out outcomes rarer than 1e-6, K^G of them at most; the rest is single precision.
        assert change == pytest.approx(expected_change(law, target, step), rel=1e-4)
        rejection = oracle(0.0, target).score(step, RNG(0))
        assert rejection == pytest.approx(1.0 - law[tuple(step.evidence.codes)], abs=1e-12)


def test_rejection_oracle_reads_a_sequential_secondary_at_the_drafted_primary() -> None:
    target, draft = distribution(1, sequential=True), distribution(2, sequential=True)
    assert target.conditional is not None and draft.conditional is not None
    for codes in np.ndindex(K, K):
        kept = min(1.0, target.probs[0, codes[0]] / draft.probs[0, codes[0]])
        kept *= min(1.0, target.conditional[codes] / draft.conditional[codes])
        found = oracle(0.0, target).score(proposal(draft=draft, codes=codes), RNG(0))
        assert found == pytest.approx(1.0 - kept, abs=1e-12)


def test_action_change_of_a_sequential_secondary_against_enumerated_verification() -> None:
    target, draft = distribution(1, sequential=True), distribution(2, sequential=True)
    assert target.conditional is not None and draft.conditional is not None
    for codes in np.ndindex(K, K):
        first = outcomes(target.probs[0], draft.probs[0], codes[0])
        law = first[:, None] * target.conditional  # a replaced primary: the target's own conditional there
        kept = outcomes(target.conditional[codes[0]], draft.conditional[codes[0]], codes[1])
        law[codes[0]] = first[codes[0]] * kept
        step = proposal(draft=draft, codes=codes)
        found = oracle(0.0, target, on="action_change").score(step, RNG(0))
        assert found == pytest.approx(expected_change(law, target, step), rel=1e-4)


# ---- settings and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gate",
    [
        ActionDeviation(
            0.25,
            reading="zscore",
            alpha=0.2,
            source="draft",
            path=7,
            tie_probability=0.5,
            max_skips=4,
            force_first=False,
        ),
        Uncertainty(0.5, kind="entropy", perturbations=5, max_temperature=1.5, max_skips=2),
    ],
)
def test_settings_rebuild_the_gate(gate: Gate) -> None:
    gate.decide(proposal(), RNG(0))  # what it remembers is not a setting
    written = json.loads(json.dumps(gate.settings(), allow_nan=False))
    assert written.pop("gate") == type(gate).__name__
    rebuilt = type(gate)(**written)
    assert rebuilt.settings() == gate.settings()


def test_settings_say_what_defines_the_gate() -> None:
    assert {"gate": "Random", "rate": 0.3, "max_skips": 5}.items() <= Random(0.3, max_skips=5).settings().items()
    assert {"gate": "Oracle", "on": "action_change", "threshold": 0.1}.items() <= oracle(
        0.1, distribution(0), on="action_change"
    ).settings().items()
    assert Never().settings()["threshold"] == math.inf and Always().settings()["threshold"] == -math.inf


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActionDeviation(0.0, reading=cast(Any, "euclidian")), "did you mean 'euclidean'"),
        (lambda: ActionDeviation(0.0, source=cast(Any, "drafts")), "did you mean 'draft'"),
        (lambda: ActionDeviation(0.0, reading=cast(Any, "xyz")), "Known: disparity, euclidean, jump, path_ratio"),
        (lambda: Uncertainty(0.0, kind=cast(Any, "entropi")), "did you mean 'entropy'"),
        (lambda: oracle(0.0, distribution(0), on="rejections"), "did you mean 'rejection'"),
        (lambda: ActionDeviation(math.nan), "NaN; calibrate the gate"),
        (lambda: Uncertainty(math.nan), "NaN; calibrate the gate"),
        (lambda: ActionDeviation(0.0, alpha=0.0), "alpha"),
        (lambda: ActionDeviation(0.0, alpha=1.5), "alpha"),
        (lambda: ActionDeviation(0.0, alpha=math.nan), "alpha"),
        (lambda: ActionDeviation(0.0, path=0), "path"),
        (lambda: ActionDeviation(0.0, tie_probability=1.1), "tie_probability"),
        (lambda: ActionDeviation(0.0, tie_probability=math.nan), "tie_probability"),
        (lambda: ActionDeviation(0.0, max_skips=-1), "max_skips"),
        (lambda: Random(1.2), "rate"),
        (lambda: Random(math.nan), "rate"),
        (lambda: Uncertainty(0.0, perturbations=0), "perturbations"),
        (lambda: Uncertainty(0.0, max_temperature=0.0), "max_temperature"),
    ],
)
def test_bad_settings_are_refused_with_what_is_allowed(make: Callable[[], Gate], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_temperature_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError):
        Uncertainty(0.0, max_temperature=math.nan)


def test_a_score_that_is_no_number_is_not_skipped() -> None:
    assert Told([math.nan], 0.5, force_first=False).decide(proposal(), RNG(0)).transmit


# ---- the contract, for every gate -----------------------------------------------------------------------------------

CONTRACT: dict[str, Callable[[float], Gate]] = {
    **{
        reading: lambda threshold, reading=reading: ActionDeviation(threshold, reading=reading)  # type: ignore[misc]
        for reading in ("euclidean", "path_ratio", "disparity", "zscore", "jump")
    },
    "disagreement": lambda threshold: Uncertainty(threshold, kind="disagreement"),
    "temperature": lambda threshold: Uncertainty(threshold, kind="temperature"),
    "entropy": lambda threshold: Uncertainty(threshold, kind="entropy"),
    "one_minus_q": lambda threshold: Uncertainty(threshold, kind="one_minus_q"),
    "rejection": lambda threshold: oracle(threshold, distribution(7)),
    "action_change": lambda threshold: oracle(threshold, distribution(7), on="action_change"),
    "random": lambda threshold: Random(float(np.clip(1.0 - threshold, 0.0, 1.0))),
    "always": lambda threshold: Always(),
    "never": lambda threshold: Never(),
}


def check_gate(make: Callable[[float], Gate]) -> None:
    """What every gate owes its robot."""

    def episode(gate: Gate, seed: int) -> tuple[list[Any], list[Any]]:
        gate.reset()
        decisions, states = [], []
        for t in range(25):
            step, rng = proposal(t + 100 * seed), RNG([seed, t])
            before = step.actions.copy(), step.evidence.codes.copy(), step.evidence.draft.probs.copy()
            decision = gate.decide(step, rng)
            decisions.append(decision)
            states.append(rng.bit_generator.state)
            for now, then in zip((step.actions, step.evidence.codes, step.evidence.draft.probs), before, strict=True):
                np.testing.assert_array_equal(now, then)
            gate.on_action(step.actions[0], -step.actions[0] if decision.transmit else step.actions[0])
        return decisions, states

    gate = make(0.5)
    first, drawn = episode(gate, 0)
    episode(gate, 1)
    # The same streams give the same decisions: in another gate, and in the same one after another episode.
    assert episode(make(0.5), 0)[0] == first == episode(gate, 0)[0]
    for decision in first:
        assert type(decision.transmit) is bool and math.isfinite(decision.score)
        assert decision.threshold == gate.threshold
        assert decision.reason in {"score", "tie", "first", "max_skips"}
    # What is drawn from a step's stream does not depend on the outcome, now or earlier.
    for threshold in (-math.inf, math.inf):
        assert episode(make(threshold), 0)[1] == drawn


@pytest.mark.parametrize("name", CONTRACT)
def test_every_gate_keeps_the_contract(name: str) -> None:
    check_gate(CONTRACT[name])


def test_the_contract_check_sees_a_gate_whose_drawing_depends_on_the_outcome() -> None:
    class Thrifty(Told):
        def decide(self, proposal: Proposal, rng: np.random.Generator) -> Any:
            return super().decide(proposal, rng if self.threshold < 1.0 else RNG(0))

    with pytest.raises(AssertionError):
        check_gate(lambda threshold: Thrifty([0.2, 0.7], threshold))


def test_a_gate_draws_one_number_for_ties_and_its_own() -> None:
    extra = {"temperature": 20 + 20 * G, "random": 1}
    for name, make in CONTRACT.items():
        used, counted = RNG(0), RNG(0)
        make(0.5).decide(proposal(), used)
        counted.random(1 + extra.get(name, 0))
        assert used.bit_generator.state == counted.bit_generator.state, name
