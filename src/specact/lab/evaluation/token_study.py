"""Spec-VLA, KERV and HeiSD as a list of runs: each system beside the controls that could make it unnecessary."""

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
from specact.lab.evaluation.gain import measure_gain

_SYSTEMS = (
    "ar", "strict", "specvla", "specvla_20", "last", "filter", "kerv", "kerv_last", "kerv_walk", "heisd_fixed",
    "last_fixed", "retrieval",
)  # fmt: skip
_ALL = (
    "ar", "strict", "strict_last", "specvla", "specvla_5", "specvla_15", "specvla_20", "last", "filter", "kerv",
    "kerv_last", "kerv_walk", "kerv_no_tail", "kerv_printed", "heisd", "heisd_verified", "heisd_fixed", "last_fixed",
    "retrieval", "draft_9", "draft_fixed",
)  # fmt: skip
# Judged on the target's own path, without closing the loop.
_GAIN = (
    "ar", "strict", "strict_last", "strict_bigram", "specvla_5", "specvla", "specvla_15", "specvla_20", "last",
    "bigram", "filter", "random_tokens", "kerv", "heisd_verified",
)  # fmt: skip
# Of the gain, for targets with a draft policy.
_DRAFTED = ("strict_draft", "draft_9")


@dataclass(frozen=True)
class TokenChapter:
    """One token policy.

    Attributes:
        what: its table.
        gain: decodings that are compared on the target's own path.
        on_path: episodes of it.
    """

    what: Evaluation
    gain: tuple[str, ...]
    on_path: int

    @property
    def folder(self) -> str:
        """Below the study's."""
        return Path(self.what.bundle).name


def plan_tokens(*, seed: int, quick: bool) -> list[TokenChapter]:
    """The token policies that come with the package, cheap ones first.

    Args:
        seed: of everything random.
        quick: few episodes of each, to see that everything works.
    """
    hand = Evaluation("relocate-tokens", None, _SYSTEMS, 40, seed=seed, shard=10)
    arm = Evaluation("metaworld-tokens", None, _ALL, 100, seed=seed, shard=10, draft="metaworld-draft")
    chapters = [TokenChapter(hand, _GAIN, 5), TokenChapter(arm, _GAIN + _DRAFTED, 40)]
    if quick:
        return [
            replace(chapter, what=replace(chapter.what, episodes=count, shard=count), on_path=1)
            for chapter, count in zip(chapters, (1, 10), strict=True)
        ]
    return chapters


def gain_of(chapter: TokenChapter, out: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
    """Measures what there is to gain and writes it to ``out``.

    Raises:
        ConfigError: if the chapter's policy is no token policy.
    """
    what = chapter.what
    pair = load_pair(what.bundle, draft=what.draft)
    if not isinstance(pair, TokenPair):
        raise ConfigError(f"{what.bundle} is no token policy")
    found = measure_gain(
        pair, what.env or pair.env, chapter.gain, chapter.on_path, seed=what.seed,
        progress=lambda done, total: progress(f"gain on {chapter.folder}", done, total),
    )  # fmt: skip
    spec = pair.policy.spec
    told = {
        "bundle": pair.name, "fingerprint": pair.fingerprint, "episodes": chapter.on_path, "seed": what.seed,
        "tokens": spec.chunk * spec.actions, "strict": list(pair.drafters.settings.strict) if pair.drafters else [],
        "decodings": found,
    }  # fmt: skip
    write_json(out, told)
    return told
