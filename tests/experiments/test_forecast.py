"""What a link carries: measured, and forecast by a network that was learned from its past."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from experiments.split.forecast import ForecastRecipe, Lstm, RecurrentForecast, train_forecast
from experiments.split.recordings import series

from specact.bundle.bundle import find_bundle
from specact.errors import BundleError, ConfigError
from specact.links.link import load_link
from specact.links.model import SteadyLink
from specact.systems.roboecc import Bandwidths, LastValue, measured


def zigzag(count: int) -> np.ndarray:
    """High and low in turn, which the last value always gets wrong."""
    return np.where(np.arange(count) % 2 == 0, 3e5, 1e5) + np.random.default_rng(0).normal(0.0, 1e3, count)


def test_a_measurement_is_bytes_over_what_the_server_did_not_need() -> None:
    assert measured(3000.0, 0.5) == 6000.0
    assert np.isfinite(measured(3000.0, 0.0))


def test_a_series_is_what_exchanges_at_those_moments_take() -> None:
    link = SteadyLink(rtt_ms=40.0, jitter_ms=0.0, up_mbit_s=8.0, down_mbit_s=16.0)
    np.testing.assert_allclose(series(link, 10_000, 2_000, 0.2, 3), 12_000 / (0.040 + 0.010 + 0.001))
    jitter = load_link("lte")
    first, again = (series(jitter, 10_000, 2_000, 0.2, 50, seed=3) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert (series(jitter, 10_000, 2_000, 0.2, 50, seed=4) != first).any()


def test_a_learned_forecast_beats_the_last_value_where_there_is_something_to_learn(tmp_path: Path) -> None:
    values = zigzag(700)
    assert train_forecast(values[:400], tmp_path / "f.onnx", ForecastRecipe(epochs=25)) <= 25
    forecast = RecurrentForecast(tmp_path / "f.onnx")
    places = range(400, 700)
    found = [forecast.forecast(values[place - 20 : place].tolist()) for place in places]
    last = [LastValue().forecast(values[:place].tolist()) for place in places]
    errors = [np.abs(np.array(guess) - values[400:]).mean() for guess in (found, last)]
    assert errors[0] < 0.5 * errors[1]
    # The same series and recipe give the same network; too little of the past is as the last value.
    train_forecast(values[:400], tmp_path / "g.onnx", ForecastRecipe(epochs=25))
    assert (tmp_path / "f.onnx").read_bytes() == (tmp_path / "g.onnx").read_bytes()
    assert forecast.forecast(values[:19].tolist()) == values[18]


def test_the_exported_network_is_the_trained_one(tmp_path: Path) -> None:
    recipe = ForecastRecipe(epochs=1)
    values = zigzag(300)
    train_forecast(values, tmp_path / "f.onnx", recipe)
    forecast = RecurrentForecast(tmp_path / "f.onnx")
    # The same training without the export.
    torch.manual_seed(recipe.seed)
    model = Lstm(recipe.hidden)
    standard = torch.from_numpy(((values - values.mean()) / values.std()).astype(np.float32))
    past, following = standard[:-1].unfold(0, 20, 1), standard[20:]
    kept = round(len(following) * 0.8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=1e-5)
    for rows in torch.randperm(kept).split(64):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(past[rows]), following[rows]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for start in (0, 1, 57):
        window = values[start : start + 20]
        with torch.no_grad():
            wanted = float(model(standard[start : start + 20][None])[0]) * values.std() + values.mean()
        assert forecast.forecast(window.tolist()) == pytest.approx(wanted, rel=1e-4)


def test_a_forecast_is_never_less_than_what_was_ever_seen(tmp_path: Path) -> None:
    values = zigzag(300)
    train_forecast(values, tmp_path / "f.onnx", ForecastRecipe(epochs=1))
    usual = RecurrentForecast(tmp_path / "f.onnx").forecast(values.tolist())
    assert usual < 2.9e5
    model = onnx.load(tmp_path / "f.onnx")
    told = json.loads(model.metadata_props[0].value)
    assert told["least"] == values.min()
    model.metadata_props[0].value = json.dumps(told | {"least": 2.9e5})
    onnx.save(model, tmp_path / "g.onnx")
    assert RecurrentForecast(tmp_path / "g.onnx").forecast(values.tolist()) == 2.9e5
    for damage, says in (({"deviation": 0.0}, "deviation 0 .* above 0"), ({"window": 3}, "a window of 3 numbers")):
        model.metadata_props[0].value = json.dumps(told | damage)
        onnx.save(model, tmp_path / "g.onnx")
        with pytest.raises(BundleError, match=says):
            RecurrentForecast(tmp_path / "g.onnx")


def test_changes_have_a_deviation_and_old_measurements_are_forgotten() -> None:
    seen = Bandwidths()
    for value in (1.0, *63 * [5.0], 9.0):
        seen.add(value, 1.0)
    assert seen.past == [*63 * [5.0], 9.0] and seen.deviation == pytest.approx(np.std([*62 * [0.0], 4.0]))


def test_refusals_say_what_is_allowed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 104 bandwidths above 0"):
        train_forecast(zigzag(50), tmp_path / "f.onnx")
    with pytest.raises(ConfigError, match="above 0"):
        train_forecast(np.zeros(300), tmp_path / "f.onnx")
    with pytest.raises(BundleError, match="is no forecast of a bandwidth"):
        RecurrentForecast(find_bundle("ball") / "draft.onnx")
