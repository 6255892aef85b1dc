"""Where a chunk policy comes from: a bundle, an ONNX file, PyTorch, LeRobot, an openpi server or a Python function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from specact.bundle.bundle import Bundle, open_bundle
from specact.bundle.manifest import INSTRUCTION, digest_of, fingerprint_of, joint_fingerprint, read_part
from specact.bundle.network import CPU, Compute, Network, NetworkInputs
from specact.bundle.vetting import vet
from specact.errors import BundleError, ConfigError, SpecactError
from specact.families.chunks.flow import FlowUnits, read_flow_units
from specact.families.chunks.policy import BatchPolicy, Chunk, ChunkPolicy, ChunkSpec, units_of
from specact.imports import is_plugin, load_object, make_object
from specact.observation import Field, ObservationSpec, Window
from specact.records import RateHz, Record, Size, check_fields, read_toml
from specact.types import ActionUnits

if TYPE_CHECKING:
    import torch

Inputs = Mapping[str, Any]
Function = Callable[..., Any]
REGRESSION_PARTS = {"policy": "policy.onnx", "normalisation": "normalisation.safetensors"}


@dataclass(frozen=True)
class LoadedPolicy:
    """A loaded chunk policy.

    Attributes:
        name: for messages.
        policy: the policy.
        units: of its actions, or None if their range is unknown.
        fingerprint, env: of its weights, and of the environment it was made for; empty if it has none.
    """

    name: str
    policy: ChunkPolicy
    units: ActionUnits | None
    fingerprint: str
    env: str = ""


def check_made_for(
    bundle: Bundle[Any], policy: LoadedPolicy | Bundle[Any], wanted: str, repair: str, part: str = "target"
) -> None:
    """BundleError for a policy without the ``wanted`` fingerprint, for which the bundle was made."""
    if policy.fingerprint != wanted:
        raise BundleError(
            f"{bundle.path} was made for the {part} {wanted!r}, but {policy.name} is {policy.fingerprint!r}; {repair}"
        )


def kind_of_source(source: str) -> Literal["lerobot", "openpi", "description", "part", "code", "folder"]:
    """Kind of a source: LeRobot's folder, an openpi server, a ``.toml`` file, a policy of a pair, code, or a bundle."""
    if source.startswith("lerobot:"):
        return "lerobot"
    if source.startswith("openpi:"):
        return "openpi"
    if source.endswith(".toml"):
        return "description"
    name, _, part = source.rpartition("#")
    if name and part in ("draft", "target"):
        return "part"
    return "code" if is_plugin(source) and not Path(source).exists() else "folder"


def load_stored(
    bundle: Bundle[Any], part: str, named: str | None, load: Callable[..., LoadedPolicy], wanted: str, repair: str,
    **options: Any,
) -> ChunkPolicy:  # fmt: skip
    """The draft or target that was ``named``, or else that of a bundle's manifest, with the ``wanted`` fingerprint.

    Raises:
        ConfigError: if there is neither, or the manifest's is not where it was.
        BundleError: for another fingerprint; or if the manifest, which is not trusted, names code: importing a module
            would run it.
    """
    source, name_it = named or bundle.manifest.sources.get(part), f"name it with --{part}"
    if source is None:
        raise ConfigError(f"the {part} of {bundle.path} is no bundle; {name_it} MODULE:NAME or FILE.toml")
    if not named and kind_of_source(source) not in ("part", "folder"):
        raise BundleError(f"{bundle.path} may name no code, but names {source!r:.60} as its {part}; {name_it}")
    try:
        loaded = load(source, **options)
    except ConfigError as error:
        raise error if named else ConfigError(f"{error}; {bundle.path} names it as its {part}: {name_it}") from error
    check_made_for(bundle, loaded, wanted, repair, part)
    return loaded.policy


def load_own(source: str) -> LoadedPolicy:
    """The policy ``MODULE:NAME``, a :class:`~specact.families.chunks.policy.ChunkPolicy` or a class of one.

    Raises:
        ConfigError: if there is none of that name, or it is none.
    """
    kind = "policy, a ChunkPolicy such as specact.chunk_policy makes, or a class of one"
    value = load_object(source, kind, is_policy)
    policy: ChunkPolicy = make_object(source, "policy", ("infer", "infer_batch")) if isinstance(value, type) else value
    if not isinstance(policy.spec, ChunkSpec):
        raise ConfigError(f"the spec of {source!r} must be a ChunkSpec, got {policy.spec!r:.60}")
    if not isinstance(getattr(policy, "inpaints", None), bool):
        raise ConfigError(
            f"{source!r} must say whether it can continue a chunk that is being executed: give it an attribute "
            "inpaints, False if infer ignores its argument inpainting"
        )
    units, fingerprint = getattr(policy, "units", None), str(getattr(policy, "fingerprint", ""))
    return LoadedPolicy(
        source.partition(":")[2], policy, units if isinstance(units, ActionUnits) else None, fingerprint
    )


def is_policy(value: object) -> bool:
    """Whether an object is a chunk policy, or a class of one."""
    return all(hasattr(value, name) for name in ("infer", "infer_batch")) and (
        isinstance(value, type) or hasattr(value, "spec")
    )


def try_out(loaded: LoadedPolicy) -> None:
    """Tests a policy with observations of zeros; BundleError if it fails, or its chunks do not match the spec."""
    spec, name = loaded.policy.spec, loaded.name
    for count in (1, 2):
        rngs, wanted = [np.random.default_rng(row) for row in range(count)], (spec.chunk, spec.actions)
        with third_party(f"the policy {name} cannot answer a batch of {count} observations of zeros"):
            shapes = list(map(np.shape, loaded.policy.infer_batch([spec.observation.zeros()] * count, rngs)))
        if shapes != [wanted] * count:
            raise BundleError(
                f"the policy {name} must answer {count} windows with {count} chunks of shape {wanted}, it gave "
                f"{len(shapes)} of {sorted(set(shapes))}"
            )


@contextmanager
def third_party(failure: str) -> Iterator[None]:
    """Third-party code, which can raise anything: a BundleError in place of an exception that is not this package's."""
    try:
        yield
    except SpecactError:
        raise
    except (Exception, SystemExit) as error:
        raise BundleError(f"{failure}: {type(error).__name__}: {error}") from error


class FunctionPolicy(BatchPolicy):
    """A function on batches as a :class:`~specact.families.chunks.policy.ChunkPolicy`.

    Args:
        spec: of its observations and chunks.
        function: from named arrays ``[B, ...]`` of the spec's fields to chunks ``[B, H, A]`` in the environment's
            units. With an instruction in the spec it is also called with ``instruction``, a list of B texts; if it is
            ``seeded``, since it samples, with ``rngs``, one generator for each row. A MissError says that its server
            did not answer; anything else that it raises is a BundleError.
        units, fingerprint: the range of its actions, if known, to which they are clipped; and of its weights.
    """

    def __init__(
        self, spec: ChunkSpec, function: Function, *,
        units: ActionUnits | None = None, fingerprint: str = "", seeded: bool = False,
    ) -> None:  # fmt: skip
        self.spec, self.units, self.fingerprint = spec, units, fingerprint
        self._function, self._seeded = function, seeded

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> Sequence[Chunk]:
        more: dict[str, Any] = {"rngs": rngs} if self._seeded else {}
        if self.spec.observation.instruction:
            more["instruction"] = [window.instruction for window in windows]
        inputs = self.spec.observation.stack(windows)
        # The function may write to its inputs, and a single window shares memory with the robot's.
        copies = {name: array if array.flags.owndata else array.copy() for name, array in inputs.items()}
        with third_party(f"the policy cannot answer a batch of {len(windows)}"):
            answer = np.asarray(self._function(copies, **more))
        wanted = (len(windows), self.spec.chunk, self.spec.actions)
        if answer.shape != wanted or answer.dtype.kind not in "fiu":
            raise BundleError(
                f"the policy must answer a batch of {len(windows)} with numbers of shape {wanted}, it gave "
                f"{answer.dtype} {answer.shape}"
            )
        return list(clipped(answer.astype(np.float32), self.units))


def clipped(chunks: Chunk, units: ActionUnits | None) -> Chunk:
    """Actions ``[..., A]`` within their range, if it is known; infinite ones stay, so that they are refused later."""
    if units is None:
        return chunks
    low, high = units.centre - units.scale, units.centre + units.scale
    return np.where(np.isfinite(chunks), np.clip(chunks, low, high), chunks)


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
    """A decorator that makes a policy of H = ``chunk`` actions from a function, see :class:`FunctionPolicy`.

    ``@specact.chunk_policy(observation={"state": (8,)}, chunk=16, actions=2, rate_hz=20.0)`` stands above a function
    from ``{"state": [B, 1, 8]}`` to ``[B, 16, 2]``. An observation is the shape of a single float32 array, or a
    :class:`~specact.observation.Field`.

    Raises:
        ConfigError: for an observation that is neither, or a range from ``low`` to ``high`` that is none.
    """
    for name, field in observation.items():
        if not isinstance(field, Field | Sequence):
            raise ConfigError(f"the observation {name!r} must be a shape such as (8,) or a Field, got {field!r:.60}")
    fields = {name: field if isinstance(field, Field) else Field(tuple(field)) for name, field in observation.items()}
    spec = ChunkSpec(ObservationSpec(fields, instruction), chunk, actions, rate_hz)
    units = units_of(low, high, actions)
    return lambda function: FunctionPolicy(spec, function, units=units, fingerprint=fingerprint, seeded=seeded)


def torch_policy(spec: ChunkSpec, module: torch.nn.Module, *, units: ActionUnits | None = None) -> FunctionPolicy:
    """A PyTorch module as a policy; it is put into evaluation mode and called without gradients.

    It maps a dict of tensors ``[B, ...]``, on the device of its parameters, to a tensor ``[B, H, A]``. With an
    instruction in the spec it is also called with ``instruction``, a list of B texts.
    """
    import torch

    module = module.eval()
    place = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def run(inputs: Inputs, **more: Any) -> Any:
        with torch.inference_mode():
            answer = module({name: torch.from_numpy(array).to(place) for name, array in inputs.items()}, **more)
            return answer.float().cpu().numpy()

    return FunctionPolicy(spec, run, units=units)


class Entry(Record, frozen=True):
    """An observation in a description, see :class:`~specact.observation.Field`; ``input`` is the policy's name for it.

    With ``channels_first`` the policy takes camera frames as ``[3, H, W]``.
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


class Description(Record, frozen=True):
    """The content of a description of a policy, of an ONNX file (:func:`onnx_policy`) or of a server."""

    chunk: Size
    actions: Size
    rate_hz: RateHz
    observation: dict[str, Entry]
    low: tuple[float, ...] | None = None
    high: tuple[float, ...] | None = None

    def read(self, instruction: bool = False) -> tuple[ChunkSpec, ActionUnits | None]:
        """The spec of observations and chunks, and units of the actions, if their range is known."""
        fields = {name: Field(entry.shape, entry.dtype, entry.history) for name, entry in self.observation.items()}
        spec = ChunkSpec(ObservationSpec(fields, instruction), self.chunk, self.actions, self.rate_hz)
        return spec, units_of(self.low, self.high, self.actions)


class OnnxDescription(Description, frozen=True, kw_only=True):
    """See :func:`onnx_policy`."""

    onnx: str
    output: str = ""


def onnx_policy(description: Path, *, compute: Compute = CPU) -> FunctionPolicy:
    """An ONNX file as a policy, with a TOML file that describes its inputs and outputs, see docs/how-to/policy.md.

    The description has ``onnx``, ``chunk``, ``actions``, ``rate_hz``, ``output``, ``low`` and ``high``, and a table of
    each ``observation`` with its ``shape``, ``dtype``, ``history``, ``input`` and ``channels_first``.

    Raises:
        ConfigError: if the description cannot be read or is incomplete.
        BundleError: if the file cannot be read, or the graph's inputs or outputs do not match it.
    """
    parsed = read_toml(description, OnnxDescription, "description of an ONNX file")
    try:
        spec, units = parsed.read()
        file = description.parent / parsed.onnx
        fingerprint = _fingerprint(file)
        vet({file: digest_of(file) + fingerprint})
        network = Network(file, compute=compute)
    except (SpecactError, ValueError) as error:  # the latter for an invalid path
        raise ConfigError(f"{description}: {error}") from None
    inputs = {name: entry.input or name for name, entry in parsed.observation.items()}
    if network.inputs.keys() != set(inputs.values()):
        raise BundleError(f"{file} takes {sorted(network.inputs)}, but {description} names {sorted(inputs.values())}")
    outputs = list(network.outputs)
    output = parsed.output or outputs[0]
    if output not in outputs:
        raise BundleError(f"{file} gives {outputs}, and no {output!r}, which {description} names")

    def run(arrays: Inputs) -> Any:
        feeds = {
            inputs[name]: np.moveaxis(array, -1, -3).astype(np.float32) / np.float32(255.0)
            if parsed.observation[name].channels_first
            else array
            for name, array in arrays.items()
        }
        return network.run(feeds)[outputs.index(output)]

    return FunctionPolicy(spec, run, units=units, fingerprint=fingerprint)


def _fingerprint(file: Path) -> str:
    """Of a graph, and of the files in its folder that it names as the location of weights."""
    graph, names = read_part(file), sorted(path.name for path in file.parent.iterdir())
    weights = [name for name in names if b"location\x12%c%b" % (len(name.encode()), name.encode()) in graph]
    prints = [fingerprint_of(file.with_name(name)) for name in (file.name, *weights)]
    return joint_fingerprint(*prints) if weights else prints[0]


@dataclass(frozen=True)
class RegressionBundle(Bundle[ChunkSpec]):
    """A loaded bundle of a policy by regression, whose actions are clipped to the range of its training data."""

    network: Network
    units: FlowUnits

    def policy(self) -> FunctionPolicy:
        """The policy."""
        words = self.manifest.words

        def run(arrays: Inputs, instruction: Sequence[str | None] = ()) -> Any:
            tokens = {} if words is None or not instruction else {INSTRUCTION: words.numbers(instruction)}
            return self.network.run({**arrays, **tokens})[0]

        return FunctionPolicy(self.spec, run, units=ActionUnits.of_range(self.units.low, self.units.high))


def load_regression(name_or_path: str | Path, *, compute: Compute = CPU) -> RegressionBundle:
    """Loads a bundle of a policy by regression; see :func:`~specact.families.chunks.flow.load_flow`."""
    bundle = open_bundle(name_or_path, "regression", ChunkSpec, REGRESSION_PARTS)
    inputs = NetworkInputs(bundle.spec.observation, bundle.manifest.words).shapes
    outputs = {"actions": ("batch", bundle.spec.chunk, bundle.spec.actions)}
    network = Network(bundle.files["policy"], inputs, outputs, compute)
    return RegressionBundle(**vars(bundle), network=network, units=read_flow_units(bundle))
