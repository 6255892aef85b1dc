"""Levers that say where a target's layers run, and what its encoder computes again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specact.bundle.network import Network
from specact.errors import ConfigError
from specact.execution.strategy import Execution
from specact.families.chunks.flow import load_flow
from specact.lab.rollout.folder import JsonLines
from specact.lab.rollout.pool import Pool
from specact.lab.tised.drivers import PairDriver, PolicyDriver, RoundsDriver, SplitDriver
from specact.lab.tised.levers import Setting, Subject, settings_of
from specact.lab.tised.records import EPISODES, sweep_folder
from specact.lab.tised.sweep import Sweep, Trial, measure_settings, run_sweep, run_trial
from specact.lab.train.variants import BundleVariants
from specact.links.link import load_link
from specact.links.model import round_trip
from specact.load import load_pair
from specact.observation import Window
from specact.systems.flash import ROUNDS, Round
from specact.systems.freqcache import FREQCACHE, load_refresh
from specact.types import Decision

BALL = load_pair("ball")
TARGET_MS, DELAY = 8.0, "loopback+delay=30"
SYNCHRONOUS = Execution("synchronous", BALL.parts.spec.execute)


def window(seed: int) -> Window:
    rng, zeros = np.random.default_rng(seed), BALL.parts.spec.target.zeros()
    return Window({name: rng.normal(0, 0.3, array.shape).astype(array.dtype) for name, array in zeros.arrays.items()})


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setting, ...]:
    variants = BundleVariants(BALL, tmp_path_factory.mktemp("variants"), lambda: ())
    settings = settings_of("split", Subject(BALL, BALL.parts.spec.execute, variants))
    variants.make()
    return tuple(settings)


def test_wherever_a_target_is_cut_it_acts_the_same(cuts: tuple[Setting, ...]) -> None:
    alone = PolicyDriver(str(BALL.path), SYNCHRONOUS, "target").build()
    assert [setting.strength for setting in cuts] == list(range(len(cuts))) and len(cuts) > 3
    for setting in cuts:
        driver = setting.driver
        assert isinstance(driver, SplitDriver)
        exact = replace(driver, precision="float32").build()
        for seed in range(5):
            found = exact.infer(window(seed), np.random.default_rng(seed))
            np.testing.assert_array_equal(found, alone.infer(window(seed), np.random.default_rng(seed)))


def test_what_crosses_the_link_is_rounded(cuts: tuple[Setting, ...]) -> None:
    alone, middle = PolicyDriver(str(BALL.path), SYNCHRONOUS, "target").build(), cuts[len(cuts) // 2].driver
    assert isinstance(middle, SplitDriver)
    changed = 0
    for seed in range(20):
        found, exact = (policy.infer(window(seed), np.random.default_rng(seed)) for policy in (middle.build(), alone))
        changed += not np.array_equal(found, exact)
    assert changed


def test_an_inference_takes_what_both_sides_and_the_link_take(cuts: tuple[Setting, ...], tmp_path: Path) -> None:
    what = Sweep(
        BALL.fingerprint, cuts, "ball", (0.0,), ("agx-50w",), (DELAY,), episodes=1, seed=3, target_ms=TARGET_MS
    )
    with Pool(1) as pool:
        run_sweep(what, tmp_path, lambda *_: None, pool)
    measured = sweep_folder(tmp_path).manifest()["latency_ms"]
    rows = {row["strength"]: row for row in JsonLines(tmp_path / EPISODES).read()}
    assert "stages" not in (tmp_path / "manifest.json").read_text().split('"sweep"')[1].split("latency_ms")[0]
    for setting in cuts:
        driver, (device, server) = setting.driver, measured[setting.label]
        assert isinstance(driver, SplitDriver)
        wanted = 1e-3 * (9.7 * device + TARGET_MS * server / (device + server))
        if driver.cut:
            wanted += round_trip(load_link(DELAY), *driver.crossing, 0.0, np.random.default_rng(0))
        assert rows[setting.strength]["inference_s"] == pytest.approx(wanted, rel=0.02)
    # All of it on one side leaves nothing to the other.
    assert measured[cuts[0].label][1] < 0.05 * measured[cuts[0].label][0]
    assert measured[cuts[-1].label][0] < 0.05 * measured[cuts[-1].label][1]


def test_a_cut_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    subject = Subject(BALL, BALL.parts.spec.execute, BundleVariants(BALL, tmp_path, lambda: ()))
    with pytest.raises(ConfigError, match="can be cut from 0 to"):
        settings_of("split", subject, (99.0,))
    assert not list(tmp_path.iterdir()), "nothing is written"


class NoVariants:
    """Nothing is made of a network."""


def flow(name: str) -> Subject:
    return Subject(load_flow(name), 4, NoVariants())  # type: ignore[arg-type]


def test_the_more_is_reused_the_less_is_computed() -> None:
    settings = settings_of("reuse", flow("metaworld-flow"), (0.5, 1.0))
    drivers = [setting.driver for setting in settings]
    assert all(isinstance(driver, RoundsDriver) for driver in drivers)
    none, half, full = (driver for driver in drivers if isinstance(driver, RoundsDriver))
    assert none.rounds == ROUNDS["full"] and none.kinds == ("full",)
    assert half.rounds.reuse is not None and (half.rounds.reuse.least, half.rounds.reuse.most) == (0.5, 0.5)
    assert {label: len(parts) for label, parts in measure_settings(settings[:2]).items()} == {
        "reuse 0": 1, "reuse 0.5": 2,
    }  # fmt: skip
    assert full.rounds.reuse is not None and full.rounds.reuse.most == 1.0


def test_a_round_takes_time_for_the_tokens_that_it_computes() -> None:
    (_, setting) = settings_of("reuse", flow("metaworld-flow"), (0.5,))
    assert isinstance(setting.driver, RoundsDriver)
    takes, empty = setting.driver.duration_s((0.010, 0.006)), np.zeros((0, 0), np.float32)
    full = Round(np.zeros((8, 4), np.float32), 0, False, False, empty)
    assert [takes(full, share) for share in (0.0, 0.25, 0.5)] == pytest.approx([0.010, 0.008, 0.006])


def test_what_is_timed_computes_the_other_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (_, setting) = settings_of("reuse", flow("metaworld-flow"), (0.5,))
    assert isinstance(setting.driver, RoundsDriver)
    computed: list[int] = []
    run = Network.run

    def counting(network: Network, inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        computed.extend([inputs["tokens"].shape[1]] if "sources" in inputs else [])
        return run(network, inputs)

    monkeypatch.setattr(Network, "run", counting)
    call = setting.driver.call("reused")
    for _ in range(3):
        call()
    # The first one has nothing to reuse.
    cameras = load_refresh(load_flow("metaworld-flow").path / FREQCACHE, load_flow("metaworld-flow")).spec.cameras
    patches, tokens = sum(patch.rows * patch.columns for patch in cameras.values()), whole_prefix()
    assert computed == 2 * [tokens - round(0.5 * patches)]


def whole_prefix() -> int:
    policy = load_flow("metaworld-flow").policy()
    return int(policy.networks.tokens([policy.spec.observation.zeros()]).shape[1])


def test_a_flow_without_a_refresh_has_no_such_lever() -> None:
    with pytest.raises(ConfigError, match="export --refresh"):
        settings_of("reuse", flow("pusht-flow"))
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        settings_of("reuse", flow("metaworld-flow"), (1.5,))


def test_a_gate_is_a_lever_on_a_pair_of_any_family() -> None:
    pair = load_pair("pusht-flow", decoding="flash")
    subject = Subject(pair, 8, NoVariants())  # type: ignore[arg-type]
    settings = settings_of("verification", subject, (1.0, 0.0)) + settings_of("late", subject, (1.0,))
    rows = []
    for setting in settings:
        trial = Trial(
            setting.lever, setting.strength, setting.driver, "pusht", 0.0, "hold", "this-machine", 1.0, DELAY,
            (0.004, 0.02), episode=0, seed=1, fingerprint=pair.fingerprint,
        )  # fmt: skip
        rows.append(run_trial(trial))
    hybrid, draft, late = rows
    # Of a round on the server the device waits for draft, link and target, of one on the device for the draft.
    assert hybrid["inference_s"] == pytest.approx(0.054, abs=0.001) and hybrid["transmission_rate"] == 1.0
    assert draft["inference_s"] == pytest.approx(0.004) and draft["transmission_rate"] == 0.0
    assert late["inference_s"] == pytest.approx(0.004) and late["transmission_rate"] > 0.5
    assert [len(parts) for parts in measure_settings(settings).values()] == [2, 2, 2]


@pytest.mark.parametrize("name", ["ball", "pusht-flow"])
def test_a_learned_gate_is_a_lever_whose_time_is_the_devices(name: str) -> None:
    pair = load_pair(name)
    subject = Subject(pair, pair.execute, NoVariants())  # type: ignore[arg-type]
    if name == "pusht-flow":  # it has no head
        with pytest.raises(ConfigError, match="has no learned gate; train one with: specact calibrate"):
            settings_of("learned", subject, (0.4,))
        return
    hybrid, gated, draft = settings_of("learned", subject, (1.0, 0.4, 0.0))
    assert isinstance(gated.driver, PairDriver) and gated.driver.rate == 0.4
    assert isinstance(gated.driver.call("draft")(), Decision), "its head estimates before the robot may act"
    (side, part), target = gated.driver.parts
    assert (side, part) == (replace(gated.driver, rate=None), "draft")
    assert hybrid.driver.parts == draft.driver.parts and hybrid.driver.parts[1] == target
    assert hybrid.driver.parts[0] != gated.driver.parts[0]


def test_levers_on_a_policy_alone_are_refused_for_such_a_pair() -> None:
    subject = Subject(load_pair("pusht-flow", decoding="flash"), 8, NoVariants())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a flow policy, which 'pusht-flow' is not; its levers are verif"):
        settings_of("steps", subject)
    with pytest.raises(ConfigError, match="needs a pair of action codes"):
        settings_of("split", subject)
    with pytest.raises(ConfigError, match="with --draft"):
        settings_of("verification", flow("pusht-flow"))
