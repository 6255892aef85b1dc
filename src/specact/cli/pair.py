"""``specact pair`` makes a pair of two chunk policies."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from specact.cli.options import Flat, Options
from specact.cli.output import print_result
from specact.families.chunks.pair import PairSettings
from specact.load import make_pair


@dataclass(frozen=True, kw_only=True)
class Pair(Options):
    """Make a pair of two chunk policies: a folder that run, serve, calibrate and eval take.

    A policy is a bundle, BUNDLE#draft or BUNDLE#target of a pair of action codes, a .toml file that describes an ONNX
    file, lerobot:PATH@HZ for what LeRobot saved, openpi:ws://HOST:PORT#FILE.toml for a policy on an openpi server, or
    MODULE:NAME. The last four are named again, with --draft or --target, whenever the pair is used.
    """

    draft: str  # the small policy, on the robot
    target: str  # the large policy
    out: Path  # folder to create
    settings: Flat[PairSettings] = field(default_factory=PairSettings)
    json: bool = False  # print the result as JSON

    def run(self) -> None:
        made = make_pair(self.out, self.draft, self.target, self.settings)
        found = {"name": made.name, "fingerprint": made.fingerprint, "execute": made.execute}
        executed = f"{made.execute} of {made.parts.target_spec.chunk} actions executed per chunk"
        print_result(self.json, found, [f"{self.out}: draft {self.draft}, target {self.target}, {executed}"])
