"""The optional packages: which extra of the installation brings which of them."""

from __future__ import annotations

from specact.errors import MissingExtraError

# Extra to module to package, as in pyproject.toml. Pillow comes with Matplotlib, so that it is listed there too; the
# first extra that lists a package is the one that is advised.
EXTRAS: dict[str, dict[str, str]] = {
    "sim": {
        "gymnasium": "gymnasium", "mujoco": "mujoco", "gymnasium_robotics": "gymnasium-robotics",
        "gym_pusht": "gym-pusht", "metaworld": "metaworld", "pymunk": "pymunk", "pyarrow": "pyarrow", "scipy": "scipy",
    },
    "report": {"matplotlib": "matplotlib", "PIL": "pillow", "jinja2": "jinja2", "av": "av"},
    "train": {
        "torch": "torch", "onnx": "onnx", "onnxscript": "onnxscript", "zarr": "zarr", "h5py": "h5py",
        "pyarrow": "pyarrow", "av": "av", "PIL": "pillow",
    },
    "server": {
        "picows": "picows", "uvloop": "uvloop",
        "prometheus_client": "prometheus-client", "PIL": "pillow",
    },
    "record": {"mcap": "mcap", "PIL": "pillow"},
    "retrieval": {"voyager": "voyager"},
    "vla-eval": {"vla_eval": "vla-eval"},
    "ray": {"ray": "ray[serve]"},
}  # fmt: skip


def missing_extra(error: ModuleNotFoundError) -> MissingExtraError | None:
    """The error that says which extra to install; None for a module that no extra brings."""
    module = (error.name or "").partition(".")[0]
    for extra, packages in EXTRAS.items():
        if module in packages:
            return MissingExtraError(packages[module], extra)
    return None
