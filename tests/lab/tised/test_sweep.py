"""Sweeps: paired, resumable to the episode, and refused where they make no sense."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import quiet

from specact.errors import BundleError, ConfigError, DataError
from specact.families.chunks.flow import load_flow
from specact.lab.data.folder import JsonLines
from specact.lab.envs import load_task
from specact.lab.rollout.methods import HYBRID
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.rollout import Shard, run_shard
from specact.lab.tised.analysis import read_calibrations, read_sweeps
from specact.lab.tised.drivers import PairDriver, PolicyDriver, Setting, Trial
from specact.lab.tised.levers import Subject, settings_of
from specact.lab.tised.sweep import (
    CALIBRATIONS,
    EPISODES,
    HardwareProfile,
    Sweep,
    gate_of,
    load_hardware,
    named_hardware,
    run_sweep,
    run_trial,
    stored_ms,
    sweep_folder,
    with_gate,
)
from specact.lab.train.variants import BundleVariants
from specact.load import load_pair

BALL = load_pair("ball")


SUBJECT = Subject(BALL, BALL.execute, BundleVariants(BALL, Path("nowhere")))


def settings(*levers: str) -> tuple[Setting, ...]:
    return tuple(setting for lever in levers for setting in settings_of(lever, SUBJECT))


def small(**changes: object) -> Sweep:
    what = Sweep(
        BALL.fingerprint, settings("naive")[:2], "ball", (0.0, 0.05), ("this-machine", "agx-50w"), ("none",), episodes=2
    )
    return replace(what, **changes)  # type: ignore[arg-type]


def test_every_setting_runs_the_same_episodes_and_a_stop_costs_nothing_but_them(tmp_path: Path) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_sweep(small(), whole, quiet, Pool(1))
    table, baselines, (manifest,) = read_sweeps([whole])
    assert baselines == {"naive": 0.0}
    assert len(table["episode"]) == 2 * 2 * 2 * 2
    for name in ("strength", "pace", "hardware"):
        for value in np.unique(table[name]):
            assert sorted(table["episode"][table[name] == value]) == [0] * 4 + [1] * 4
    assert set(table["kappa"]) == {1.0, 9.7}
    measured_s = 1e-3 * manifest["latency_ms"]["naive 0"][0]
    rows = table["strength"] == 0.0
    assert table["inference_s"][rows] == pytest.approx(table["kappa"][rows] * measured_s)

    # The same, killed in the middle of a line.
    stopped.mkdir()
    (stopped / "manifest.json").write_text((whole / "manifest.json").read_text())
    lines = (whole / EPISODES).read_text().splitlines()
    (stopped / EPISODES).write_text("\n".join(lines[:7]) + '\n{"lever": "nai')
    seen: list[int] = []
    run_sweep(small(), stopped, lambda what, done, total: seen.append(done), Pool(1))
    assert seen[0] == 7
    assert sorted((stopped / EPISODES).read_text().splitlines()) == sorted(lines)

    # What an earlier version wrote.
    old = (whole / EPISODES).read_text().replace('"sent"', '"transmission_rate"')
    (whole / EPISODES).write_text(old)
    assert "transmission_rate" in old and read_sweeps([whole])[0].keys() == table.keys()

    # More episodes may be asked for; anything else is another sweep.
    run_sweep(small(episodes=3), stopped, quiet, Pool(1))
    assert len(read_sweeps([stopped])[0]["episode"]) == 24
    with pytest.raises(ConfigError, match="holds another run"):
        run_sweep(small(seed=7), stopped, quiet, Pool(1))


def test_reading_changes_no_file_and_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no sweep"):
        read_sweeps([tmp_path])
    (tmp_path / "manifest.json").write_text(json.dumps({"sweep": {}, "baselines": {}}))
    with pytest.raises(DataError, match="there are no finished episodes"):
        read_sweeps([tmp_path])
    (tmp_path / EPISODES).write_text('{"lever": "x", "jerk": null}\n{"lev')
    table, _, _ = read_sweeps([tmp_path])
    assert np.isnan(table["jerk"]).all() and len(table["jerk"]) == 1
    assert (tmp_path / EPISODES).read_text().endswith('{"lev')


def test_a_server_has_a_time_and_a_link_of_its_own(tmp_path: Path) -> None:
    what = small(
        settings=(*settings("remote"), *settings("verification")[:1], *settings("naive")[:1]),
        paces=(0.0,), hardware=("agx-50w",), links=("loopback+delay=40",), target_ms=8.0, episodes=1,
    )  # fmt: skip
    run_sweep(what, tmp_path, quiet, Pool(1))
    table, _, (manifest,) = read_sweeps([tmp_path])
    took = dict(zip(table["lever"].tolist(), table["inference_s"].tolist(), strict=True))
    links = dict(zip(table["lever"].tolist(), table["link"].tolist(), strict=True))
    assert took["remote"] == pytest.approx(0.048, abs=0.001)
    draft_s = 9.7e-3 * manifest["latency_ms"]["verification 1"][0]
    assert took["verification"] == pytest.approx(draft_s + 0.048, abs=0.001)
    assert links == {"remote": "loopback+delay=40", "verification": "loopback+delay=40", "naive": "none"}


def test_a_gate_is_calibrated_where_it_runs(tmp_path: Path) -> None:
    """Over a link of 100 ms the plate goes on moving while the robot waits, so its scores are others than without."""
    near, far = "loopback", "loopback+delay=100"
    what = small(
        settings=tuple(settings_of("verification", SUBJECT, (0.5,))), paces=(0.0,), hardware=("this-machine",),
        links=(near, far), idles=("hold", "neutral"), calibration=8, episodes=1,
    )  # fmt: skip
    run_sweep(what, tmp_path, quiet, Pool(1))
    calibrations = {(row["link"], row["idle"]): row for row in read_calibrations([tmp_path])}
    assert len(calibrations) == 4
    threshold = {where: row["gate"]["threshold"] for where, row in calibrations.items()}
    assert len({threshold[near, "hold"], threshold[far, "hold"], threshold[far, "neutral"]}) == 3
    for row in calibrations.values():
        assert row["rate"] == 0.5 and row["episodes"] == 8 and len(row["rounds"]) == 3
        assert row["held_out_rate"] == row["held_out_sent"] == pytest.approx(0.5, abs=0.25)

    # Further episodes need no further calibration, and run with the gate of their place.
    before = (tmp_path / CALIBRATIONS).read_text()
    run_sweep(replace(what, episodes=2), tmp_path, quiet, Pool(1))
    assert (tmp_path / CALIBRATIONS).read_text() == before
    rows = JsonLines(tmp_path / EPISODES).read()
    place = {"lever": "verification", "strength": 0.5, "link": far, "idle": "neutral", "episode": 1}
    (row,) = (row for row in rows if place.items() <= row.items())
    latencies_s = tuple(1e-3 * ms for ms in sweep_folder(tmp_path).manifest()["latency_ms"]["verification 0.5"])
    uncalibrated = Trial(
        what.settings[1], "ball", 0.0, "neutral", "this-machine", 1.0, far, latencies_s, episode=1, seed=what.seed,
        fingerprint=what.fingerprint,
    )  # fmt: skip
    by_hand = with_gate(uncalibrated, gate_of(calibrations[far, "neutral"]))
    assert run_trial(by_hand) == row
    with pytest.raises(BundleError, match=r"has fingerprint .* here, and 0123"):
        run_trial(replace(by_hand, fingerprint="0123"))


def test_hybrid_without_delay_succeeds_where_an_evaluation_does() -> None:
    """Two ways to run the same episodes: in lock step without time, and alone in a world that would not have waited."""
    setting = settings("verification")[0]
    rows = [
        run_trial(
            Trial(
                setting, "ball", 0.0, "hold", "none", 1.0, "loopback", (0.0, 0.0), episode, seed=3,
                fingerprint=BALL.fingerprint,
            )
        )
        for episode in range(6)
    ]  # fmt: skip
    assert isinstance(setting.driver, PairDriver)
    gate = setting.driver.gate
    outcomes, _ = run_shard(Shard.of(BALL, "ball", HYBRID, gate, range(6), 3))
    assert [row["success"] for row in rows] == [outcome.success for outcome in outcomes]
    period_s = 1.0 / load_task("ball").rate_hz
    times = [row["task_s"] for row in rows if row["success"]]
    assert times == pytest.approx([outcome.steps * period_s for outcome in outcomes if outcome.success])


@pytest.mark.parametrize("hardware", ["agx-50w", "480ms"])
def test_on_a_loaded_machine_a_sweep_gives_the_same_times(
    hardware: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, rows = small(paces=(0.0,), hardware=(hardware,)), []
    for name, slow_s in (("quiet", 0.0), ("loaded", 0.02)):
        monkeypatch.setattr(PolicyDriver, "call", lambda driver, part, slow_s=slow_s: lambda: time.sleep(slow_s))
        run_sweep(what, tmp_path / name, quiet, Pool(1))
        rows.append(sorted((tmp_path / name / EPISODES).read_text().splitlines()))
    assert rows[0] == rows[1]
    # Of a bundle without stored times another load is another experiment.
    monkeypatch.setattr("specact.lab.tised.sweep.stored_ms", lambda settings, fingerprint: None)
    run_sweep(what, tmp_path / "measured", quiet, Pool(1))
    table, _, _ = read_sweeps([tmp_path / "measured"])
    loaded = sorted((tmp_path / "measured" / EPISODES).read_text().splitlines())
    assert (loaded == rows[0]) == (hardware == "480ms") and table["inference_s"].min() > 0.15


def test_absolute_times_are_of_plain_inferences_by_their_steps(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[board]\nbase_ms = 100\nstep_ms = 10\nabout = "measured: our board"\n')
    board = load_hardware(f"{path}:board")[1]
    flow = load_flow("ball-chase-flow")
    subject = Subject(flow, 4, BundleVariants(flow, tmp_path), steps=2)
    took = {
        s.label: board.absolute_s(s.driver) for lever in ("steps", "naive") for s in settings_of(lever, subject, (3.0,))
    }
    assert took == pytest.approx({"steps 10": 0.2, "steps 3": 0.13, "naive 0": 0.12, "naive 3": 0.12})
    assert board.absolute_s(settings("naive")[1].driver) == pytest.approx(0.1), "without steps"
    for lever in ("inpainting", "quantisation", "flash"):
        with pytest.raises(ConfigError, match="kappa"):
            board.absolute_s(settings_of(lever, subject)[-1].driver)
    with pytest.raises(ConfigError, match="kappa"):
        small(hardware=(f"{path}:board",), settings=settings("verification"), links=("loopback",))


def test_every_lever_of_a_stored_bundle_has_stored_times() -> None:
    flow, pusht = load_flow("ball-chase-flow"), load_pair("pusht")
    for loaded, levers in ((flow, ("steps", "naive", "quantisation", "flash")), (pusht, ("window",))):
        subject = Subject(loaded, 4, BundleVariants(loaded, Path("nowhere")))
        every = [setting for lever in levers for setting in settings_of(lever, subject)]
        times = stored_ms(every, loaded.fingerprint)
        assert times is not None and all(ms > 0.0 for parts in times.values() for ms in parts)
        assert len(times) == len(every)
    assert stored_ms(every, "0123") is None


def test_what_makes_no_sense_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need links"):
        small(settings=settings("remote"))
    with pytest.raises(ConfigError, match="way to idle"):
        small(idles=())
    with pytest.raises(ConfigError, match="moves by itself"):
        small(task="swarm", paces=(1.0,))
    with pytest.raises(ConfigError, match="'agx-51w'"):
        small(hardware=("agx-51w",))
    with pytest.raises(ConfigError, match="cannot inpaint"):
        run_sweep(small(settings=settings("inpainting")), tmp_path / "out", quiet, Pool(1))
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match="'ball' cannot act in task 'pusht'"):
        run_sweep(small(task="pusht", paces=(0.0,)), tmp_path / "out", quiet, Pool(1))
    assert not (tmp_path / "out").exists()


def test_hardware_is_named_in_the_package_or_in_a_file_of_ones_own(tmp_path: Path) -> None:
    assert load_hardware("this-machine")[1].kappa == 1.0
    assert all(board.about.split(":")[0] in ("measured", "derived", "chosen") for board in named_hardware().values())
    path = tmp_path / "mine.toml"
    path.write_text('[board]\nkappa = 3\nabout = "measured: our board"\n')
    assert load_hardware(f"{path}:board") == ("board", HardwareProfile(about="measured: our board", kappa=3.0))
    names = {str(path): "board", f"{path}:bord": "board", "agx-30": "agx-30w", "no.toml:a": "no.toml"}
    for name, named in names.items():
        with pytest.raises(ConfigError, match=named):
            load_hardware(name)
    for text, named in (
        ("", "profile"),
        ('[a]\nkapa = 1\nabout = ""', "kappa"),
        ('[a]\nkappa = 0\nabout = ""', "kappa"),
        ('[a]\nkappa = 1\nbase_ms = 2\nabout = ""', "base_ms"),
        ('[a]\nkappa = 1\nstep_ms = 2\nabout = ""', "step_ms"),
        ('[a]\nabout = ""', "kappa"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=named):
            load_hardware(f"{path}:a")
