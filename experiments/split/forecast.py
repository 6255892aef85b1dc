"""RoboECC's predictor of a link's bandwidth: training, ONNX, and its errors."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from specact.bundle.network import Network
from specact.errors import BundleError, ConfigError
from specact.files import write_whole
from specact.systems.roboecc import Forecast
from specact.types import Floats


class RecurrentForecast:
    """RoboECC's predictor: an LSTM over the last measurements, exported to ONNX.

    With fewer measurements than its window it repeats the last one.

    Args:
        file: the ONNX file, with window, mean, standard deviation and minimum of the training data as metadata.

    Attributes:
        window: number of measurements that the network reads.

    Raises:
        BundleError: for a file without this metadata, or a network with other inputs and outputs.
    """

    def __init__(self, file: Path) -> None:
        self._network = Network(file)
        try:
            metadata = json.loads(self._network.metadata[METADATA])
            self.window = int(metadata["window"])
            statistics = self._mean, self._deviation, self._least = [
                float(metadata[name]) for name in ("mean", "deviation", "least")
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is no forecast of a bandwidth ({error}); train it again") from None
        shapes = [shape[1:] for side in (self._network.inputs, self._network.outputs) for shape in side.values()]
        if shapes != [[self.window], []]:
            raise BundleError(
                f"{file} has inputs and outputs of shapes {shapes} per window; a forecast of a bandwidth maps a window "
                f"of {self.window} numbers to one number"
            )
        if not all(map(math.isfinite, statistics)) or min(self._deviation, self._least) <= 0.0:
            raise BundleError(
                f"{file} has mean {self._mean:g}, deviation {self._deviation:g} and least {self._least:g}; all must be "
                "finite, and deviation and least above 0; train it again"
            )
        (self._name,) = self._network.inputs

    def forecast(self, past: Sequence[float]) -> float:
        if len(past) < self.window:
            return past[-1]
        newest = np.array(list(past)[-self.window :], np.float64)
        standardised = ((newest - self._mean) / self._deviation).astype(np.float32)
        predicted = float(self._network.run({self._name: standardised[None]})[0][0])
        return max(predicted * self._deviation + self._mean, self._least)


@dataclass(frozen=True)
class ForecastRecipe:
    """The published settings.

    Attributes:
        hidden, window: size of the LSTM's state, and length of its input.
        epochs, patience: maximum number, and number without improvement before early stopping.
        batch, learning_rate, weight_decay, clip: of AdamW, and the maximum norm of a gradient.
        held_out: share at the end of the series for validation.
        seed: of weights and batches.
    """

    hidden: int = 32
    window: int = 20
    epochs: int = 200
    patience: int = 20
    batch: int = 64
    learning_rate: float = 1e-3
    weight_decay: float = 1e-5
    clip: float = 1.0
    held_out: float = 0.2
    seed: int = 7


USUAL = ForecastRecipe()
METADATA = "bandwidth"


class Lstm(nn.Module):
    """One layer, and a linear map of its last state."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(1, hidden, batch_first=True), nn.Linear(hidden, 1)

    def forward(self, past: Tensor) -> Tensor:
        states, _ = self.lstm(past[..., None])
        found: Tensor = self.head(states[:, -1])[:, 0]
        return found


def train_forecast(series: Floats, file: Path, recipe: ForecastRecipe = USUAL) -> int:
    """Trains one-step prediction of the bandwidth; values are standardised with this series.

    Args:
        series: measured bandwidths in order [bytes/s], of the training part only.
        file: ``.onnx`` to write, for :class:`RecurrentForecast`.
        recipe: its settings.

    Returns:
        Epochs until the best validation error.

    Raises:
        ConfigError: for a series that is too short, or has values that are not finite and positive.
    """
    least = 2 * recipe.window + recipe.batch
    if len(series) < least or not (np.isfinite(series) & (series > 0.0)).all():
        raise ConfigError(f"a forecast needs at least {least} bandwidths above 0 to learn from, got {len(series)}")
    mean, deviation = float(series.mean()), max(float(series.std()), 1e-9 * float(series.mean()))
    values = torch.from_numpy(((series - mean) / deviation).astype(np.float32))
    past, following = values[:-1].unfold(0, recipe.window, 1), values[recipe.window :]
    kept = round(len(following) * (1.0 - recipe.held_out))
    torch.manual_seed(recipe.seed)
    model = Lstm(recipe.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.learning_rate, weight_decay=recipe.weight_decay)
    best, best_epoch, weights = float("inf"), 0, copy.deepcopy(model.state_dict())
    for epoch in range(1, recipe.epochs + 1):
        for rows in torch.randperm(kept).split(recipe.batch):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(past[rows]), following[rows]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
        with torch.no_grad():
            error = float(nn.functional.mse_loss(model(past[kept:]), following[kept:]))
        if error < best:
            best, best_epoch, weights = error, epoch, copy.deepcopy(model.state_dict())
        elif epoch - best_epoch >= recipe.patience:
            break
    model.load_state_dict(weights)
    told = {"window": recipe.window, "mean": mean, "deviation": deviation, "least": float(series.min())}
    write_whole(file, _as_onnx(model, recipe, told).SerializeToString())
    return best_epoch


def forecast_errors(forecast: Forecast, before: np.ndarray, after: np.ndarray) -> dict[str, float]:
    """Errors of one-step forecasts of ``after``, which follows ``before``, and of the last value as the forecast."""
    series_so_far = np.concatenate([before, after]).tolist()
    positions = range(len(before), len(series_so_far))
    predicted = np.array([forecast.forecast(series_so_far[max(0, position - 64) : position]) for position in positions])
    last = np.array(series_so_far[len(before) - 1 : -1])
    return {
        "inferences": float(len(after)),
        "mean": float(after.mean()),
        "forecast_mae": float(np.abs(predicted - after).mean()),
        "last_mae": float(np.abs(last - after).mean()),
        "forecast_rmse": float(np.sqrt(np.square(predicted - after).mean())),
        "last_rmse": float(np.sqrt(np.square(last - after).mean())),
        "mean_rmse": float(np.sqrt(np.square(before.mean() - after).mean())),
    }


def _as_onnx(model: Lstm, recipe: ForecastRecipe, metadata: dict[str, float]) -> onnx.ModelProto:
    """One LSTM operator and one product; PyTorch orders gates i f g o, ONNX i o f c."""
    weights = {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}

    def gates(name: str) -> np.ndarray:
        i, f, g, o = np.split(weights[name], 4)
        return np.concatenate([i, o, f, g])[None]

    arrays = {
        "W": gates("lstm.weight_ih_l0"), "R": gates("lstm.weight_hh_l0"),
        "B": np.concatenate([gates("lstm.bias_ih_l0"), gates("lstm.bias_hh_l0")], axis=1),
        "weight": weights["head.weight"].T.copy(), "bias": weights["head.bias"],
        "first": np.array([0], np.int64), "second": np.array([1], np.int64), "last": np.array([2], np.int64),
    }  # fmt: skip
    nodes = [
        helper.make_node("Transpose", ["past"], ["times"], perm=[1, 0]),
        helper.make_node("Unsqueeze", ["times", "last"], ["numbers"]),
        helper.make_node("LSTM", ["numbers", "W", "R", "B"], ["", "state"], hidden_size=recipe.hidden),
        helper.make_node("Squeeze", ["state", "first"], ["features"]),
        helper.make_node("Gemm", ["features", "weight", "bias"], ["column"]),
        helper.make_node("Squeeze", ["column", "second"], ["next"]),
    ]
    graph = helper.make_graph(
        nodes,
        "forecast",
        [helper.make_tensor_value_info("past", TensorProto.FLOAT, ["batch", recipe.window])],
        [helper.make_tensor_value_info("next", TensorProto.FLOAT, ["batch"])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    helper.set_model_props(proto, {METADATA: json.dumps(metadata)})
    onnx.checker.check_model(proto)
    return proto
