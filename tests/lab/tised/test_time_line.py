"""The time line, event by event, against the closed forms: exactly, in fractions."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.tised.time_line import simulate

from specact.errors import ConfigError
from specact.lab.tised.timing import age_s, chunk_s, exact_task_s, stall_s, task_s

fractions = st.fractions(min_value=Fraction(1, 97), max_value=10, max_denominator=97)


@given(chunks=st.integers(1, 12), n=st.integers(1, 12), inference=fractions, action=fractions, data=st.data())
def test_the_total_is_the_closed_form(
    chunks: int, n: int, inference: Fraction, action: Fraction, data: st.DataObject
) -> None:
    """N T_chunk + min(T_inf, m T_act), without a rounding."""
    m = data.draw(st.integers(0, n))
    line = simulate(chunks, n, inference, action, m)
    each = n * action + max(Fraction(0), inference - m * action)
    assert line.total_s == chunks * each + min(inference, m * action)
    assert line.stalls_s == (inference,) + (max(Fraction(0), inference - m * action),) * (chunks - 1)
    assert line.ages_s == (inference,) + (max(inference, m * action),) * (chunks - 1)


@given(
    chunks=st.integers(1, 12),
    n=st.integers(1, 12),
    inference=st.integers(0, 640).map(lambda k: k / 64),
    action=st.integers(1, 64).map(lambda k: k / 64),
    data=st.data(),
)
def test_the_timing_model_says_the_same(
    chunks: int, n: int, inference: float, action: float, data: st.DataObject
) -> None:
    """Multiples of 1/64 are exact in floats too."""
    m = data.draw(st.integers(0, n))
    line = simulate(chunks, n, inference, action, m)
    assert line.total_s == exact_task_s(chunks, inference, action, n, overlap=m)
    assert set(line.stalls_s[1:]) <= {float(stall_s(inference, action, overlap=m))}
    assert set(line.ages_s[1:]) <= {float(age_s(inference, action, overlap=m))}


def test_without_the_first_inference_the_total_is_wrong() -> None:
    """(4) as printed forgets what cannot be hidden; with overlap it is short by min(T_inf, m T_act)."""
    line = simulate(5, 8, 0.5, 0.125, 3)
    assert line.total_s != task_s(5, chunk_s(0.5, 0.125, 8, overlap=3))
    assert simulate(5, 8, 0.5, 0.125, 0).total_s == task_s(5, chunk_s(0.5, 0.125, 8))


def test_the_events_of_two_chunks() -> None:
    """n = 3, T_act = 1, T_inf = 1.5, m = 1: seen at 3.5 when one action is left, ready at 5, half a second late."""
    line = simulate(2, 3, 1.5, 1.0, 1)
    assert [(event.at_s, event.kind, event.chunk) for event in line.events] == [
        (0.0, "observe", 0), (1.5, "ready", 0), (1.5, "act", 0), (3.5, "observe", 1), (4.5, "done", 0),
        (5.0, "ready", 1), (5.0, "act", 1), (8.0, "done", 1),
    ]  # fmt: skip
    assert line.stalls_s == (1.5, 0.5) and line.ages_s == (1.5, 1.5) and line.total_s == 8.0


def test_the_age_is_not_the_stall() -> None:
    """With the inference hidden whole nothing is waited for, and the observation is older than without overlap."""
    hidden, plain = simulate(3, 8, 0.5, 0.125, 8), simulate(3, 8, 0.5, 0.125, 0)
    assert hidden.stalls_s[1:] == (0.0, 0.0) and hidden.ages_s[1:] == (1.0, 1.0)
    assert plain.stalls_s == plain.ages_s == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("chunks", "n", "inference", "action", "overlap"),
    [(0, 1, 1.0, 1.0, 0), (1, 0, 1.0, 1.0, 0), (1, 1, -1.0, 1.0, 0), (1, 1, 1.0, 0.0, 0), (1, 1, 1.0, 1.0, 2)],
)
def test_what_cannot_be_played_is_refused(chunks: int, n: int, inference: float, action: float, overlap: int) -> None:
    with pytest.raises(ConfigError, match="cannot play"):
        simulate(chunks, n, inference, action, overlap)
