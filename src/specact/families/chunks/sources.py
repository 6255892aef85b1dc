"""Where a chunk policy comes from: a bundle, a description of an ONNX file, or a Python object, by one name."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from specact.bundle.network import CPU, Compute
from specact.errors import BundleError, ConfigError, SpecactError
from specact.families.chunks.adapters import onnx_policy
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.observation import Window
from specact.plugins import is_plugin, load_object, make_object
from specact.units import ActionUnits

_PARTS = ("draft", "target")


@dataclass(frozen=True)
class LoadedPolicy:
    """A loaded chunk policy with its name and fingerprint.

    Attributes:
        name: for messages.
        policy: the policy.
        units: of its actions, or None if their range is unknown.
        fingerprint: of its weights, or empty if it has none.
        env: name of the environment it was made for, or empty.
    """

    name: str
    policy: ChunkPolicy
    units: ActionUnits | None
    fingerprint: str
    env: str = ""


def kind_of_source(source: str) -> Literal["lerobot", "openpi", "description", "part", "code", "folder"]:
    """Kind of a source: LeRobot's folder, an openpi server, a ``.toml`` file, a policy of a pair, code, or a bundle."""
    if source.startswith("lerobot:"):
        return "lerobot"
    if source.startswith("openpi:"):
        return "openpi"
    name, _, part = source.rpartition("#")
    if source.endswith(".toml"):
        return "description"
    if name and part in _PARTS:
        return "part"
    return "code" if is_plugin(source) and not Path(source).exists() else "folder"


def load_source(source: str, *, steps: int = 10, compute: Compute = CPU) -> LoadedPolicy:
    """Loads a chunk policy that is no bundle.

    Args:
        source: a ``.toml`` file that describes an ONNX file, see
            :func:`~specact.families.chunks.adapters.onnx_policy`; ``lerobot:PATH@HZ``, a folder that LeRobot's
            ``save_pretrained`` wrote, and the policy's control rate; ``openpi:ws://HOST:PORT#FILE.toml``, a server of
            openpi's protocol, see :func:`~specact.families.chunks.openpi.openpi_source`, with the token in the variable
            SPECACT_TOKEN; or ``MODULE:NAME``, a :class:`~specact.families.chunks.policy.ChunkPolicy`, or a class of
            one, that is made without arguments.
        steps: Euler steps of a flow policy.
        compute: where its network runs.

    Raises:
        ConfigError: if the source does not exist, or is none of these.
        BundleError: if the policy cannot be used.
        RemoteError: if a server does not answer.
    """
    kind = kind_of_source(source)
    if kind == "lerobot":
        return _lerobot(source, steps)
    if kind == "openpi":
        from specact.families.chunks.openpi import openpi_policy, openpi_source

        server = openpi_source(source, os.environ.get("SPECACT_TOKEN") or None)
        return LoadedPolicy(server.name, openpi_policy(server), server.units, server.fingerprint)
    if kind == "description":
        policy = onnx_policy(Path(source), compute=compute)
        return LoadedPolicy(Path(source).stem, policy, policy.units, policy.fingerprint)
    return _plugin(source)


def _lerobot(source: str, steps: int) -> LoadedPolicy:
    try:
        from specact.families.chunks.lerobot import load_lerobot
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{source!r} needs LeRobot, and there is no module {error.name!r} here; in an environment of Python 3.12 "
            "or newer run: pip install 'specact[server]' 'lerobot[smolvla,pi,diffusion]==0.6.1'"
        ) from None
    return load_lerobot(source, steps=steps)


def _plugin(source: str) -> LoadedPolicy:
    kind = "policy, a ChunkPolicy such as specact.chunk_policy makes, or a class of one"
    found = load_object(source, kind, is_policy)
    policy: ChunkPolicy = make_object(source, "policy", ("infer", "infer_batch")) if isinstance(found, type) else found
    if not isinstance(policy.spec, ChunkSpec):
        raise ConfigError(f"the spec of {source!r} must be a ChunkSpec, got {policy.spec!r:.60}")
    if not isinstance(getattr(policy, "inpaints", None), bool):
        raise ConfigError(
            f"{source!r} must say whether it can continue a chunk that is being executed: give it an attribute "
            "inpaints, False if infer ignores its argument inpainting"
        )
    units = getattr(policy, "units", None)
    fingerprint = str(getattr(policy, "fingerprint", ""))
    return LoadedPolicy(
        source.partition(":")[2], policy, units if isinstance(units, ActionUnits) else None, fingerprint
    )


def is_policy(found: object) -> bool:
    """Whether an object is a chunk policy, or a class of one."""
    wanted = ("infer", "infer_batch") if isinstance(found, type) else ("spec", "infer", "infer_batch")
    return all(hasattr(found, name) for name in wanted)


def try_out(loaded: LoadedPolicy) -> None:
    """Tests a policy with observations of zeros, at batch sizes 1 and 2.

    Raises:
        BundleError: if an inference fails, or its chunks do not match the spec.
    """
    spec = loaded.policy.spec
    window: Window = spec.observation.zeros()
    for count in (1, 2):
        rngs = [np.random.default_rng(row) for row in range(count)]
        try:
            chunks = loaded.policy.infer_batch([window] * count, rngs)
            shapes = [np.shape(chunk) for chunk in chunks]
        except SpecactError:
            raise
        # A third-party policy can raise anything.
        except (Exception, SystemExit) as error:
            raise BundleError(
                f"the policy {loaded.name} cannot answer a batch of {count} observations of zeros: "
                f"{type(error).__name__}: {error}"
            ) from error
        if shapes != [(spec.chunk, spec.actions)] * count:
            raise BundleError(
                f"the policy {loaded.name} must answer {count} windows with {count} chunks of shape "
                f"{(spec.chunk, spec.actions)}, it gave {len(shapes)} of {sorted(set(shapes))}"
            )
