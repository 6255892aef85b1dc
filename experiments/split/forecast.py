"""RoboECC's predictor of a link's bandwidth, an LSTM over the last measurements: training and errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.systems.roboecc import Forecast
from specact.types import Floats

# The predictor as published: size of its state, length of its input; and its training, with AdamW.
HIDDEN, PAST, HELD_OUT, SEED = 32, 20, 0.2, 7
BATCH, LEARNING_RATE, WEIGHT_DECAY, LARGEST_GRADIENT, PATIENCE = 64, 1e-3, 1e-5, 1.0, 20


class LearnedForecast(nn.Module):
    """One layer, and a linear map of its last state; with fewer measurements than it needs it repeats the last one.

    Attributes:
        scale: mean, standard deviation and minimum of the training data [bytes/s].
    """

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 1)
        self.register_buffer("scale", torch.zeros(3, dtype=torch.float64))

    def forward(self, past: Tensor) -> Tensor:
        """Standardised bandwidths ``[B, 20]`` to the next ones ``[B]``."""
        states, _ = self.lstm(past[..., None])
        following: Tensor = self.head(states[:, -1])[:, 0]
        return following

    def forecast(self, past: Sequence[float]) -> float:
        """The next bandwidth [bytes/s]; never less than the minimum of the training data."""
        if len(past) < PAST:
            return past[-1]
        mean, deviation, least = self.scale.tolist()
        standard = (torch.tensor(list(past)[-PAST:], dtype=torch.float64) - mean) / deviation
        with torch.no_grad():
            return float(max(float(self(standard.float()[None])[0]) * deviation + mean, least))


def load_forecast(file: Path) -> LearnedForecast:
    """A forecast that was trained."""
    forecast = LearnedForecast()
    forecast.load_state_dict(load_file(file))
    return forecast


def save_forecast(forecast: LearnedForecast, file: Path) -> None:
    """Writes its weights and scale, for :func:`load_forecast`."""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file(forecast.state_dict(), file)


def train_forecast(series: Floats, epochs: int = 200) -> LearnedForecast:
    """Trains one-step prediction of the bandwidth, with early stopping; values are standardised with this series.

    Args:
        series: measured bandwidths in order [bytes/s], of the training part only.
        epochs: at most so many.

    Raises:
        ConfigError: for a series that is too short, or has values that are not finite and positive.
    """
    least = 2 * PAST + BATCH
    if len(series) < least or not (np.isfinite(series) & (series > 0.0)).all():
        raise ConfigError(f"a forecast needs at least {least} bandwidths above 0 to learn from, got {len(series)}")
    mean, deviation = float(series.mean()), max(float(series.std()), 1e-9 * float(series.mean()))
    values = torch.from_numpy(((series - mean) / deviation).astype(np.float32))
    past, following = values[:-1].unfold(0, PAST, 1), values[PAST:]
    kept = round(len(following) * (1.0 - HELD_OUT))
    torch.manual_seed(SEED)
    model = LearnedForecast()
    model.scale.copy_(torch.tensor([mean, deviation, float(series.min())]))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    best, best_epoch, weights = float("inf"), 0, copy.deepcopy(model.state_dict())
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(kept).split(BATCH):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(past[rows]), following[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
        with torch.no_grad():
            error = float(nn.functional.mse_loss(model(past[kept:]), following[kept:]))
        if error < best:
            best, best_epoch, weights = error, epoch, copy.deepcopy(model.state_dict())
        elif epoch - best_epoch >= PATIENCE:
            break
    model.load_state_dict(weights)
    return model


def forecast_errors(forecast: Forecast, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Errors of one-step forecasts of ``after``, which follows ``before``, and of the last value as the forecast."""
    series = np.concatenate([before, after]).tolist()
    positions = range(len(before), len(series))
    predicted = np.array([forecast(series[max(0, position - 64) : position]) for position in positions])
    guesses = {"forecast": predicted, "last": np.array(series[len(before) - 1 : -1])}
    errors = {"inferences": float(len(after)), "mean": float(after.mean())}
    for name, guess in guesses.items():
        errors |= {f"{name}_mae": float(np.abs(guess - after).mean()), f"{name}_rmse": _rmse(guess, after)}
    return errors | {"mean_rmse": _rmse(before.mean(), after)}


def _rmse(guess: np.ndarray | float, values: np.ndarray) -> float:
    return float(np.sqrt(np.square(guess - values).mean()))
