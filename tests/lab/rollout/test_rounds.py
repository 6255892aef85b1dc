"""FLASH in a world that does not wait: what each kind of round takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specact.bundle.bundle import find_bundle
from specact.errors import ConfigError
from specact.families.chunks.flow import load_flow
from specact.gates.settings import GateSettings
from specact.lab.envs import load_task
from specact.lab.envs.robot import MovingWorld
from specact.lab.rollout.episode import Episode, Pairing, run_pair
from specact.lab.tised.drivers import RoundsDriver
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.tised.sweep import measure_settings
from specact.lab.train.variants import BundleVariants
from specact.observation import ObservationSpec
from specact.pair import Pair, PairSource
from specact.systems.flow import ROUNDS, load_flow_pair

BUNDLE = "ball-chase-flow"
FULL_S, CHECK_S, FAILED_S = 0.16, 0.04, 0.2


def world(sees: ObservationSpec) -> MovingWorld:
    return MovingWorld(load_task("ball-chase", sees), pace=0.0)


def ran(pair: Pair[Any], *round_s: float, start: int = 3) -> Episode:
    takes = RoundsDriver(PairSource(BUNDLE), rounds=ROUNDS["flash"]).duration_s(round_s)
    pairing = Pairing(GateSettings("always"), round_s=takes)
    return run_pair(world(pair.observation), pair, pairing, start=start, seed=0, episode=1)[0]


@pytest.fixture(scope="module")
def pair() -> Pair[Any]:
    return load_flow_pair(load_flow(BUNDLE))


def test_a_round_takes_the_time_of_its_kind(pair: Pair[Any]) -> None:
    accepting = pair.composed(rounds=replace(ROUNDS["flash"], within=1e9))
    # One full round and four that are checked, again and again.
    episode = ran(accepting.composed(settings=replace(pair.parts.settings, period=4)), FULL_S, CHECK_S, FAILED_S)
    full = -(-episode.chunks // 5)
    spent = full * FULL_S + (episode.chunks - full) * CHECK_S
    assert episode.inference_s * episode.chunks == pytest.approx(spent, abs=FULL_S)
    refusing = ran(pair.composed(rounds=replace(ROUNDS["flash"], within=0.0)), FULL_S, CHECK_S, FAILED_S)
    assert refusing.inference_s == pytest.approx(FAILED_S, rel=0.1)
    assert episode.stall_s < refusing.stall_s


def subject(path: Path) -> Subject:
    flow = load_flow(path)
    return Subject(flow, 8, BundleVariants(flow, Path("nowhere")))


def test_the_lever_accepts_more_the_stronger_it_is(tiny_flow: Path) -> None:
    settings = settings_of("flash", subject(find_bundle(BUNDLE)))
    assert settings[0].strength == 0.0
    none, weakest = (setting.driver for setting in settings[:2])
    assert isinstance(none, RoundsDriver) and isinstance(weakest, RoundsDriver)
    assert none.load().parts.rounds == ROUNDS["full"] and weakest.load().parts.rounds.within == settings[1].strength
    times = measure_settings(settings[:2])
    assert [len(of_kinds) for of_kinds in times.values()] == [1, 3]
    with pytest.raises(ConfigError, match="a distance"):
        settings_of("flash", subject(find_bundle(BUNDLE)), (-0.1,))
    with pytest.raises(ConfigError, match="no block"):
        settings_of("flash", subject(tiny_flow))
