"""A draft for somebody else's target: the windows' chunks are the target's answers, each asked for once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiny import quiet

from specact.errors import ConfigError, DataError
from specact.families.chunks.policy import Chunk
from specact.families.chunks.sources import Inputs, LoadedPolicy, chunk_policy
from specact.lab.data.episodes import Episodes
from specact.lab.data.generate import generate
from specact.lab.envs.ball import TASK
from specact.lab.train.dataset import Dataset, check_teacher, labelled, prepare
from specact.lab.train.loop import Progress
from specact.lab.train.recipe import ChunkRecipe
from specact.lab.train.train import train
from specact.observation import Field

RECIPE = ChunkRecipe(
    kind="flow", bundle="taught", env="ball", generate_episodes=4, chunk=4, layers=1, width=16, steps=3, batch=8
)


def taught_by(answer: Callable[[Chunk], Chunk], chunk: int = 6, fingerprint: str = "one") -> LoadedPolicy:
    """A target that makes ``[B, 2]``, repeated over its chunk, of the newest states."""

    @chunk_policy(observation={"state": (8,), "goal": Field((2,), history=0)}, chunk=chunk, actions=2, rate_hz=20.0)
    def policy(inputs: Inputs) -> Chunk:
        return np.repeat(answer(inputs["state"][:, -1])[:, None], chunk, axis=1)

    return LoadedPolicy("target", policy, None, fingerprint, "ball")


def teach(dataset: Dataset, teacher: LoadedPolicy, folder: Path, progress: Progress = quiet) -> None:
    with labelled(dataset, teacher, 4, folder, 0, progress):
        pass


@pytest.fixture
def dataset() -> Dataset:
    return prepare(generate(TASK, 4, seed=0, noise=0.3), RECIPE)


def actions(dataset: Dataset) -> Any:
    """What the training windows should predict, in the environment's units, and the newest states."""
    chunks = dataset.centre.numpy() + dataset.scale.numpy() * dataset.train.chunks.numpy()
    return chunks, dataset.train.episodes.numbers("state")


def test_answers_stay_in_the_range_that_was_demonstrated(dataset: Dataset, tmp_path: Path) -> None:
    teach(dataset, taught_by(lambda state: np.full((len(state), 2), 1e6, np.float32)), tmp_path)
    np.testing.assert_allclose(dataset.train.chunks.numpy(), 1.0, atol=1e-5)


def test_a_run_that_was_stopped_does_not_ask_again(tmp_path: Path) -> None:
    sizes: list[int] = []

    def answer(state: Chunk) -> Chunk:
        sizes.append(len(state))
        return 0.1 * state[:, :2]

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    episodes = generate(TASK, 4, seed=0, noise=0.3)
    with pytest.raises(KeyboardInterrupt):
        teach(prepare(episodes, RECIPE), taught_by(answer), tmp_path, stop)
    rerun = prepare(episodes, RECIPE)
    before = rerun.train.chunks.clone()
    teach(rerun, taught_by(answer), tmp_path)
    assert sum(sizes) == episodes.steps
    chunks, states = actions(rerun)
    assert chunks.shape == (len(states), 4, 2) and not np.allclose(before.numpy(), rerun.train.chunks.numpy())
    np.testing.assert_allclose(chunks, np.repeat(0.1 * states[:, None, :2], 4, axis=1), atol=1e-6)


def test_an_answer_that_is_not_finite_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="target has no finite answer"):
        teach(dataset, taught_by(lambda state: np.full((len(state), 2), np.nan)), tmp_path)


@pytest.mark.parametrize(("chunk", "actions", "rate_hz", "names", "why"), [
    (7, 2, 20.0, "state goal", "answers with 6 actions; the recipe's chunk of 7 is longer"),
    (4, 1, 20.0, "state goal", "has 2 actions at 20 Hz, the demonstrations 1 at 20 Hz"),
    (4, 2, 10.0, "state goal", "has 2 actions at 20 Hz, the demonstrations 2 at 10 Hz"),
    (4, 2, 20.0, "state", r"sees goal, which the demonstrations do not hold .*\[observations\]"),
    (4, 2, 20.0, "state goal", r"sees state of shape \(8,\), the demonstrations hold one of \(2,\); .* size"),
])  # fmt: skip
def test_a_target_that_cannot_label_the_demonstrations_is_refused(
    chunk: int, actions: int, rate_hz: float, names: str, why: str
) -> None:
    zeros = np.zeros((4, 2), np.float32)
    episodes = Episodes(dict.fromkeys(names.split(), zeros), zeros[:, :actions], np.array([2, 4]), rate_hz)
    with pytest.raises(ConfigError, match=why):
        check_teacher(taught_by(lambda state: state[:, :2]), chunk, episodes)


def test_a_target_that_is_told_what_to_do_is_told_what_the_demonstration_shows(tmp_path: Path) -> None:
    @chunk_policy(observation={"state": (8,)}, chunk=4, actions=2, rate_hz=20.0, instruction=True)
    def policy(inputs: Inputs, instruction: list[str | None]) -> Chunk:
        sides = np.array([{"left": -0.5, "right": 0.5}[str(text)] for text in instruction], np.float32)
        return np.broadcast_to(sides[:, None, None], (len(sides), 4, 2))

    teacher = LoadedPolicy("target", policy, None, "one", "ball")
    episodes = generate(TASK, 4, seed=0, noise=0.3)
    told = replace(episodes, instructions=("left", "right", "right", "left"))
    check_teacher(teacher, 4, told)
    data = prepare(told, RECIPE)
    teach(data, teacher, tmp_path)
    chunks, kept = actions(data)[0], data.train.episodes
    assert set(kept.instructions or ()) == {"left", "right"}
    for span, text in zip(kept.slices(), kept.instructions or (), strict=True):
        np.testing.assert_allclose(chunks[span], 0.5 if text == "right" else -0.5, atol=1e-6)
    with pytest.raises(ConfigError, match="target needs an instruction, and these demonstrations do not say"):
        check_teacher(teacher, 4, episodes)


def test_a_run_says_whose_answers_it_learned_and_belongs_to_that_target(tmp_path: Path) -> None:
    out = tmp_path / "run"
    made = train(RECIPE, tmp_path, out, quiet, teacher=taught_by(lambda state: 0.1 * state[:, :2]))
    manifest = json.loads((made.bundles[0] / "manifest.json").read_text())
    assert manifest["recipe"]["teacher"] == ["target", "one"]
    assert not list(out.glob("answers-*"))
    with pytest.raises(ConfigError, match="holds a run of another recipe"):
        train(RECIPE, tmp_path, out, quiet, teacher=taught_by(lambda state: state[:, :2], fingerprint="two"))
