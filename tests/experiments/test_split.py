"""Placements in virtual time, where everything about them is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from experiments.split import block_interval, cell_summary, turns_interval
from experiments.split.forecast import forecast_errors, load_forecast, save_forecast, train_forecast
from experiments.split.simulated import (
    SIMULATED,
    LatencyApart,
    StudyLink,
    chooser_of,
    series,
    simulated,
    split_latency,
    study_links,
)
from experiments.split.sockets import STRETCH, Device, target_windows

from specact.errors import ConfigError
from specact.gates.settings import gate_settings
from specact.lab.train.split import split_bundle
from specact.links.link import load_link
from specact.links.model import SteadyLink
from specact.load import load_pair
from specact.systems.roboecc import SmallestTotal, StageCosts, last_value, measured

# The device needs 90 ms for everything, the server 6; up to 30 kB cross.
COSTS = StageCosts(
    np.array([1e-3, 2e-3, 3e-3]), np.array([0.03, 0.03, 0.03]), np.array([0.0, 9e3, 1e3, 1e3]), 2e4,
    np.array([0.2, 0.3, 0.5]),
)  # fmt: skip


def link_of(tmp_path: Path, rtts_ms: list[float]) -> StudyLink:
    file = tmp_path / "rtt.csv"
    file.write_text("\n".join(f"{rtt:g}" for rtt in rtts_ms) + "\n")
    return StudyLink(f"rtt:{file}", 0.0)


def run(method: str, link: StudyLink, count: int = 100, budget: float = np.inf) -> dict[str, Any]:
    return simulated(method, link, COSTS, np.array([1e6]), last_value, count, budget)


def test_on_a_link_that_does_not_change_every_cut_takes_its_total(tmp_path: Path) -> None:
    link = link_of(tmp_path, [40.0])
    np.testing.assert_allclose(run("device", link)["latency_ms"], 90.0)
    np.testing.assert_allclose(run("server", link)["latency_ms"], 40.0 + 6.0)
    # The server's load keeps the last stage on the device.
    limited = run("smallest", link, budget=0.5)
    assert set(limited["cuts"]) == {2}
    np.testing.assert_allclose(limited["latency_ms"], 40.0 + 3.0 + 30.0)


def test_the_smallest_total_follows_the_link_and_an_oracle_is_no_worse_than_either_end(tmp_path: Path) -> None:
    # Good for 3 s, then bad for 3 s, and so on; taken every 100 ms.
    link = link_of(tmp_path, (30 * [20.0] + 30 * [400.0]) * 4)
    timed = StudyLink(f"{link.link}+period=100", 0.0)
    latencies = {method: np.array(run(method, timed, 110)["latency_ms"]) for method in ("device", "server", "smallest")}
    oracle = np.array(run("smallest_oracle", timed, 110)["latency_ms"])
    assert oracle.mean() < latencies["smallest"].mean() < min(latencies["device"].mean(), latencies["server"].mean())
    # It knows the moment of asking, not that of the reply: a message that meets a change may take longer.
    assert np.mean(oracle <= np.minimum(latencies["device"], 400.0) + 1e-6) > 0.9


def test_roboecc_s_rule_is_slower_than_the_smallest_total_where_the_largest_activation_is_a_bad_cut(
    tmp_path: Path,
) -> None:
    recorded = link_of(tmp_path, (30 * [20.0] + 30 * [60.0]) * 4)
    link = StudyLink(f"{recorded.link}+period=100", 0.0)
    rule, smallest = (cell_summary(run(method, link)) for method in ("roboecc_oracle", "smallest"))
    assert rule["switches"] > 3 and set(rule["cuts"]) == {"1", "2"}
    assert rule["mean_ms"] > smallest["mean_ms"]


def test_simulations_are_the_same_each_time_and_cover_every_method(tmp_path: Path) -> None:
    link = link_of(tmp_path, [40.0, 20.0, 400.0])
    for method in SIMULATED:
        first, repeat = run(method, link), run(method, link)
        assert first == repeat and len(first["latency_ms"]) == 100
    assert isinstance(chooser_of("smallest", COSTS, np.ones(3), last_value, last_value, 1.0), SmallestTotal)


def test_a_mean_is_less_certain_where_a_link_is_slow_for_long(tmp_path: Path) -> None:
    mixed = np.where(np.arange(400) % 2 == 0, 40.0, 400.0)
    calm, lasting = block_interval(mixed), block_interval(np.sort(mixed))
    assert calm["mean"] == lasting["mean"] == 220.0
    assert lasting["high"] - lasting["low"] > 5 * (calm["high"] - calm["low"])
    assert lasting["low"] < 220.0 < lasting["high"]
    speedup = block_interval(mixed, np.full(400, 110.0))
    assert speedup["mean"] == 0.5 and speedup["low"] <= 0.5 <= speedup["high"]


def test_the_cut_behind_a_prefill_is_the_last_one(tmp_path: Path) -> None:
    link = link_of(tmp_path, [40.0])
    np.testing.assert_allclose(run("behind", link)["latency_ms"], 40.0 + 3.0 + 30.0)


def test_over_sockets_methods_take_turns_on_equal_observations(tmp_path: Path) -> None:
    staged, pair = split_bundle("ball", tmp_path / "stages"), load_pair("ball")
    count, some = staged.spec.stages, np.full(staged.spec.stages, 1e-3)
    costs = StageCosts(some, 20.0 * some, np.append(0.0, np.full(count, 2e3)), 2e2, some)
    (tmp_path / "rtt.csv").write_text("20\n" * 4)
    link = StudyLink(f"rtt:{tmp_path / 'rtt.csv'}", 2000.0)
    save_forecast(train_forecast(np.linspace(1e5, 2e5, 200), epochs=1), tmp_path / "f.safetensors")
    gate, seen = gate_settings("adahi", pair), target_windows(pair, 5, seed=1)
    device = Device(staged, pair, link, tmp_path / "f.safetensors", costs, 1e-3, gate, seen, 1)
    cells = device.measure(("device", "server", "late"), stretch=2)
    assert [len(cell["latency_ms"]) for cell in cells.values()] == [5, 5, 5]
    assert (cells["device"]["cuts"], cells["server"]["cuts"]) == ([0] * 5, [count] * 5)
    # The device's stages take no less than they are said to, and the link no less than its recording says.
    assert min(cells["device"]["latency_ms"]) >= 20.0 * count and min(cells["server"]["latency_ms"]) >= 20.0


def test_the_interval_of_a_mean_is_over_turns() -> None:
    interval = turns_interval([*[10.0] * STRETCH, *[30.0] * STRETCH])
    assert interval["mean"] == 20.0 and interval["high"] - 20.0 == pytest.approx(12.706 * 10.0, rel=1e-3)


def test_a_learned_forecast_beats_the_last_value_where_there_is_something_to_learn(tmp_path: Path) -> None:
    # High and low in turn, which the last value always gets wrong.
    values = np.where(np.arange(700) % 2 == 0, 3e5, 1e5) + np.random.default_rng(0).normal(0.0, 1e3, 700)
    learned = train_forecast(values[:400], epochs=25)
    errors = forecast_errors(learned.forecast, values[:400], values[400:])
    assert errors["forecast_mae"] < 0.5 * errors["last_mae"]
    assert learned.forecast(values[:19].tolist()) == values[18], "too little of the past is as the last value"
    save_forecast(learned, tmp_path / "made" / "f.safetensors")
    past = values[:30].tolist()
    assert load_forecast(tmp_path / "made" / "f.safetensors").forecast(past) == learned.forecast(past)
    learned.scale[2] = 2.9e5
    assert {learned.forecast(values[:count].tolist()) for count in (30, 31)} >= {2.9e5}, "never less than was seen"
    for known in (values[:50], np.zeros(300)):
        with pytest.raises(ConfigError, match="104"):
            train_forecast(known)


def test_recordings_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"TMobile-LTE-short[.]up; --data is the folder with mahimahi/"):
        study_links(tmp_path, tmp_path)
    for name in ("TMobile-LTE-short.up", "TMobile-LTE-short.down", "ATT-LTE-driving.up", "ATT-LTE-driving.down"):
        file = tmp_path / "mahimahi" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text("5\n1000\n")
    (tmp_path / "telerobot_rtt").mkdir()
    (tmp_path / "telerobot_rtt" / "tyrell_roundtrip035.csv").write_text("20\n30\n")
    links = study_links(tmp_path, tmp_path / "out")
    assert list(links) == ["5g-like", "lte", "lte-driving", "wifi"]
    lte = links["lte"]
    assert lte.seconds == 1.0 and lte.trained_s == 0.6 and "+start=0.6+delay=40" in lte.at(0.6)
    assert (tmp_path / "out" / "fast.up").read_bytes() == b"5\n" * 10 + b"1000\n" * 10


def test_a_series_is_what_exchanges_at_those_moments_take() -> None:
    link = SteadyLink(rtt_ms=40.0, jitter_ms=0.0, up_mbit_s=8.0, down_mbit_s=16.0)
    np.testing.assert_allclose(series(link, 10_000, 2_000, 0.2, 3), 12_000 / (0.040 + 0.010 + 0.001))
    assert np.isfinite(measured(3000.0, 0.0))
    jitter = load_link("lte")
    first, repeat = (series(jitter, 10_000, 2_000, 0.2, 50, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, repeat)
    assert (series(jitter, 10_000, 2_000, 0.2, 50, seed=4) != first).any()


def test_a_link_that_takes_as_long_for_any_size_is_not_worth_the_device_s_own_stages() -> None:
    costs = StageCosts(np.array([0.1, 0.1]), np.array([2.0, 0.2]), np.array([0.0, 1.0, 9.0]), 10.0, np.ones(2))
    past = 3 * [(19.0, 1.0)]
    # As published 8 bytes less would save 0.42 s. They save nothing.
    assert SmallestTotal(costs, range(3))(2, past) == 1
    assert LatencyApart(costs, range(3))(2, past) == 2
    bytes_s, latency_s = split_latency([*past, (19.0, 3.0)], 19.0 / 3.0)
    assert latency_s == 1.0 and bytes_s == pytest.approx(9.5)  # two more seconds for 19 bytes
    assert split_latency(past, 100.0)[1] == 0.19
