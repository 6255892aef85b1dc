"""``specact doctor`` says what this installation can do and how fast it is."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from specact.cli.output import print_json, results

EXTRAS = {
    "sim": ("gymnasium", "mujoco", "gymnasium-robotics", "gym-pusht", "pyarrow", "scipy"),
    "train": ("torch", "onnx", "onnxscript", "zarr", "h5py", "pyarrow"),
    "report": ("matplotlib",),
}


def doctor(bundle: str = "ball", json: bool = False) -> None:
    """Say what this installation can do, and how long the policies of a bundle take here.

    Args:
        bundle: path or name of the bundle to try.
        json: print the findings as JSON.
    """
    import onnxruntime

    from specact import __version__
    from specact.policies.bundle import load_bundle
    from specact.policies.timing import measure_inference

    loaded = load_bundle(bundle)
    missing = {extra: [name for name in packages if not _installed(name)] for extra, packages in EXTRAS.items()}
    findings = {
        "specact": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "providers": onnxruntime.get_available_providers(),
        "missing": missing,
        "bundle": str(loaded.path),
        "fingerprint": loaded.fingerprint,
        "draft_ms": 1e3 * measure_inference(loaded.draft, loaded.spec),
        "target_ms": 1e3 * measure_inference(loaded.target, loaded.spec),
        "period_ms": 1e3 / loaded.spec.rate_hz,
    }
    if json:
        print_json(findings)
        return
    for name, value in findings.items():
        if name != "missing":
            shown = f"{value:.3f}" if isinstance(value, float) else value
            results.print(f"{name:12} {shown}", highlight=False, soft_wrap=True)
    for extra, names in missing.items():
        state = f"missing {', '.join(names)}; pip install 'specact\\[{extra}]'" if names else "complete"
        results.print(f"extra {extra:6} {state}", highlight=False, soft_wrap=True)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
