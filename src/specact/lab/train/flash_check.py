"""What FLASH's check tells of a flow policy at each noise level, and which one tells a wrong chunk from a right one.

A check whose deviation does not grow with the draft's true error accepts anything. So the deviation is measured for
chunks whose error is known: the target's own samples, the block's drafts, and the target's chunks for other windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specact.families.chunks.flow import Array, FlowPolicy
from specact.lab.rollout.statistics import roc_auc
from specact.lab.train.loop import Draw
from specact.observation import Window
from specact.rng import Role, stream
from specact.systems.flash import Block, FlashSettings, deviations, implied, noised

# Shares of noise that are looked at; the first two are the paper's.
LEVELS = (0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0)
# What is checked of every window.
KINDS = ("own", "block", "wrong")
# Of the target's own samples so many are to pass a fitted check.
_PASS = 0.9


@dataclass(frozen=True)
class CheckMeasured:
    """Deviations and true errors, in the flow's units: root mean square over dimensions, mean over executed actions.

    Attributes:
        deviation: ``[N, kind, level]``, see :data:`KINDS` and :data:`LEVELS`.
        error: distance to the target's noiseless chunk, ``[N, kind]``.
        most: the largest deviation over a chunk's executed actions, which decides whether all of it is accepted,
            ``[N, kind, level]``.
    """

    deviation: NDArray[np.float64]
    error: NDArray[np.float64]
    most: NDArray[np.float64]

    def describe(self) -> dict[str, Any]:
        """By noise level: slope and correlation of deviation and error, and what is accepted within .15.

        ``auroc``: how well the deviation tells the target's own samples from its chunks for another window.
        """
        rows = {}
        error = self.error.reshape(-1)
        for number, level in enumerate(LEVELS):
            found = self.deviation[..., number].reshape(-1)
            rows[f"{level:g}"] = {
                "slope": float(found @ error / (error @ error)),
                "correlation": float(np.corrcoef(found, error)[0, 1]),
                "auroc": _told_apart(self.most, number),
                **{
                    f"accepted_{kind}": float((self.most[:, place, number] <= 0.15).mean())
                    for place, kind in enumerate(KINDS)
                },
                **{kind: float(self.deviation[:, place, number].mean()) for place, kind in enumerate(KINDS)},
            }
        errors = {kind: float(self.error[:, place].mean()) for place, kind in enumerate(KINDS)}
        return {"windows": len(self.error), "error": errors, "levels": rows}


def measure_check(
    policy: FlowPolicy,
    block: Block,
    settings: FlashSettings,
    windows: Sequence[Window],
    seed: int,
    progress: Callable[[int], None],
) -> CheckMeasured:
    """Checks chunks of known error, see the module.

    Args:
        policy: the target.
        block: that drafts for it.
        settings: of its rounds; what is executed counts.
        windows: held out of the training of both; at least two.
        seed: of the noise.
        progress: told how many windows are done.
    """
    networks: Any = policy.networks
    calm = FlowPolicy(networks, policy.units, policy.spec, steps=policy.steps, spread=0.0)
    rngs = [stream(seed, Role.DATA, episode=Draw.NOISE, step=number) for number in range(len(windows))]
    kept: list[tuple[Array, Array, Array]] = []
    for window, rng in zip(windows, rngs, strict=True):
        tokens = networks.tokens([window])
        cache = networks.cache([window], tokens)
        truth = policy.denoised(calm.noise(rng)[None], cache, policy.steps)[0]
        own = policy.denoised(policy.noise(rng)[None], cache, policy.steps)[0]
        kept.append((truth, own, policy.padded(block.chunks(tokens)[0])))
        progress(len(kept) // 2)
    rows = []
    # The chunk of the window that is half of all away is for another scene.
    turned = np.roll(np.arange(len(windows)), len(windows) // 2)
    levels = np.array(LEVELS, np.float32)
    for number, window in enumerate(windows):
        cache, noise = networks.cache([window]), policy.noise(rngs[number])
        truth, own, drafted = kept[number]
        candidates = [own, drafted, kept[int(turned[number])][0]]
        mixed = [noised(chunk, noise, levels) for chunk in candidates]
        times = np.tile(np.float32(1.0) - levels, len(candidates))
        velocity = networks.velocity(np.concatenate(mixed), times, cache).reshape(len(candidates), *mixed[0].shape)
        # What pads actions is no part of the distance.
        acted, grippers = (slice(settings.execute), slice(policy.spec.actions)), settings.grippers
        found = np.stack([
            deviations(chunk[acted], implied(x, v, levels)[:, *acted], grippers)
            for chunk, x, v in zip(candidates, mixed, velocity, strict=True)
        ])  # fmt: skip
        error = np.stack([deviations(chunk[acted], truth[None, *acted], grippers)[0] for chunk in candidates])
        rows.append((found.mean(-1), error.mean(-1), found.max(-1)))
        progress((len(windows) + number + 1) // 2)
    return CheckMeasured(*(np.stack(column).astype(np.float64) for column in zip(*rows, strict=True)))


def fit_check(measured: CheckMeasured) -> tuple[float, float]:
    """The noise level that best tells the target's own samples from chunks for other windows, and its delta.

    Delta is such that nine of ten of the target's own samples pass whole.
    """
    best = max(range(len(LEVELS)), key=lambda number: _told_apart(measured.most, number))
    return LEVELS[best], float(np.quantile(measured.most[:, 0, best], _PASS))


def _told_apart(most: NDArray[np.float64], number: int) -> float:
    right, wrong = most[:, 0, number], most[:, 2, number]
    labels = np.concatenate([np.zeros(len(right), bool), np.ones(len(wrong), bool)])
    found = roc_auc(np.concatenate([right, wrong]), labels)
    assert found is not None, "there are both"
    return found
