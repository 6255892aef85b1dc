"""FLASH's block learns a flow's noiseless chunks; and what its check tells of a flow is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from tests.tiny import quiet

from specact.errors import ConfigError
from specact.families.chunks.flow import FlowPolicy, FlowUnits, load_flow
from specact.families.chunks.policy import ChunkSpec
from specact.lab.train.flash import KINDS, LEVELS, fit_check, measure_check, prefix_weights
from specact.lab.train.recipe import FlashRecipe
from specact.lab.train.train import train
from specact.load import load_policy
from specact.observation import Window, vectors
from specact.systems.flash import FlashSettings
from specact.systems.flow import load_flash

RECIPE = FlashRecipe(
    kind="flash", bundle="small", target="", execute=3, heads=2, steps=150, batch=32, learning_rate=5e-3, warmup=5,
    average=0.95,
)  # fmt: skip


@pytest.fixture(scope="module")
def trained(tiny_flow: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("flash") / "run"
    train(structs.replace(RECIPE, target=str(tiny_flow)), Path(), out, quiet)
    return out


def test_the_block_answers_as_the_target_without_noise(trained: Path, tiny_flow: Path) -> None:
    target = load_flow(tiny_flow)
    made = load_flash(trained / "bundles" / "small", load_policy(str(tiny_flow)))
    assert made.spec.settings.execute == 3 and made.spec.settings.levels[0] in LEVELS
    rng, calm = np.random.default_rng(0), target.policy(spread=0.0)
    fields = target.spec.observation.fields
    windows = [
        Window({name: rng.uniform(-0.5, 0.5, field.window_shape).astype(np.float32) for name, field in fields.items()})
        for _ in range(64)
    ]
    drafted = made.block.chunks(target.networks.tokens(windows))
    wanted = np.stack([target.units.to_flow(calm.infer(window, np.random.default_rng(0))) for window in windows])
    error = np.square(drafted - wanted).mean()
    # What an answer that does not look would reach.
    assert error < 0.5 * wanted.var(axis=0).mean()
    assert np.square(drafted - np.roll(wanted, 1, axis=0)).mean() > 2.0 * error


def test_what_the_check_tells_is_written_into_its_manifest(trained: Path) -> None:
    told = json.loads((trained / "bundles" / "small" / "manifest.json").read_text())["check"]
    assert list(told["levels"]) == [f"{level:g}" for level in LEVELS]
    assert not list(trained.glob("answers-*"))


@pytest.mark.parametrize(("changes", "said"), [
    ({"execute": 7}, "execute and grippers"), ({"grippers": (2,)}, "execute and grippers"), ({"heads": 3}, "heads"),
])  # fmt: skip
def test_what_does_not_fit_the_target_is_refused(
    tiny_flow: Path, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        train(structs.replace(RECIPE, target=str(tiny_flow), **changes), Path(), tmp_path / "run", quiet)


def test_weights_are_those_of_the_paper() -> None:
    np.testing.assert_allclose(
        prefix_weights(np.array([1, 3]), 4), [[1, 0.1, 0.1, 0.1], [1, 0.9, 0.81, 0.1]], rtol=1e-6
    )


class Known:
    """A flow whose only clean chunk for a window is known: all its actions are what the window shows.

    Args:
        expert: ``denoiser``, the ideal one, or ``smooth``, whose velocity does not grow towards the data.
    """

    def __init__(self, expert: str) -> None:
        self._expert = expert

    def tokens(self, windows: Any) -> np.ndarray:
        return np.stack([window["state"] for window in windows])

    def cache(self, windows: Any, tokens: np.ndarray | None = None) -> np.ndarray:
        return self.tokens(windows)

    def velocity(self, chunks: np.ndarray, times: np.ndarray, cache: np.ndarray) -> np.ndarray:
        rest = np.maximum(1.0 - times, 1e-3)[:, None, None]
        if self._expert == "denoiser":
            return np.asarray((cache - chunks) / rest, np.float32)
        return np.asarray(cache - chunks, np.float32)


class Same:
    """Drafts what the window shows."""

    def chunks(self, tokens: np.ndarray) -> np.ndarray:
        return np.repeat(tokens, 4, axis=1)


def measured(expert: str) -> Any:
    units = FlowUnits(*(np.full(2, value, np.float32) for value in (0.0, 1.0, -9.0, 9.0)))
    policy = FlowPolicy(Known(expert), units, ChunkSpec(vectors(1, state=2), 4, 2, 10.0))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    windows = [Window({"state": rng.uniform(-2.0, 2.0, (1, 2)).astype(np.float32)}) for _ in range(40)]
    return measure_check(policy, Same(), FlashSettings(3), windows, 0, lambda done: None)  # type: ignore[arg-type]


def test_the_deviation_of_an_ideal_denoiser_is_the_error() -> None:
    found = measured("denoiser").describe()
    for level in found["levels"].values():
        assert level["slope"] == pytest.approx(1.0, abs=0.02) and level["auroc"] == 1.0
    assert found["error"]["block"] == pytest.approx(0.0, abs=1e-5)


def test_a_smooth_expert_is_told_by_its_slope() -> None:
    found = measured("smooth").describe()["levels"]
    slopes = [level["slope"] for level in found.values()]
    assert slopes == sorted(slopes) and slopes[0] < 0.15
    # What the paper's noise levels accept of chunks for other windows.
    assert found["0.05"]["accepted_wrong"] > 0.8 and found["1"]["accepted_wrong"] < 0.2


def test_nine_of_ten_of_the_target_s_own_samples_pass_a_fitted_check() -> None:
    found = measured("smooth")
    level, within = fit_check(found)
    own = found.most[:, KINDS.index("own"), LEVELS.index(level)]
    assert (own <= within).mean() == pytest.approx(0.9, abs=0.03)
