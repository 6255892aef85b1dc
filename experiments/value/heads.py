"""Scores that a robot could compute, fitted on values of the oracle, and the controls that they have to beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specact.lab.envs.swarm import SwarmEnv
from specact.types import Floats

Model = Callable[[Floats], Floats]
Rows = Mapping[str, Any]
DEVICE = 3  # how many of the recorded scores a device can compute; they are the first ones
FEATURES = 300
STATE = 6 * SwarmEnv().drones  # numbers of a world's state, with its targets


def ridge(x: Floats, y: Floats, seed: int) -> Model:
    """Linear in the inputs ``[S, D]`` and in random features of them."""
    rng, mean, scale = np.random.default_rng(seed), x.mean(0), x.std(0) + 1e-6
    layer, offset = rng.standard_normal((x.shape[1], FEATURES)) / np.sqrt(x.shape[1]), rng.standard_normal(FEATURES)

    def expand(x: Floats) -> Floats:
        scaled = (x - mean) / scale
        return np.concatenate([np.ones((len(x), 1)), scaled, np.maximum(scaled @ layer + offset, 0.0)], axis=1)

    known = expand(x)
    weights = np.linalg.solve(known.T @ known + 0.1 * len(x) * np.eye(known.shape[1]), known.T @ y)
    return lambda x: expand(x) @ weights


@dataclass(frozen=True)
class Head:
    """A score that is fitted on ``inputs`` of states, ``about`` in words; ``shuffled``: on values of other states."""

    about: str
    inputs: Callable[[Rows], Floats]
    shuffled: bool = False

    def fit(self, rows: Rows, seed: int) -> Model:
        """The model for rows with their values."""
        value: Floats = rows["value"]
        values = np.random.default_rng(seed).permutation(value) if self.shuffled else value
        return ridge(self.inputs(rows), values, seed)

    def held_out(self, rows: Rows, seed: int = 0) -> Floats:
        """The value of every state as predicted by a model of other episodes, in five folds."""
        scores, fold = np.zeros(len(rows["value"])), rows["episode"] % 5
        for held in np.unique(fold):
            part = {name: column[fold != held] for name, column in rows.items()}
            scores[fold == held] = self.fit(part, seed)(self.inputs(rows)[fold == held])
        return scores


def summary(rows: Rows) -> Floats:
    """Scores of other gates, inferences and requests so far, and inferences since the last request."""
    return np.concatenate([np.nan_to_num(rows["scores"][:, :DEVICE], posinf=9.0), rows["past"]], axis=1)


def everything(rows: Rows) -> Floats:
    """The summary, the window, the draft's probabilities and the proposed actions."""
    return np.concatenate([summary(rows), rows["seen"]], axis=1)


def geometry(world: Floats) -> Floats:
    """A swarm's distances to targets, speeds, and smallest gaps between drones, each in order."""
    position, speed, target = np.moveaxis(world.reshape(len(world), 3, -1, 2), 1, 0)
    first, second = np.triu_indices(position.shape[1], 1)
    parts = position - target, speed, position[:, first] - position[:, second]
    return np.concatenate([np.sort(np.linalg.norm(part, axis=2))[:, :5] for part in parts], axis=1)


def placed(rows: Rows) -> Floats:
    """The summary, and the geometry now."""
    return np.concatenate([summary(rows), geometry(rows["seen"][:, :STATE])], axis=1)


def privileged(rows: Rows) -> Floats:
    """The summary and geometry, the rejection by the target's probabilities, and the geometry after the proposal."""
    return np.concatenate([placed(rows), rows["scores"][:, DEVICE:], geometry(rows["hidden"][:, -STATE:])], axis=1)


CANDIDATES = {
    "summary": Head("other gates' scores and its own requests so far", summary),
    "geometry": Head("these, and distances, speeds and gaps of the drones", placed),
    "everything": Head("scores, requests, window, draft and proposal", everything),
}
CONTROLS = {
    "time head": Head("the number of the inference", lambda rows: rows["past"][:, :1]),
    "history head": Head("that, requests so far, inferences since the last", lambda rows: rows["past"]),
    "privileged head": Head("geometry now and after the proposal, and the target's rejection", privileged),
}


def all_of(chosen: str) -> dict[str, Head]:
    """The head that was chosen, and its controls."""
    head = CANDIDATES[chosen]
    shuffled = replace(head, about="the same, values shuffled among states", shuffled=True)
    return {"value head": head, "shuffled head": shuffled, **CONTROLS}


def schedule(rows: Rows) -> Floats:
    """The share of episodes that ask at an inference, by its number."""
    number = rows["past"][:, 0].astype(int)
    return np.bincount(number, weights=rows["asked"]) / np.maximum(np.bincount(number), 1)
