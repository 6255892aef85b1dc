"""Third-party policies as chunk policies: a Python function, or an ONNX file with a description."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from specact.bundle.manifest import fingerprint_of
from specact.bundle.network import CPU, Compute, Network
from specact.errors import BundleError, ConfigError, MissError, SpecactError
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.observation import Field, ObservationSpec, Window
from specact.records import RateHz, Record, Size, check_fields, read_toml
from specact.units import ActionUnits

Inputs = Mapping[str, Any]
Function = Callable[..., Any]


class FunctionPolicy:
    """A function on batches as a :class:`~specact.families.chunks.policy.ChunkPolicy`.

    Args:
        spec: of its observations and chunks.
        function: from named arrays ``[B, ...]`` of the spec's fields to chunks ``[B, H, A]`` in the environment's
            units. With an instruction in the spec it is also called with ``instruction``, a list of B texts; with
            ``seeded`` with ``rngs``, one generator for each row.
        units: the range of its actions, if known; actions are clipped to it.
        fingerprint: of its weights.
        seeded: whether it samples, and so needs random generators.
    """

    inpaints = False

    def __init__(
        self,
        spec: ChunkSpec,
        function: Function,
        *,
        units: ActionUnits | None = None,
        fingerprint: str = "",
        seeded: bool = False,
    ) -> None:
        self.spec, self.units, self.fingerprint = spec, units, fingerprint
        self._function, self._seeded = function, seeded

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`."""
        if inpainting is not None:
            raise ConfigError("this policy cannot inpaint; choose another execution for it, or a flow policy")
        return self.infer_batch([window], [rng])[0]

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        """See :class:`~specact.families.chunks.policy.ChunkPolicy`.

        Raises:
            BundleError: if the function fails, or its result does not match the spec.
            MissError: if the function raises it: its server did not answer.
        """
        more: dict[str, Any] = {}
        if self.spec.observation.instruction:
            more["instruction"] = [window.instruction for window in windows]
        if self._seeded:
            more["rngs"] = rngs
        inputs = self.spec.observation.stack(windows)
        # The function may write to its inputs, and a single window shares memory with the robot's.
        own = {name: array if array.flags.owndata else array.copy() for name, array in inputs.items()}
        try:
            found = np.asarray(self._function(own, **more))
        # Of a policy that asks a server of its own.
        except MissError:
            raise
        # A third-party policy can raise anything.
        except (Exception, SystemExit) as error:
            raise BundleError(
                f"the policy cannot answer a batch of {len(windows)}: {type(error).__name__}: {error}"
            ) from error
        wanted = (len(windows), self.spec.chunk, self.spec.actions)
        if found.shape != wanted or found.dtype.kind not in "fiu":
            raise BundleError(
                f"the policy must answer a batch of {len(windows)} with numbers of shape {wanted}, it gave "
                f"{found.dtype} {found.shape}"
            )
        chunks = found.astype(np.float32)
        if self.units is None:
            return list(chunks)
        low, high = self.units.centre - self.units.scale, self.units.centre + self.units.scale
        # Infinite numbers are not clipped, so that they are refused later.
        return list(np.where(np.isfinite(chunks), np.clip(chunks, low, high), chunks))


def chunk_policy(
    *,
    observation: Mapping[str, Field | tuple[int, ...]],
    chunk: int,
    actions: int,
    rate_hz: float,
    instruction: bool = False,
    low: Sequence[float] | None = None,
    high: Sequence[float] | None = None,
    fingerprint: str = "",
    seeded: bool = False,
) -> Callable[[Function], FunctionPolicy]:
    """A decorator that makes a policy from a function, see :class:`FunctionPolicy`.

    ::

        @specact.chunk_policy(observation={"state": (8,)}, chunk=16, actions=2, rate_hz=20.0)
        def policy(inputs):
            return model(inputs["state"][:, -1])      # [B, 1, 8] in, [B, 16, 2] out

    Args:
        observation: by name, the shape of a single float32 array, or a :class:`~specact.observation.Field`.
        chunk, actions: H and A.
        rate_hz: control rate [Hz].
        instruction: whether it needs an instruction.
        low, high: range of the actions, if known; actions are clipped to it.
        fingerprint, seeded: see :class:`FunctionPolicy`.

    Raises:
        ConfigError: for a field that is neither, or a range that is none.
    """
    for name, field in observation.items():
        if not isinstance(field, Field | Sequence):
            raise ConfigError(f"the observation {name!r} must be a shape such as (8,) or a Field, got {field!r:.60}")
    fields = {name: field if isinstance(field, Field) else Field(tuple(field)) for name, field in observation.items()}
    spec = ChunkSpec(ObservationSpec(fields, instruction), chunk, actions, rate_hz)
    units = units_of(low, high, actions)

    def decorate(function: Function) -> FunctionPolicy:
        return FunctionPolicy(spec, function, units=units, fingerprint=fingerprint, seeded=seeded)

    return decorate


def units_of(low: object, high: object, actions: int) -> ActionUnits | None:
    """Units of a range of actions, or None without one.

    Raises:
        ConfigError: if it is not a range of ``actions`` finite numbers.
    """
    if low is None and high is None:
        return None
    try:
        with np.errstate(over="ignore"):  # numbers beyond float32 become infinite and are refused
            ends = [np.asarray(end, np.float32) for end in (low, high)]
    except (TypeError, ValueError, OverflowError):
        ends = []
    if [end.shape for end in ends] != [(actions,)] * 2 or not np.isfinite(ends).all() or not (ends[0] <= ends[1]).all():
        raise ConfigError(
            f"low and high must each be {actions} finite numbers, low at most high; got {low!r:.60} and {high!r:.60}"
        )
    return ActionUnits.of_range(*ends)


class Entry(Record, frozen=True):
    """An observation in a description.

    Attributes:
        shape, dtype, history: see :class:`~specact.observation.Field`.
        input: the policy's name for it; the observation's name if empty.
        channels_first: whether the policy takes camera frames as ``[3, H, W]``.
    """

    shape: tuple[int, ...]
    dtype: Literal["float32", "uint8"] = "float32"
    history: int = 1
    input: str = ""
    channels_first: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.channels_first and self.dtype != "uint8":
            raise ConfigError("channels_first is for uint8 frames alone")

    @property
    def field(self) -> Field:
        """The field of a spec."""
        return Field(self.shape, self.dtype, self.history)


class Description(Record, frozen=True):
    """The content of a description of a policy, of an ONNX file (:func:`onnx_policy`) or of a server."""

    chunk: Size
    actions: Size
    rate_hz: RateHz
    observation: dict[str, Entry]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    @property
    def units(self) -> ActionUnits | None:
        """Units of the actions, if their range is known."""
        return units_of(self.low, self.high, self.actions)

    def spec(self, instruction: bool = False) -> ChunkSpec:
        """Of its observations and chunks."""
        fields = {name: entry.field for name, entry in self.observation.items()}
        return ChunkSpec(ObservationSpec(fields, instruction), self.chunk, self.actions, self.rate_hz)


class OnnxDescription(Description, frozen=True, kw_only=True):
    """See :func:`onnx_policy`."""

    onnx: str
    output: str = ""


def onnx_policy(description: Path, *, compute: Compute = CPU) -> FunctionPolicy:
    """An ONNX file as a policy, with a TOML file that describes its inputs and outputs.

    ::

        onnx = "policy.onnx"
        chunk = 16
        actions = 2
        rate_hz = 20.0
        output = "actions"                    # the only one, if left out
        low = [-1.0, -1.0]                    # range of the actions, where known
        high = [1.0, 1.0]
        [observation.state]
        shape = [8]
        history = 1                           # 0 for an input without a time axis
        input = "observation.state"           # name in the graph; the observation's, if left out
        [observation.image]
        shape = [96, 96, 3]
        dtype = "uint8"
        channels_first = true                 # the graph takes float32 [.., 3, H, W] in [0, 1]

    The file is named by the user and trusted: unlike a bundle's graphs it is not checked.

    Args:
        description: the TOML file.
        compute: where it runs.

    Raises:
        ConfigError: if the description cannot be read or is incomplete.
        BundleError: if the file cannot be read, or the graph's inputs or outputs do not match it.
    """
    parsed = read_toml(description, OnnxDescription, "description of an ONNX file")
    try:
        spec, units = parsed.spec(), parsed.units
        file = description.parent / parsed.onnx
        network, fingerprint = Network(file, compute=compute), fingerprint_of(file)
    except (SpecactError, ValueError) as error:  # the latter for an invalid path
        raise ConfigError(f"{description}: {error}") from None
    inputs = {name: entry.input or name for name, entry in parsed.observation.items()}
    first = {name for name, entry in parsed.observation.items() if entry.channels_first}
    if network.inputs.keys() != set(inputs.values()):
        raise BundleError(f"{file} takes {sorted(network.inputs)}, but {description} names {sorted(inputs.values())}")
    given = list(network.outputs)
    output = parsed.output or given[0]
    if output not in given:
        raise BundleError(f"{file} gives {given}, and no {output!r}, which {description} names")

    def run(arrays: Inputs) -> Any:
        feeds = {
            inputs[name]: np.moveaxis(array, -1, -3).astype(np.float32) / np.float32(255.0) if name in first else array
            for name, array in arrays.items()
        }
        return network.run(feeds)[given.index(output)]

    return FunctionPolicy(spec, run, units=units, fingerprint=fingerprint)
