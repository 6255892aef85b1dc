"""``specact pair`` makes a pair of two chunk policies."""

from __future__ import annotations

from pathlib import Path

import tyro

from specact.cli.output import print_json, results
from specact.families.chunks.folder import PairSettings

_DEFAULTS = PairSettings()


def pair(
    draft: str,
    target: str,
    out: Path,
    settings: tyro.conf.OmitArgPrefixes[PairSettings] = _DEFAULTS,
    json: bool = False,
) -> None:
    """Make a pair of two chunk policies: a folder that calibrate, eval, serve and run take as their bundle.

    A policy is a flow bundle, BUNDLE#draft or BUNDLE#target of a pair of action codes, a .toml file that describes an
    ONNX file, lerobot:PATH@HZ for what LeRobot saved and its control rate, openpi:ws://HOST:PORT#FILE.toml for a policy
    on a server of openpi's protocol, or MODULE:NAME. The last four have to be named again, with --draft or --target,
    whenever the pair is used.

    Args:
        draft: the small policy, on the robot.
        target: the large policy.
        out: folder to create.
        json: print name, fingerprint and executed actions as JSON.
    """
    from specact.families.chunks.folder import make_pair

    made = make_pair(out, draft, target, settings)
    if json:
        print_json({"name": made.name, "fingerprint": made.fingerprint, "execute": made.execute})
        return
    results.print(
        f"{out}: draft {draft}, target {target}, {made.execute} of {made.target_spec.chunk} actions executed per chunk",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
