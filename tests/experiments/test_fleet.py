"""Fleets: the queue in virtual time, what a server grants, and robots that share them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from experiments.fleet.robots import DISCIPLINES, control_step, fair_share, granted_together, recruit, service, summary
from experiments.fleet.server import Server
from experiments.fleet.tables import success_of

from specact.lab.rollout.families import rollout_of
from specact.lab.rollout.methods import HYBRID
from specact.load import load_pair
from specact.server.capacity import ServiceTime
from specact.server.queue import Lane

TARGET = ServiceTime(0.03, 0.01)


def server(grants: bool, most: int = 2) -> Server:
    return Server(TARGET, most, upload_s=0.001, way_s=0.005, grants=grants)


def test_an_idle_server_answers_after_both_ways_the_upload_and_the_target() -> None:
    request = (shared := server(grants=False)).send(Lane(), 1.0, 1.25, 0.0)
    shared.advance(2.0)
    assert request.replied == pytest.approx(1.0 + 0.001 + 0.005 + 0.04 + 0.005)


def test_requests_share_uplink_and_batches_and_the_expired_are_not_served() -> None:
    shared = server(grants=False)
    sent = [shared.send(Lane(), 0.0, 0.1, 0.0) for _ in range(6)]
    shared.advance(1.0)
    assert [round(request.started, 3) for request in sent] == [0.006, 0.046, 0.046, 0.096, 0.096, math.inf]
    assert sent[-1].due < 0.146


def test_what_the_uplink_cannot_send_in_time_is_withdrawn_and_holds_up_nobody() -> None:
    shared = Server(TARGET, 2, upload_s=1.0, way_s=0.0, grants=False)
    first, second = (shared.send(Lane(), 0.0, 1.5, 0.0) for _ in range(2))
    later = shared.send(Lane(), 1.0, 3.0, 0.0)
    shared.advance(5.0)
    assert (first.started, second.started, second.due, later.started) == (1.0, math.inf, 0.0, 2.0)


def test_the_best_scores_are_granted_if_their_replies_are_in_time() -> None:
    shared = server(grants=True)
    shared.send(Lane(), 0.0, 1.0, 0.0)  # the target is busy with it
    offers = [
        shared.send(Lane(), 0.001, due, score) for score, due in ((1.0, 0.5), (3.0, 0.5), (2.0, 0.5), (9.0, 0.06))
    ]
    shared.advance(0.05)
    assert [math.isfinite(offer.started) for offer in offers] == [False, True, True, False]
    assert all(offer.replied < offer.due for offer in offers[1:3])


def test_a_fair_share_keeps_the_server_below_its_most() -> None:
    most_hz = service().most_hz(8)
    assert fair_share("ball", 1) == 1.0 and fair_share("ball", 128) * 128 * 4.0 == pytest.approx(0.7 * most_hz)
    batch = granted_together()
    assert (batch - 1) / service().seconds(batch - 1) < 0.7 * most_hz <= batch / service().seconds(batch)


@pytest.mark.parametrize("discipline", ["always", "late random", "central adahi"])
def test_robots_of_a_fleet_ask_their_server(discipline: str) -> None:
    family, how = rollout_of(load_pair("ball"), HYBRID), DISCIPLINES[discipline]
    shared = server(grants=how.asks == "granted")
    robot = recruit(family, how, shared, 1, 3, 1)
    for _ in range(12):
        control_step([robot], family)
        robot.policy.clock.sleep(1.0 / family.pair.rate_hz)
    assert shared.sent and all(request.replied <= request.due for request in shared.sent[:-1])
    figures = summary(np.ones((1, 1)), shared.sent[:1], 1)
    assert figures["served"] == figures["in_time"] == 1.0 and figures["queue_p99_ms"] == pytest.approx(0.0, abs=20.0)
    # Of twelve periods one that waits acts in fewer.
    assert robot.policy.counts["steps"] == (2 if discipline == "always" else 3)


def test_the_worst_tenth_is_of_robots() -> None:
    won = np.ones((20, 4))
    won[3] = 0.0
    shares = success_of(won)
    assert (shares["success"]["mean"], shares["worst"]["mean"]) == (0.95, 0.5)
