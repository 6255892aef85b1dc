"""A run folder's manifest: the evaluation's settings, the machine, and the accounted times."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from specact import __version__
from specact.errors import ConfigError
from specact.families.codes.pair import CodeParts
from specact.families.head import head_fingerprint
from specact.files import write_json
from specact.lab.evaluation.cost import measure
from specact.lab.evaluation.evaluation import Evaluation
from specact.lab.rollout.families import depends_on_content
from specact.lab.rollout.methods import Method
from specact.pair import Pair

_MEASURED = "every time is measured over real sockets; the simulated world waits"
_ALONE = "every time is measured, with draft and target in one process and no link; the simulated world waits"
_ACCOUNTED = "times are accounted in virtual time as draft + gate + link + target, one after the other as in the paper"


def claim(out: Path, evaluation: Evaluation, bundle: Pair[Any], env: str, command: str) -> dict[str, Any]:
    """Creates the run folder's manifest, or reads the one of the same run to resume it.

    Raises:
        ConfigError: if the folder holds another run or a damaged manifest, or a method needs a head that is not there.
    """
    weights = {"fingerprint": bundle.fingerprint}
    if isinstance(bundle.parts, CodeParts) and any(method.proposes == "head" for method in evaluation.resolved):
        # The bundle's fingerprint does not cover the head. Learned gates name it in their calibrations.
        weights["head"] = head_fingerprint(bundle)
    methods: dict[str, Any] = {"methods": [method.name for method in evaluation.resolved]}
    if values := [method for method in evaluation.methods if isinstance(method, Method)]:
        methods["compositions"] = [_plain(method) for method in values]
    request = json.loads(json.dumps(dataclasses.asdict(evaluation) | methods | {"env": env} | weights))
    path = out / "manifest.json"
    if path.exists():
        try:
            manifest = json.loads(path.read_text())
            stored, stored_command = manifest["evaluation"], manifest["command"]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is damaged ({error}); choose another --out, or remove that folder") from None
        if stored != request:
            raise ConfigError(f"{out} holds another run ({stored_command}); choose another --out")
        return dict(manifest)
    manifest = {
        "command": command,
        "specact": __version__,
        "evaluation": request,
        "timing": dataclasses.asdict(measure(evaluation, bundle)),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "onnxruntime": onnxruntime.__version__,
        },
        "order": _MEASURED if evaluation.realtime else _ALONE if depends_on_content(bundle) else _ACCOUNTED,
    }
    write_json(path, manifest)
    return manifest


def _plain(method: Method) -> dict[str, Any]:
    """What determines the results of a method that has no name of its own."""
    return {name: value for name, value in dataclasses.asdict(method).items() if name not in ("about", "rivals")}
