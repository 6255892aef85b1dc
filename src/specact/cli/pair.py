"""``specact pair`` ties a draft and a target that answer with chunks of actions."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from specact.cli.output import print_json, results


def pair(
    draft: str,
    target: str,
    out: Path,
    execute: int | None = None,
    accept_within: float = 0.0,
    overlap: Literal["drop", "average"] = "drop",
    env: str = "",
    draft_steps: int = 2,
    target_steps: int = 10,
    json: bool = False,
) -> None:
    """Make a pair of two chunk policies: a folder that calibrate, eval, serve and run take as their bundle.

    A policy is a flow bundle, BUNDLE#draft or BUNDLE#target of a pair of action codes, a .toml file that describes an
    ONNX file, or MODULE:NAME. The last two have to be named again, with --draft or --target, whenever the pair is used.

    Args:
        draft: the small policy, on the robot.
        target: the large policy.
        out: folder to create.
        execute: actions of a chunk that are executed before the next inference; the whole of the shorter chunk if not
            given.
        accept_within: drafted actions are executed up to the first that is further than this from the target's (root
            mean square, in units in which the range of the actions is [-1, 1]); 0 takes the target's chunk whole.
        overlap: average takes the mean of all chunks that predict a control step.
        env: environment the pair is for; --env of eval and calibrate if not given.
        draft_steps: Euler steps of a draft that is a flow policy.
        target_steps: Euler steps of a target that is a flow policy.
        json: print the manifest as JSON.
    """
    from specact.families.chunks.folder import make_pair

    made = make_pair(
        out, draft, target, execute=execute, accept_within=accept_within, overlap=overlap, env=env,
        draft_steps=draft_steps, target_steps=target_steps,
    )  # fmt: skip
    if json:
        print_json({"name": made.name, "fingerprint": made.fingerprint, "execute": made.execute})
        return
    results.print(
        f"{out}: draft {draft}, target {target}, {made.execute} of {made.target_spec.chunk} actions executed per chunk",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
