"""A flow-matching chunk policy: noise in, a chunk of actions out, in a few Euler steps.

Time runs from 0, noise, to 1, data, on the straight paths ``x_t = (1 - t) x_0 + t x_1`` with velocity ``x_1 - x_0``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from specact.bundle.bundle import Bundle, check_scale, open_bundle
from specact.bundle.manifest import Words
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.errors import BundleError, ConfigError
from specact.families.chunks.policy import ChunkSpec, Inpainting
from specact.observation import Window
from specact.records import Count, NotNegative, WholeNumber, validated

Array = NDArray[np.float32]
Velocity = Callable[[Array, float], Array]
Guide = Callable[[Array, float], tuple[Array, Array]]
NETWORKS = {"encoder": "encoder.onnx", "prefix": "prefix.onnx", "expert": "expert.onnx", "guide": "guide.onnx"}
FLOW_PARTS = {**NETWORKS, "normalisation": "normalisation.safetensors"}
_BETA = 5.0  # the paper's limit of the guidance's weight


def integrate(velocity: Velocity, noise: Array, steps: int) -> Array:
    """``x <- x + v(x, t) / n`` at ``t = 0, 1 / n, ..., (n - 1) / n``, from noise ``[..., H, A]``."""
    x = noise
    for step in range(steps):
        x = x + velocity(x, step / steps) / np.float32(steps)
    return x


def integrate_guided(guide: Guide, noise: Array, steps: int, beta: float) -> Array:
    """As :func:`integrate` with ``v + w(t) g`` for v, where the guidance g pulls the estimate towards Y.

    ``g = (Y - x^_1)^T diag(W) dx^_1/dx_t`` with ``x^_1 = x_t + (1 - t) v(x_t, t)`` (Black et al. 2025,
    "Real-time execution of action chunking flow policies", equations 2 to 4; after Pokle et al. 2024). The ``guide``
    gives v and g at a chunk ``[H, A]`` and t; ``beta`` is the largest w.
    """

    def velocity(x: Array, time: float) -> Array:
        flow, pull = guide(x, time)
        return flow + np.float32(guidance_weight(time, beta)) * pull

    return integrate(velocity, noise, steps)


def guidance_weight(time: float, beta: float) -> float:
    """``w(t) = min(beta, (1 - t) / (t r_t^2))`` with ``r_t^2 = (1 - t)^2 / (t^2 + (1 - t)^2)``.

    Without the limit it would be infinite at both ends, which is unstable with few steps.
    """
    rest = 1.0 - time
    unlimited = time * rest
    return beta if unlimited <= 0.0 else min(beta, (time**2 + rest**2) / unlimited)


@dataclass(frozen=True)
class FlowUnits:
    """A network's units: demonstrated actions have mean 0 and variance 1 for a flow, bins lie in [-1, 1] for tokens.

    ``action = centre + scale * x``, and the demonstrated range is from low to high, in the environment's units, all
    ``[W]``. W is A, or more if actions are padded; both conversions take W or A dimensions.
    """

    centre: Array
    scale: Array
    low: Array
    high: Array

    def to_environment(self, x: Array) -> Array:
        """Actions ``[..., A]`` in the environment's units, clipped to the demonstrated range."""
        width = slice(x.shape[-1])
        return np.clip(self.centre[width] + self.scale[width] * x, self.low[width], self.high[width])

    def to_flow(self, action: Array) -> Array:
        """Actions ``[..., A]`` in the flow's units."""
        width = slice(action.shape[-1])
        return (action - self.centre[width]) / self.scale[width]


class FlowNetworks(Protocol):
    """The networks of one flow policy: encoder, prefix cache and expert; chunks are in the flow's units.

    The interface for :class:`FlowPolicy` and for speculative methods inside the flow.
    """

    def tokens(self, windows: Sequence[Window]) -> Array:
        """The encoder's tokens of B windows, ``[B, N, W]``."""
        ...

    def cache(self, windows: Sequence[Window], tokens: Array | None = None) -> Any:
        """The prefix cache of B windows, an opaque value; ``tokens`` if they are computed already."""
        ...

    def velocity(self, chunks: Array, times: Array, cache: Any) -> Array:
        """The expert's velocities at chunks ``[B, H, W]`` and times ``[B]``; the cache is of B windows, or of one.

        Networks trained for delays take a time of each action, ``[B, H]``, too.
        """
        ...

    def guide(self, chunk: Array, time: Array, cache: Any, wanted: Array, weights: Array) -> tuple[Array, Array]:
        """Velocity and guidance towards Y ``[1, H, W]`` with weights ``[1, H]``, see :func:`integrate_guided`."""
        ...


class OnnxFlow:
    """The four :data:`NETWORKS` of one flow policy, see :class:`FlowNetworks`; without padding of actions.

    A cache holds keys and values of every layer, ``[B, L, 2, heads, N, W / heads]``. The expert of a policy trained for
    ``delays`` takes a time of each action.

    Raises:
        BundleError: if a file is no ONNX model, or they do not fit the spec or each other.
    """

    def __init__(
        self, files: Mapping[str, Path], spec: ChunkSpec, words: Words | None = None, *, delays: int = 0,
        compute: Compute = CPU,
    ) -> None:  # fmt: skip
        self._inputs = NetworkInputs(spec.observation, words)
        tokens, chunk, cache = ("batch", "N", "W"), ("batch", spec.chunk, spec.actions), ("L", 2, "heads", "N", "width")
        noisy = {"chunk": chunk, "time": ("batch",), "cache": ("windows", *cache)}
        self._times = (spec.chunk,) if delays else ()
        guided = {**noisy, "wanted": chunk, "weights": ("batch", spec.chunk)}
        self._encoder = Network(files["encoder"], self._inputs.shapes, {"tokens": tokens}, compute)
        sizes = self._encoder.sizes
        self._prefix = Network(files["prefix"], {"tokens": tokens}, {"cache": ("batch", *cache)}, compute, sizes=sizes)
        sizes = self._prefix.sizes
        timed = {**noisy, "time": ("batch", *self._times)}
        self._expert = Network(files["expert"], timed, {"velocity": chunk}, compute, sizes=sizes)
        self._guide = Network(files["guide"], guided, {"velocity": chunk, "pull": chunk}, compute, sizes=sizes)

    def tokens(self, windows: Sequence[Window]) -> Array:
        return self._encoder.run(self._inputs.stack(windows))[0]

    def cache(self, windows: Sequence[Window], tokens: Array | None = None) -> Array:
        return self._prefix.run({"tokens": self.tokens(windows) if tokens is None else tokens})[0]

    def velocity(self, chunks: Array, times: Array, cache: Array) -> Array:
        if self._times and times.ndim == 1:
            times = np.repeat(times[:, None], *self._times, axis=1)
        return self._expert.run({"chunk": chunks, "time": times, "cache": cache})[0]

    def guide(self, chunk: Array, time: Array, cache: Array, wanted: Array, weights: Array) -> tuple[Array, Array]:
        seen = {"chunk": chunk, "time": time, "cache": cache, "wanted": wanted, "weights": weights}
        velocity, pull = self._guide.run(seen)
        return velocity, pull


class FlowPolicy:
    """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

    The prefix is computed once per inference, the expert once per Euler step. With inpainting (real-time chunking) the
    steps are guided towards the last chunk (Black et al. 2025); a policy trained for ``delays``, so many actions at
    most, continues those that will have been executed (training-time RTC, arXiv 2512.05964); more are guided, with a
    warning. An observation that overflows gives NaN. Fewer ``steps`` are faster, and one gives the mean of the
    demonstrations; ``spread`` is the standard deviation of the initial noise, and 0 makes the policy deterministic.
    """

    inpaints = True
    steady = True

    @validated
    def __init__(
        self, networks: FlowNetworks, units: FlowUnits, spec: ChunkSpec, *, steps: Count = 10,
        spread: NotNegative = 1.0, delays: WholeNumber = 0,
    ) -> None:  # fmt: skip
        self.networks, self.units, self.spec, self.steps, self.delays = networks, units, spec, steps, delays
        self._spread = spread

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Array:
        if inpainting is None:
            return self.infer_batch([window], [rng])[0]
        shape = (self.spec.chunk, self.spec.actions)
        if inpainting.actions.shape != shape:
            raise ConfigError(f"the actions to inpaint must have the shape {shape}, got {inpainting.actions.shape}")
        noise, cache, committed = self.noise(rng), self.networks.cache([window]), inpainting.committed
        if len(committed) > self.delays or not self.delays:
            if self.delays:
                trained = f"this policy was trained for delays of at most {self.delays} control steps"
                warnings.warn(f"{trained}; as a chunk takes longer, it is guided", stacklevel=2)
            return self.to_environment(self._guided(noise, cache, inpainting))
        chunk = self.to_environment(self.denoised(noise[None], cache, self.steps, self.to_flow(committed)))[0]
        return np.concatenate([committed, chunk[len(committed) :]])

    def infer_batch(
        self, windows: Sequence[Window], rngs: Sequence[np.random.Generator], steps: int | None = None
    ) -> list[Array]:
        noise = np.stack([self.noise(rng) for rng in rngs])
        return list(self.to_environment(self.denoised(noise, self.networks.cache(windows), steps or self.steps)))

    def denoised(self, noise: Array, cache: Any, steps: int, given: Array | None = None) -> Array:
        """Chunks ``[B, H, W]`` in the flow's units, from noise ``[B, H, W]`` and the cache of B windows.

        Their first d actions are ``given [d, W]``, at time 1 throughout, if the policy was trained for that.
        """
        fixed = 0 if given is None else len(given)
        times = np.ones(noise.shape[: 2 if fixed else 1], np.float32)
        if given is not None and fixed:
            noise = np.concatenate([np.broadcast_to(given, (len(noise), *given.shape)), noise[:, fixed:]], 1)

        def velocity(x: Array, time: float) -> Array:
            times[..., fixed:] = time
            velocities = self.networks.velocity(x, times, cache)
            if fixed:
                velocities[:, :fixed] = 0.0
            return velocities

        with np.errstate(over="ignore", invalid="ignore"):
            return integrate(velocity, noise, steps)

    def noise(self, rng: np.random.Generator) -> Array:
        """The initial noise of a chunk, ``[H, W]``."""
        drawn = rng.standard_normal((self.spec.chunk, len(self.units.centre)), dtype=np.float32)
        return drawn if self._spread == 1.0 else np.float32(self._spread) * drawn

    def to_environment(self, x: Array) -> Array:
        """Actions ``[..., A]`` of ``[..., A]`` or ``[..., W]``; NaN if ``x`` is not finite: clipping would hide it."""
        with np.errstate(over="ignore", invalid="ignore"):
            actions = np.where(np.isfinite(x), self.units.to_environment(x), np.float32(np.nan))
        return actions[..., : self.spec.actions]

    def to_flow(self, actions: Array) -> Array:
        """Actions ``[..., A]`` in the flow's units, ``[..., W]``, padded with zeros."""
        return self.padded(self.units.to_flow(actions))

    def padded(self, x: Array) -> Array:
        """``[..., W]`` of ``[..., A]``, both in the flow's units, padded with zeros."""
        missing = len(self.units.centre) - x.shape[-1]
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x

    def _guided(self, noise: Array, cache: Any, inpainting: Inpainting) -> Array:
        weights = inpainting.weights[None].astype(np.float32)
        # Rows of weight 0 are replaced, because 0 times NaN would not be 0.
        middle = self.units.centre[: self.spec.actions]
        actions = np.where(weights[0, :, None] > 0.0, inpainting.actions, middle).astype(np.float32)
        wanted = self.to_flow(actions)[None]

        def guide(x: Array, time: float) -> tuple[Array, Array]:
            times = np.array([time], np.float32)
            velocity, pull = self.networks.guide(x[None], times, cache, wanted, weights)
            return velocity[0], pull[0]

        return integrate_guided(guide, noise, self.steps, _BETA)


@dataclass(frozen=True)
class FlowBundle(Bundle[ChunkSpec]):
    """A loaded bundle that holds a flow policy, trained to continue up to ``delays`` actions under way."""

    networks: OnnxFlow
    units: FlowUnits
    delays: int

    def policy(self, steps: int = 10, spread: float = 1.0) -> FlowPolicy:
        """The policy with this number of Euler steps; the networks are shared."""
        return FlowPolicy(self.networks, self.units, self.spec, steps=steps, spread=spread, delays=self.delays)


def load_flow(
    name_or_path: str | Path, *, variants: Mapping[str, Path] | None = None, compute: Compute = CPU
) -> FlowBundle:
    """Loads a flow bundle, a folder or a name such as ``pusht-flow``, and refuses parts that do not fit together.

    The ``variants`` are networks used instead of the bundle's own, such as a quantised ``expert``; their shapes are
    checked, their fingerprints are not.

    Raises:
        BundleError, ConfigError: as :func:`~specact.bundle.bundle.open_bundle`; BundleError for parts that do not fit.
    """
    bundle = open_bundle(name_or_path, "flow", ChunkSpec, FLOW_PARTS)
    files = {**bundle.files, **(variants or {})}
    delays = bundle.manifest.recipe.get("delays", 0)
    if type(delays) is not int or not 0 <= delays < bundle.spec.chunk:
        raise BundleError(
            f"{bundle.path}: recipe.delays must be a whole number below the {bundle.spec.chunk} actions of a chunk, "
            f"got {delays!r}; train and export the bundle again"
        )
    networks = OnnxFlow(files, bundle.spec, bundle.manifest.words, delays=delays, compute=compute)
    return FlowBundle(
        bundle.path, bundle.manifest, bundle.spec, bundle.files, networks, read_flow_units(bundle), delays
    )


def read_flow_units(bundle: Bundle[ChunkSpec]) -> FlowUnits:
    """The units in a bundle's normalisation.

    Raises:
        BundleError: if they are invalid, or do not match the spec.
    """
    names = ("centre", "scale", "low", "high")
    tensors = bundle.tensors("normalisation", dict.fromkeys(names, (np.float32, (bundle.spec.actions,))))
    units, file = FlowUnits(*(tensors[name] for name in names)), bundle.files["normalisation"]
    check_scale(file, units.centre, units.scale)
    if not (units.low <= units.high).all():
        raise BundleError(
            f"{file} holds a range of actions from {units.low.tolist()} to {units.high.tolist()}; low must be at most "
            "high; train and export the bundle again"
        )
    return units
