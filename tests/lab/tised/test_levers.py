"""Levers: what each makes of a bundle, what it costs, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specact.errors import ConfigError
from specact.execution.schedule import Execution
from specact.families.chunks.flow import load_flow
from specact.lab.data.folder import JsonLines
from specact.lab.rollout.pool import Pool
from specact.lab.tised.drivers import PairDriver, PolicyDriver, RoundsDriver, Setting, SplitDriver, Trial
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.tised.sweep import EPISODES, Sweep, measure_settings, run_sweep, run_trial, sweep_folder
from specact.lab.train.variants import BundleVariants
from specact.links.link import load_link
from specact.links.model import round_trip
from specact.load import load_pair
from specact.systems.flash import Round
from specact.systems.flow import ROUNDS
from specact.systems.freqcache import ReusingRounds

BALL = load_pair("ball")
TARGET_MS, DELAY = 8.0, "loopback+delay=30"


def subject(loaded: Any, folder: Path = Path("nowhere")) -> Subject:
    """Nothing is written into a folder before variants are made."""
    return Subject(loaded, getattr(loaded, "execute", 4), BundleVariants(loaded, folder))


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setting, ...]:
    ball = subject(BALL, tmp_path_factory.mktemp("variants"))
    settings = settings_of("split", ball)
    ball.variants.make()
    return tuple(settings)


def test_an_inference_takes_what_both_sides_and_the_link_take(cuts: tuple[Setting, ...], tmp_path: Path) -> None:
    what = Sweep(
        BALL.fingerprint, cuts, "ball", (0.0,), ("agx-50w",), (DELAY,), episodes=1, seed=3, target_ms=TARGET_MS
    )
    with Pool(1) as pool:
        run_sweep(what, tmp_path, lambda *_: None, pool)
    manifest = sweep_folder(tmp_path).manifest()
    measured = manifest["latency_ms"]
    rows = {row["strength"]: row for row in JsonLines(tmp_path / EPISODES).read()}
    alone = PolicyDriver(str(BALL.path), Execution("synchronous", BALL.execute), "target").build()
    zeros = alone.spec.observation.zeros()
    assert [setting.strength for setting in cuts] == list(range(len(cuts))) and len(cuts) > 3
    assert not any("stages" in setting["driver"] for setting in manifest["sweep"]["settings"])
    for setting in cuts:
        driver, (device, server) = setting.driver, measured[setting.label]
        assert isinstance(driver, SplitDriver)
        wanted = 1e-3 * (9.7 * device + TARGET_MS * server / (device + server))
        if driver.crossing is not None:
            wanted += round_trip(load_link(DELAY), *driver.crossing, 0.0, np.random.default_rng(0))
        assert rows[setting.strength]["inference_s"] == pytest.approx(wanted, rel=0.02)
        # Wherever the target is cut it acts the same, but for rounding on the link.
        exact = replace(driver, precision="float32").build().infer(zeros, np.random.default_rng(0))
        np.testing.assert_array_equal(exact, alone.infer(zeros, np.random.default_rng(0)))
    # All of it on one side leaves nothing to the other.
    assert measured[cuts[0].label][1] < 0.05 * measured[cuts[0].label][0]
    assert measured[cuts[-1].label][0] < 0.05 * measured[cuts[-1].label][1]


def test_a_round_takes_time_for_the_tokens_that_it_computes() -> None:
    settings = settings_of("reuse", subject(load_flow("metaworld-flow")), (0.5,))
    none, half = (setting.driver for setting in settings)
    assert isinstance(none, RoundsDriver) and isinstance(half, RoundsDriver)
    assert none.rounds == ROUNDS["full"] and none.kinds == ("full",)
    assert isinstance(half.rounds, ReusingRounds) and (half.rounds.reuse.least, half.rounds.reuse.most) == (0.5, 0.5)
    assert [len(parts) for parts in measure_settings(settings).values()] == [1, 2]
    takes, empty = half.duration_s((0.010, 0.006)), np.zeros((0, 0), np.float32)
    masks = [{"image": np.arange(4) < count} for count in range(3)]
    durations = [takes(Round(np.zeros((8, 4), np.float32), 0, False, False, empty, mask)) for mask in masks]
    assert durations == pytest.approx([0.010, 0.008, 0.006])


def test_a_gate_is_a_lever_on_a_pair_of_any_family() -> None:
    pair = load_pair("pusht-flow", decoding="flash")
    settings = settings_of("verification", subject(pair), (1.0, 0.0)) + settings_of("late", subject(pair), (1.0,))
    hybrid, draft, late = (
        run_trial(
            Trial(
                setting, "pusht", 0.0, "hold", "this-machine", 1.0, DELAY, (0.004, 0.02), episode=0, seed=1,
                fingerprint=pair.fingerprint,
            )
        )
        for setting in settings
    )  # fmt: skip
    # Of a round on the server the device waits for draft, link and target, of one on the device for the draft.
    assert hybrid["inference_s"] == pytest.approx(0.054, abs=0.001) and hybrid["sent"] == 1.0
    assert draft["inference_s"] == pytest.approx(0.004) and draft["sent"] == 0.0
    assert late["inference_s"] == pytest.approx(0.004) and late["sent"] > 0.5
    assert [len(parts) for parts in measure_settings(settings).values()] == [2, 2, 2]


def test_a_learned_gate_is_a_lever_whose_time_is_the_devices() -> None:
    settings = settings_of("learned", subject(BALL), (1.0, 0.4, 0.0))
    gated = settings[1].driver
    assert isinstance(gated, PairDriver) and gated.rate == 0.4
    times = measure_settings(settings)
    assert times["learned 1"] == times["learned 0"] == times["learned 0.4"][::2], "draft and target are timed once"
    assert times["learned 0.4"][1] > 0.0, "its head estimates before the robot may act"


@pytest.mark.parametrize(
    ("name", "lever", "strengths", "said"),
    [
        ("ball", "split", (99.0,), "can be cut from 0 to"),
        ("ball", "naive", (1.5,), r"whole number, got 1\.5"),
        ("ball", "window", (2.0,), "1 to 1 observations"),
        ("ball", "steps", None, "needs a flow policy"),
        ("metaworld-flow alone", "reuse", (1.5,), r"\[0, 1\]"),
        ("pusht-flow alone", "reuse", None, "export --refresh"),
        ("pusht-flow alone", "verification", None, "with --draft"),
        ("pusht-flow", "learned", (0.4,), "has no learned gate; train one with: specact calibrate"),
        ("pusht-flow", "steps", None, "needs a flow policy, which 'pusht-flow' is not; its levers are verif"),
        ("pusht-flow", "split", None, "needs a pair of action codes"),
    ],
)
def test_what_a_lever_cannot_be_applied_to_is_refused(
    tmp_path: Path, name: str, lever: str, strengths: tuple[float, ...] | None, said: str
) -> None:
    name, _, alone = name.partition(" ")
    loaded: Any = load_flow(name) if alone else load_pair(name, decoding="flash" if "flow" in name else "")
    with pytest.raises(ConfigError, match=said):
        settings_of(lever, subject(loaded, tmp_path), strengths)
    assert not list(tmp_path.iterdir()), "nothing is written"
