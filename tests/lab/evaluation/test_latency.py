"""What the latency measurement computes from its records."""

from __future__ import annotations

import time
from itertools import islice

import numpy as np
import pytest

from specact import Bundle, load_bundle
from specact.lab.evaluation.latency import (
    SlowDraft,
    _blocks,
    _step,
    calibrated_on,
    measure_deadline,
    observations,
)
from specact.lab.evaluation.latency import _summary as summary
from specact.policy import SpeculativePolicy
from specact.rng import StepAddress
from specact.types import Decision, OffloadTimes, StageTimes, StepRecord


@pytest.fixture(scope="module")
def ball() -> Bundle:
    return load_bundle("ball")


def record(transmit: bool, draft: float, offload: OffloadTimes) -> StepRecord:
    decision = Decision(transmit, 1.0, 0.5, "score")
    nothing = np.zeros(0)
    return StepRecord(
        StepAddress(0, 0, 0, 0), None, decision, None, nothing, nothing,  # type: ignore[arg-type]
        StageTimes(draft, 0.0, offload, 0.0),
    )  # fmt: skip


COSTS = {"draft_ms": 2.0, "target_ms": 10.0, "link_ms": 12.0}
ASKED = OffloadTimes(encode=0.001, network=0.012, target=0.010)


def test_the_bound_is_draft_plus_sent_times_link_and_target() -> None:
    records = [record(i % 2 == 0, 0.002, ASKED if i % 2 == 0 else OffloadTimes()) for i in range(100)]
    found = summary("adahi", records, COSTS)
    assert found["transmission_rate"] == 0.5
    assert found["bound_ms"] == pytest.approx(2.0 + 0.5 * 22.0)
    assert found["mean_ms"]["mean"] == pytest.approx(2.0 + 0.5 * 23.0, rel=0.05)
    assert found["over_bound"] == pytest.approx(0.5 / 13.0, abs=0.05)
    assert found["stages_ms"]["network"] == pytest.approx(6.0)


def test_the_ungated_target_is_not_charged_with_a_draft_it_does_not_need() -> None:
    records = [record(True, 0.002, ASKED) for _ in range(50)]
    alone = summary("target", records, COSTS)
    assert alone["mean_ms"]["mean"] == pytest.approx(23.0)
    assert alone["bound_ms"] == pytest.approx(22.0)


def test_blocks_are_means_over_consecutive_steps() -> None:
    blocks = _blocks(np.arange(60.0))
    assert blocks.tolist() == [12.0, 37.0]
    assert _blocks(np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]


def test_the_gate_iscalibrated_on_on_the_steps_that_are_timed(ball: Bundle) -> None:
    seen = list(islice(observations(ball, 0), 120))
    settings = calibrated_on(ball, seen, 0.4, 0)
    policy = SpeculativePolicy(ball, settings.build(ball), seed=0)
    sent = [_step(policy, episode, observation).decision.transmit for episode, observation in seen]
    # Thresholds shift the executed actions, so the rate is met up to that feedback.
    assert 0.3 < np.mean(sent) < 0.5


def test_a_slow_draft_answers_as_before_but_later(ball: Bundle) -> None:
    window = ball.observation.zeros()
    began = time.monotonic()
    answer = SlowDraft(ball.draft, 0.02).infer(window)
    assert time.monotonic() - began >= 0.02
    np.testing.assert_array_equal(answer.probs, ball.draft.infer(window).probs)


def test_camera_windows_meet_a_deadline_over_a_link_raw_and_as_jpeg() -> None:
    pair = load_bundle("pusht-camera")

    def missed(deadline_ms: float) -> list[tuple[str, float | None, int]]:
        told: list[tuple[int, int]] = []
        found = measure_deadline(
            pair, "wifi-paper", 3, deadline_ms, 20.0, 90, 0, lambda done, total: told.append((done, total))
        )
        assert told[-1] == (3, 3)
        return [(way["frames"], way["rate_hz"], sum(way["missed"].values())) for way in found["ways"]]

    ways = [("raw", None), ("jpeg", None), ("raw", 20.0), ("jpeg", 20.0)]
    assert missed(20_000.0) == [(*way, 0) for way in ways]
    assert missed(0.001) == [(*way, 3) for way in ways]
