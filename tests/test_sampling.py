"""Speculative sampling over codes: its output law is enumerated, not estimated.

``verify`` is a deterministic, piecewise constant map from uniforms to codes. The checks here hand it scripted
uniforms, visit every cell of that map, weight each by its volume and by the draft's probability of the drafted codes,
and compare the law so found with the target's.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.example_count import example_count
from tests.gates.steps import scripted

from specact.families.codes.sampling import (
    CodeDistribution,
    Verdict,
    code_outcome,
    rejection_probability,
    residual,
    sample,
    sample_codes,
    softmax,
    total_variation,
    verify,
)
from specact.types import Codes, Floats, OffloadTimes, Origin, Outcome

EXACT = 1e-12
CLEARLY_WRONG = 1e-3
EDGE = 1e-14  # how close to a cell's border the map is probed
LARGEST = 1.0 - 2.0**-53  # largest number a generator returns
NO_OFFSETS = np.zeros((2, 1, 1, 1), np.float32)

Step = Callable[[Codes, np.random.Generator], Verdict]
Grid = Callable[[Codes], list[list[float]]]


def cells(points: Sequence[float]) -> list[tuple[float, float]]:
    """The intervals into which the points cut [0, 1]."""
    borders = [0.0]
    for point in sorted(points):
        if borders[-1] + 4 * EDGE < point < 1.0 - 4 * EDGE:
            borders.append(point)
    return list(itertools.pairwise([*borders, 1.0]))


def enumerate_cells(step: Step, draft_law: Floats, grid: Grid) -> list[tuple[Verdict, float]]:
    """The verdict and the probability of every drafted tuple and every cell of the map.

    Both corners of a cell are probed; that they agree shows that the grid holds all the map's breakpoints.
    """
    verdicts = []
    for drafted in np.ndindex(draft_law.shape):
        for cell in itertools.product(*map(cells, grid(np.array(drafted)))) if draft_law[drafted] else ():
            low = step(np.array(drafted), scripted([lo + EDGE if lo > 0.0 else 0.0 for lo, _ in cell]))
            high = step(np.array(drafted), scripted([hi - EDGE if hi < 1.0 else LARGEST for _, hi in cell]))
            assert low.codes.tolist() == high.codes.tolist(), f"a breakpoint inside the cell {cell}, codes {drafted}"
            assert low.accepted.tolist() == high.accepted.tolist()
            verdicts.append((low, float(draft_law[drafted]) * math.prod(hi - lo for lo, hi in cell)))
    return verdicts


def law_of(outcomes: Sequence[tuple[Verdict, float]], codes: int) -> Floats:
    """Joint law of the final codes, ``[K] * G``."""
    law = np.zeros((codes,) * len(outcomes[0][0].codes))
    for verdict, probability in outcomes:
        law[tuple(verdict.codes)] += probability
    return law


def distance(law: Floats, reference: Floats) -> float:
    return float(total_variation(law.ravel(), reference.ravel()))


def product(rows: Floats) -> Floats:
    law: Floats = rows[0]
    for row in rows[1:]:
        law = np.multiply.outer(law, row)
    return law


def ratio(p: Floats, q: Floats, code: int) -> float:
    """The acceptance breakpoint ``1 - p / q``; below it the code is rejected."""
    return float(1.0 - p[code] / q[code]) if q[code] > 0.0 else 0.0


def excess_steps(p: Floats, q: Floats) -> list[float]:
    """Breakpoints of the residual's cumulative distribution."""
    heights = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    return list(np.cumsum(heights) / sum(heights)) if sum(heights) > 0.0 else list(np.cumsum(p))


def independent_grid(p: Floats, q: Floats) -> Grid:
    """Breakpoints of ``verify``: one test per codebook, then one redraw per codebook."""
    redraws = [excess_steps(*rows) for rows in zip(p, q, strict=True)]
    return lambda codes: [[ratio(p[k], q[k], int(z))] for k, z in enumerate(codes)] + redraws


def independent(probs: Floats) -> CodeDistribution:
    return CodeDistribution(probs, NO_OFFSETS)


def verifying(p: Floats, q: Floats) -> Step:
    return lambda codes, rng: verify(independent(p), independent(q), codes, rng)


def sparse(rng: np.random.Generator, codes: int) -> Floats:
    row = rng.dirichlet(np.full(codes, 0.3))
    row[row < 0.02] = 0.0
    return np.asarray(row / row.sum())


def one_hot(code: int, codes: int) -> Floats:
    return np.asarray(np.eye(codes)[code % codes])


def rows(kind: str, codes: int, seed: int) -> tuple[Floats, Floats]:
    """Target and draft row of one codebook."""
    rng = np.random.default_rng([codes, seed])
    p, q = rng.dirichlet(np.ones(codes)), rng.dirichlet(np.ones(codes))
    return {
        "random": (p, q),
        "sparse": (sparse(rng, codes), sparse(rng, codes)),
        "equal": (p, p.copy()),
        "target one-hot": (one_hot(seed, codes), q),
        "draft one-hot": (p, one_hot(seed, codes)),
        "one-hot, disjoint": (one_hot(seed, codes), one_hot(seed + 1, codes)),
        "one-hot, equal": (one_hot(seed, codes), one_hot(seed, codes)),
    }[kind]


KINDS = ("random", "sparse", "equal", "target one-hot", "draft one-hot", "one-hot, disjoint", "one-hot, equal")


def pairs(kinds: Sequence[str], codes: int, seed: int) -> tuple[Floats, Floats]:
    """Target and draft ``[G, K]`` with one kind per codebook."""
    books = [rows(kind, codes, seed + book) for book, kind in enumerate(kinds)]
    return np.stack([p for p, _ in books]), np.stack([q for _, q in books])


# ---- the output law -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kinds", [*itertools.combinations(KINDS, 1), *itertools.combinations_with_replacement(KINDS[:6], 2)]
)
def test_final_codes_follow_the_target_and_one_minus_total_variation_are_accepted(kinds: tuple[str, ...]) -> None:
    for codes in range(2, 17 if len(kinds) == 1 else 4):
        p, q = pairs(kinds, codes, seed=3)
        outcomes = enumerate_cells(verifying(p, q), product(q), independent_grid(p, q))
        assert distance(law_of(outcomes, codes), product(p)) <= EXACT
        for book, (wanted, drafted) in enumerate(zip(p, q, strict=True)):
            accepted = sum(probability for verdict, probability in outcomes if verdict.accepted[book])
            overlap = np.minimum(wanted, drafted).sum()
            assert accepted == pytest.approx(1.0 - total_variation(wanted, drafted), abs=EXACT)
            assert accepted == pytest.approx(overlap, abs=EXACT)
            rejection = rejection_probability(
                np.tile(wanted, (codes, 1)), np.tile(drafted, (codes, 1)), np.arange(codes)
            )
            assert drafted @ rejection == pytest.approx(1.0 - overlap, abs=EXACT)


# ---- a sequential secondary head ------------------------------------------------------------------------------------


def sequential(codes: int, seed: int, kind: str) -> CodeDistribution:
    rng = np.random.default_rng([codes, seed])
    draw: Callable[[], Floats] = {
        "random": lambda: rng.dirichlet(np.ones(codes)),
        "sparse": lambda: sparse(rng, codes),
    }[kind]
    primary, conditional = draw(), np.stack([draw() for _ in range(codes)])
    return CodeDistribution(np.stack([primary, primary @ conditional]), NO_OFFSETS, conditional)


def joint(distribution: CodeDistribution) -> Floats:
    assert distribution.conditional is not None
    return np.asarray(distribution.probs[0][:, None] * distribution.conditional)


def sequential_grid(target: CodeDistribution, draft: CodeDistribution) -> Grid:
    p, q = target.conditional, draft.conditional
    assert p is not None and q is not None
    # After a replaced primary the secondary may be drawn from any row of the target's conditional.
    anywhere = [point for row in p for point in np.cumsum(row)]

    def grid(codes: Codes) -> list[list[float]]:
        first, second = int(codes[0]), int(codes[1])
        tests = [[ratio(target.probs[0], draft.probs[0], first)], [ratio(p[first], q[first], second)]]
        elsewhere = [point for z in range(len(p)) for point in excess_steps(p[z], q[z])]
        return [*tests, excess_steps(target.probs[0], draft.probs[0]), anywhere + elsewhere]

    return grid


@pytest.mark.parametrize("kind", ["random", "sparse"])
@pytest.mark.parametrize("codes", [2, 3])
def test_sequential_secondary_gives_the_targets_joint_law(codes: int, kind: str) -> None:
    target, draft = sequential(codes, 1, kind), sequential(codes, 2, kind)
    grid = sequential_grid(target, draft)
    outcomes = enumerate_cells(lambda z, rng: verify(target, draft, z, rng), joint(draft), grid)
    assert distance(law_of(outcomes, codes), joint(target)) <= EXACT
    assert not any(verdict.accepted[1] for verdict, _ in outcomes if not verdict.accepted[0])
    # The share of steps with nothing replaced is what R(z) promises.
    kept = sum(probability for verdict, probability in outcomes if verdict.accepted.all())
    promised = sum(probability * outcome_of(verdict).kept for verdict, probability in outcomes)
    assert kept == pytest.approx(promised, abs=EXACT)


def test_mistake_secondary_read_at_the_drafts_primary_is_caught() -> None:
    target, draft = sequential(3, 1, "random"), sequential(3, 2, "random")
    assert target.conditional is not None and draft.conditional is not None
    p, q = target.conditional, draft.conditional

    def step(codes: Codes, rng: np.random.Generator) -> Verdict:
        at = int(codes[0])
        return verifying(np.stack([target.probs[0], p[at]]), np.stack([draft.probs[0], q[at]]))(codes, rng)

    outcomes = enumerate_cells(step, joint(draft), sequential_grid(target, draft))
    assert distance(law_of(outcomes, 3), joint(target)) > CLEARLY_WRONG


def test_common_mistakes_are_caught() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 1, 6))
    p, q, q_cool = softmax(logits[0]), softmax(logits[1]), softmax(logits[1], 0.7)

    def resampling_from_the_target(codes: Codes, rng: np.random.Generator) -> Verdict:
        test, redraw = rng.random((2, 1))
        rejection = rejection_probability(p, q, codes)
        return Verdict(np.where(test >= rejection, codes, sample(p, redraw)), test >= rejection, rejection)

    def whole(codes: Codes) -> list[list[float]]:
        return [[ratio(p[0], q[0], int(codes[0]))], list(np.cumsum(p[0]))]

    mistakes: list[tuple[Step, Floats, Grid]] = [
        (resampling_from_the_target, q[0], whole),
        (verifying(p, q), one_hot(int(q[0].argmax()), 6), independent_grid(p, q)),  # a greedy draft
        (verifying(p, q_cool), q[0], independent_grid(p, q_cool)),  # drawn at temperature 1, verified as if at 0.7
    ]
    for step, drafted, grid in mistakes:
        assert distance(law_of(enumerate_cells(step, drafted, grid), 6), p[0]) > CLEARLY_WRONG


# ---- identities -----------------------------------------------------------------------------------------------------


def test_rejection_by_hand() -> None:
    p, q = np.array([[0.1, 0.6, 0.3, 0.0, 0.0]]), np.array([[0.4, 0.3, 0.3, 0.0, 0.0]])
    rejections = [float(rejection_probability(p, q, np.array([z]))[0]) for z in range(5)]
    # A code that neither can draw counts as rejected; one that only the target can draw, as accepted.
    assert rejections == pytest.approx([0.75, 0.0, 0.0, 1.0, 1.0])
    assert rejection_probability(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]), np.array([0]))[0] == 0.0
    assert rejection_probability(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]]), np.array([1]))[0] == 1.0


def outcome_of(verdict: Verdict) -> Outcome:
    return code_outcome(verdict, np.zeros((3, 1), np.float32), OffloadTimes())


def test_a_rejection_that_is_a_rounding_error_draws_from_the_target() -> None:
    offsets = np.zeros((1, 2, 1, 1), np.float32)
    target = CodeDistribution(np.array([[0.5, 0.5]]), offsets)
    draft = CodeDistribution(np.array([[np.nextafter(0.5, 1.0), 0.5]]), offsets)
    zeros: Any = SimpleNamespace(random=np.zeros)
    verdict = verify(target, draft, np.array([0]), zeros)
    assert verdict.codes.tolist() == [0] and not verdict.accepted[0]


def test_an_outcome_is_accepted_if_every_code_is() -> None:
    for accepted in itertools.product([False, True], repeat=2):
        outcome = outcome_of(Verdict(np.zeros(2, int), np.array(accepted), np.array([0.25, 0.5])))
        assert outcome.kept == pytest.approx(0.75 * 0.5) and (outcome.verified, outcome.accepted) == (2, sum(accepted))
        assert outcome.origins.tolist() == [Origin.ACCEPTED if all(accepted) else Origin.REPLACED] * 3


def gated_loss(p: Floats, q: Floats, skipped: set[tuple[int, ...]]) -> tuple[float, float]:
    """Where the drafted codes are executed if a gate skips: the total variation between executed and target law; and
    the probability of skipping what would have been rejected."""

    def step(codes: Codes, rng: np.random.Generator) -> Verdict:
        if tuple(codes.tolist()) in skipped:
            return Verdict(codes, np.ones(len(codes), dtype=np.bool_), rejection_probability(p, q, codes))
        return verifying(p, q)(codes, rng)

    missed = 0.0
    for codes in skipped:
        r = rejection_probability(p, q, np.array(codes))
        missed += float(product(q)[codes]) * float(1.0 - np.prod(1.0 - r))
    outcomes = enumerate_cells(step, product(q), independent_grid(p, q))
    return distance(law_of(outcomes, p.shape[1]), product(p)), missed


@example_count(60)
@given(st.integers(0, 10**6), st.lists(st.sampled_from(KINDS), min_size=1, max_size=2), st.integers(0, 511))
def test_gated_loss_is_at_most_the_missed_rejections_and_of_one_codebook_exactly(
    seed: int, kinds: list[str], mask: int
) -> None:
    codes = 3 if len(kinds) == 2 else 2 + seed % 7
    p, q = pairs(kinds, codes, seed)
    drafted = enumerate(np.ndindex((codes,) * len(kinds)))
    lost, missed = gated_loss(p, q, {row for place, row in drafted if mask >> place & 1})
    assert lost <= missed + EXACT and (len(kinds) == 2 or lost == pytest.approx(missed, abs=EXACT))
    # Always skipping two half-wrong codebooks misses 3/4, but the laws are only 1/2 apart.
    halves = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert gated_loss(halves, halves[::-1], set(np.ndindex(2, 2))) == pytest.approx((0.5, 0.75), abs=EXACT)


# ---- drawing --------------------------------------------------------------------------------------------------------


def drawn_code(row: NDArray[Any], uniform: float) -> int:
    return int(sample_codes(independent(row[None]), scripted([uniform]))[0])


@example_count(200)
@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-25, 1e-9, 0.1, 1.0 / 3.0, 1.0]), min_size=1, max_size=40).filter(any),
    st.sampled_from([1e-30, 0.3, 1.0, 1e30]),
    st.one_of(st.sampled_from([0.0, 5e-324, 0.5, 1.0 - 2.0**-52, LARGEST]), st.floats(0.0, 1.0, exclude_max=True)),
    st.integers(0, 39),
)
def test_never_draws_an_impossible_code_and_one_as_a_row_of_a_batch(
    weights: list[float], scale: float, uniform: float, edge: int
) -> None:
    for dtype in (np.float64, np.float32):
        row: NDArray[Any] = (np.array(weights) * scale).astype(dtype)
        if not row.any():
            continue
        on_an_edge = min(float(np.cumsum(row)[edge % len(row)] / row.sum()), LARGEST)
        for value in (uniform, on_an_edge):
            code = int(sample(row, np.array(value)))
            assert 0 <= code < len(row) and row[code] > 0.0
            assert dtype is np.float32 or drawn_code(row, value) == code


def test_a_distribution_that_is_not_finite_gives_the_first_code() -> None:
    for row in (np.full(4, np.nan), np.array([0.5, np.nan, 0.5])):
        assert drawn_code(row, 0.4) == sample(row, 0.4) == 0


@pytest.mark.parametrize("codes", [2, 7, 16])
def test_draws_have_exactly_the_rows_probabilities_also_in_batches(codes: int) -> None:
    rows = np.stack([sparse(np.random.default_rng([codes, row]), codes) for row in range(3)])
    scaled = rows * np.array([[1.0], [1e-3], [42.0]])
    for row, weights in zip(rows, scaled, strict=True):
        law = np.zeros(codes)
        for lo, hi in cells(np.cumsum(row).tolist()):
            drawn = sample(weights, np.array([lo + EDGE if lo else 0.0, hi - EDGE if hi < 1 else LARGEST]))
            assert drawn[0] == drawn[1]
            law[drawn[0]] += hi - lo
        assert distance(law, row) <= EXACT
    uniforms = np.random.default_rng(0).random((20, 3))
    wanted = [[sample(row, value) for row, value in zip(scaled, values, strict=True)] for values in uniforms]
    np.testing.assert_array_equal(sample(np.broadcast_to(scaled, (20, *scaled.shape)), uniforms), wanted)


def test_codes_of_a_distribution_follow_its_joint_law() -> None:
    for distribution in (sequential(3, 5, "random"), independent(pairs(("random", "sparse"), 3, 0)[0])):
        secondary = [distribution.probs[1]] if distribution.conditional is None else list(distribution.conditional)
        grids = [np.cumsum(distribution.probs[0]).tolist(), [x for row in secondary for x in np.cumsum(row)]]
        law = np.zeros((3, 3))
        for cell in itertools.product(*map(cells, grids)):
            codes = sample_codes(distribution, scripted([(lo + hi) / 2 for lo, hi in cell]))
            law[tuple(codes)] += math.prod(hi - lo for lo, hi in cell)
        wanted = product(distribution.probs) if distribution.conditional is None else joint(distribution)
        assert distance(law, wanted) <= EXACT


def test_verification_always_draws_two_numbers_per_codebook() -> None:
    cases = [tuple(map(independent, pairs([kind] * books, 3, 0))) for books in (1, 2, 4) for kind in KINDS]
    cases += [(sequential(3, 1, "random"), sequential(3, 2, "random"))]
    seen = set()
    for (target, draft), seed in itertools.product(cases, range(30)):
        used, counted = np.random.default_rng(seed), np.random.default_rng(seed)
        codes = np.resize([seed % 3, seed // 3 % 3], len(draft.probs))
        verdict = verify(target, draft, codes, used)
        counted.random(2 * len(codes))
        assert used.bit_generator.state == counted.bit_generator.state
        seen.add((target.conditional is None, *verdict.accepted.tolist()))
    assert seen >= {(False, True, True), (False, False, False), (False, True, False)}


# ---- the parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_residual_is_a_distribution_on_what_the_draft_lacks(kind: str) -> None:
    p, q = pairs([kind, kind], 9, seed=6)
    left = residual(p, q)
    np.testing.assert_allclose(left.sum(axis=-1), 1.0, atol=EXACT)
    assert (left >= 0.0).all()
    if "equal" in kind:
        np.testing.assert_array_equal(left, p)
    else:
        assert (left[p <= q] == 0.0).all()
        mass = np.maximum(p - q, 0.0).sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(left * mass, np.maximum(p - q, 0.0), atol=EXACT)


def test_total_variation_by_hand() -> None:
    assert total_variation(np.array([0.5, 0.5, 0.0]), np.array([0.2, 0.5, 0.3])) == pytest.approx(0.3)
    assert total_variation(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 1.0


def test_softmax_divides_by_the_temperature_in_double_precision() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 5))
    for temperature in (0.25, 1.0, 3.0):
        probs = softmax(logits, temperature)
        np.testing.assert_allclose(probs.sum(axis=-1), 1.0, atol=EXACT)
        wanted = (logits[:, 1:] - logits[:, :1]) / temperature
        np.testing.assert_allclose(np.log(probs[:, 1:] / probs[:, :1]), wanted, atol=1e-10)
    np.testing.assert_allclose(softmax(np.array([1e5, 0.0, -1e5])), [1.0, 0.0, 0.0], atol=0)
    np.testing.assert_allclose(softmax(np.array([1e5, 1e5 + 1.0])), softmax(np.array([0.0, 1.0])), atol=1e-10)
    small = softmax(np.zeros((2, 3), dtype=np.float32))
    assert small.dtype == np.float64 and np.abs(small.sum(axis=-1) - 1.0).max() <= 1e-15


def test_what_does_not_fit_together_is_refused_by_name() -> None:
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = [
        ((2, 4), (2, 5), (2,)), ((2, 4), (2, 4), (3,)), ((2, 4), (2, 4), (1,)), ((4,), (4,), (1,)),
        ((2, 4), (1, 4), (2,)), ((2, 4), (2, 4), (2, 1)),
    ]  # fmt: skip
    for target, draft, codes in shapes:
        with pytest.raises(ValueError, match=r"\[G, K\]") as caught:
            verifying(np.ones(target), np.ones(draft))(np.zeros(codes, dtype=np.int64), np.random.default_rng(0))
        assert all(str(shape) in str(caught.value) for shape in (target, draft, codes))
    with_head, without = sequential(3, 0, "random"), independent(sequential(3, 0, "random").probs)
    for pair in ((with_head, without), (without, with_head)):
        with pytest.raises(ValueError, match="sequential secondary"):
            verify(*pair, np.array([0, 0]), np.random.default_rng(0))
    for distribution, outside in itertools.product((with_head, without), ([-1, 0], [0, -1], [3, 0], [0, 3])):
        with pytest.raises(ValueError, match=r"codes must lie in \[0, 3\), got \[") as caught:
            verify(distribution, distribution, np.array(outside), np.random.default_rng(0))
        assert str(outside) in str(caught.value)
