"""The study of token policies as a list of runs: Spec-VLA, KERV and HeiSD, each with its controls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specact.errors import ConfigError
from specact.families.load import load_pair
from specact.families.tokens.pair import TokenPair
from specact.files import write_json
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.evaluation.gain import TOLERANCES, measure_drafters, measure_gain

_SYSTEMS = (
    "ar", "strict", "strict_last", "specvla", "specvla_5", "specvla_15", "specvla_20", "specvla_uniform",
    "specvla_device", "last", "filter", "kerv", "kerv_fixed", "kerv_last", "kerv_walk", "kerv_no_tail", "kerv_printed",
    "heisd", "heisd_verified", "heisd_no_switch", "heisd_similar", "heisd_similar_random", "heisd_fixed",
    "heisd_fixed_random", "last_fixed", "retrieval",
)  # fmt: skip
# Compared open loop, on the target's own rollouts.
_GAIN = (
    "ar", "strict", "strict_last", "strict_bigram", "specvla_5", "specvla", "specvla_15", "specvla_20",
    "specvla_device", "last", "bigram", "filter", "random_tokens", "perfect", "kerv", "heisd_verified", "heisd_fixed",
)  # fmt: skip
# Also compared so, for targets with a draft policy.
_DRAFTED = ("strict_draft", "draft_9", "draft_fixed")
_EPISODES = 200
# Of the inferences that heisd_similar verifies: as the fixed pattern.
_RATE = 1.0 / 3.0


@dataclass(frozen=True)
class TokenStudy:
    """The study of one token policy.

    Attributes:
        evaluation: its evaluation in closed loop.
        gain: decodings that are compared on the target's own rollouts.
        on_path: episodes of these rollouts.
    """

    evaluation: Evaluation
    gain: tuple[str, ...]
    on_path: int

    @property
    def folder(self) -> str:
        """Its folder below the study's."""
        return Path(self.evaluation.bundle).name


def plan_tokens(*, seed: int, quick: bool) -> list[TokenStudy]:
    """The token policies that come with the package, cheap ones first.

    Args:
        seed: random seed.
        quick: few episodes of each, for a smoke test.
    """
    # It has no gripper, so that a strict one changes nothing.
    ungripped = tuple(name for name in _SYSTEMS if name != "specvla_uniform")
    hand = Evaluation("relocate-tokens", None, ungripped, _EPISODES, seed=seed, shard=50, rate=_RATE)
    kitchen = Evaluation("kitchen-tokens", None, _SYSTEMS, _EPISODES, seed=seed, shard=50, rate=_RATE)
    drafted = (*_SYSTEMS, "draft_9", "draft_fixed")
    arm = Evaluation(
        "metaworld-tokens", None, drafted, _EPISODES, seed=seed, shard=10, draft="metaworld-draft", rate=_RATE
    )
    studies = [TokenStudy(hand, _GAIN, 5), TokenStudy(kitchen, _GAIN, 3), TokenStudy(arm, _GAIN + _DRAFTED, 40)]
    if quick:
        return [
            replace(study, evaluation=replace(study.evaluation, episodes=count, shard=count), on_path=1)
            for study, count in zip(studies, (1, 1, 10), strict=True)
        ]
    return studies


def write_gain(study: TokenStudy, out: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Compares decodings and drafters on the target's own rollouts, and writes the result to ``out``.

    Raises:
        ConfigError: if the policy is no token policy, or has no drafters.
    """
    evaluation = study.evaluation
    pair = load_pair(evaluation.bundle, draft=evaluation.draft)
    if not isinstance(pair, TokenPair):
        raise ConfigError(f"{evaluation.bundle} is no token policy")
    env, seed, episodes = evaluation.env or pair.env, evaluation.seed, study.on_path

    def told(what: str) -> Callable[[int, int], None]:
        return lambda done, total: progress(f"{what} on {study.folder}", done, total)

    spec = pair.policy.spec
    summary = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "episodes": episodes, "seed": seed,
        "tokens": spec.chunk * spec.actions, "strict": list(pair.drafters.settings.strict) if pair.drafters else [],
        "decodings": measure_gain(pair, env, study.gain, episodes, seed=seed, progress=told("gain")),
        "tolerances": list(TOLERANCES),
        "drafters": measure_drafters(pair, env, episodes, seed=seed, progress=told("passes")),
    }  # fmt: skip
    write_json(out, summary)
    return summary
