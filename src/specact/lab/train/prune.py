"""History pruning: a VQ-BeT that looks at fewer observations, without being trained again.

A lever of TISED: attention costs less where there is less to read, and what happened earlier is not known any more.
"""

from __future__ import annotations

from pathlib import Path

from specact.families.codes.bundle import Bundle
from specact.lab.train.export import export_policy
from specact.lab.train.rebuild import Role, rebuild


def prune_history(bundle: Bundle, window: int, out: Path, role: Role = "target") -> Path:
    """Writes the variant of a pair's policy that looks at the newest ``window`` observations, as an ``.onnx`` file.

    It runs like the original, with the bundle's spec but for ``window``. How it stays as trained: see
    :func:`~specact.lab.train.rebuild.rebuild`.

    Args:
        bundle: a pair.
        window: k, 1 to T; with T the answers are the original's.
        out: file to write.
        role: which of the pair.

    Returns:
        ``out``.

    Raises:
        ConfigError: if the window is out of range, the manifest does not tell the architecture, or the file cannot be
            written.
    """
    export_policy(rebuild(bundle, role, window), out, half=bundle.manifest["recipe"]["precision"] == "float16")
    return out
