"""Scores that a robot could compute, fitted on values of the oracle, and the controls that they have to beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Model = Callable[[Floats], Floats]
DEVICE = slice(0, 3)  # of the scores along: those that a device has; the rejection oracle comes after them
NETWORKS, STEPS = 4, 300


@dataclass(frozen=True)
class Head:
    """What a head is fitted on, in words, and the inputs of a state."""

    about: str
    inputs: Callable[[Mapping[str, Floats]], Floats]
    shuffled: bool = False


def _device(rows: Mapping[str, Floats]) -> Floats:
    return np.concatenate([rows["seen"], rows["past"], np.nan_to_num(rows["scores"][..., DEVICE], posinf=9.0)], axis=-1)


def _privileged(rows: Mapping[str, Floats]) -> Floats:
    return np.concatenate([_device(rows), rows["hidden"], rows["scores"][..., DEVICE.stop :]], axis=-1)


HEADS = {
    "value head": Head("all that a device has: window, draft, other gates' scores, its own requests so far", _device),
    "shuffled head": Head("the same, values shuffled among states", _device, shuffled=True),
    "time head": Head("the number of the inference", lambda rows: rows["past"][..., :1]),
    "history head": Head("that, the requests so far and the inferences since the last one", lambda rows: rows["past"]),
    "privileged head": Head("the device's, the target's probabilities and the world after the proposal", _privileged),
}


def ridge(x: Floats, y: Floats, seed: int, features: int = 0) -> Model:
    """Linear in the inputs ``[S, D]`` and in random features of them."""
    rng, mean, scale = np.random.default_rng(seed), x.mean(0), x.std(0) + 1e-6
    layer, offset = rng.standard_normal((x.shape[1], features)) / np.sqrt(x.shape[1]), rng.standard_normal(features)

    def expand(x: Floats) -> Floats:
        scaled = (x - mean) / scale
        return np.concatenate([np.ones((len(x), 1)), scaled, np.maximum(scaled @ layer + offset, 0.0)], axis=1)

    known = expand(x)
    weights = np.linalg.solve(known.T @ known + 0.1 * len(x) * np.eye(known.shape[1]), known.T @ y)
    return lambda x: expand(x) @ weights


def networks(x: Floats, y: Floats, seed: int) -> Model:
    """The mean of some networks of two layers, each fitted on a bootstrap sample of the states."""
    import torch

    torch.manual_seed(seed)
    mean, scale = x.mean(0), x.std(0) + 1e-6
    members = []
    for _ in range(NETWORKS):
        drawn = torch.randint(len(x), (len(x),))
        inputs = torch.tensor((x - mean) / scale, dtype=torch.float32)[drawn]
        wanted = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[drawn]
        net = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 64),
            torch.nn.ReLU(), torch.nn.Linear(64, 1),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
        for _ in range(STEPS):
            loss = torch.nn.functional.mse_loss(net(inputs)[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        members.append(net.eval())

    @torch.no_grad()
    def predict(x: Floats) -> Floats:
        inputs = torch.tensor((x - mean) / scale, dtype=torch.float32)
        return torch.stack([net(inputs)[:, 0] for net in members]).mean(0).double().numpy()

    return predict


MODELS: dict[str, Callable[[Floats, Floats, int], Model]] = {
    "linear": ridge,
    "random features": lambda x, y, seed: ridge(x, y, seed, features=300),
    "networks": networks,
}


def fit(rows: Mapping[str, Any], head: Head, model: str, seed: int) -> Model:
    """A model of the value over the head's inputs."""
    values = rows["value"]
    if head.shuffled:
        values = np.random.default_rng(seed).permutation(values)
    return MODELS[model](head.inputs(rows), values, seed)


def held_out(rows: Mapping[str, Any], name: str, model: str = "random features", seed: int = 0) -> Floats:
    """The value of every state as a head predicts it that was fitted on other episodes, in five folds."""
    head, scores, fold = HEADS[name], np.zeros(len(rows["episode"])), rows["episode"] % 5
    for held in np.unique(fold):
        part = {column: values[fold != held] for column, values in rows.items()}
        scores[fold == held] = fit(part, head, model, seed)(head.inputs(rows)[fold == held])
    return scores


def schedule(rows: Mapping[str, Any]) -> Floats:
    """The share of episodes of the greedy gate that ask at an inference, by its number."""
    number = rows["past"][:, 0].astype(int)
    asked = np.bincount(number, weights=rows["asked"])
    return asked / np.maximum(np.bincount(number), 1)
