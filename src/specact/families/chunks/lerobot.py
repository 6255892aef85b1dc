"""LeRobot's policies as chunk policies; importing this needs LeRobot, which no extra of this package brings."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.policies.utils import populate_queues
from lerobot.processor import AbsoluteActionsProcessorStep
from lerobot.utils.constants import ACTION, OBS_IMAGES
from safetensors import safe_open

from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import Array, FlowPolicy, FlowUnits
from specact.families.chunks.policy import ChunkPolicy, ChunkSpec
from specact.families.chunks.sources import FunctionPolicy, Inputs, LoadedPolicy, third_party
from specact.observation import Field, ObservationSpec, Window, lerobot_name
from specact.types import ActionUnits

# Files that save_pretrained writes for a policy and its processors.
_WEIGHTS = "model.safetensors"
_FILES = ("config.json", _WEIGHTS, "policy_preprocessor.json", "policy_postprocessor.json")
# The noise of flow policies is an argument, and they draw no other random numbers.
_FLOWS, _DETERMINISTIC = ("pi0", "pi05", "smolvla"), ("act",)
# Settings that are overridden: initial weights that are replaced anyway, and compilation, which hides the parts.
_OVERRIDES = {"pretrained_backbone_weights": None, "load_vlm_weights": False, "compile_model": False}
_OBSERVED = (FeatureType.STATE, FeatureType.ENV, FeatureType.VISUAL)


class LeRobotModel:
    """A LeRobot policy with its saved processors, in a folder of ``save_pretrained``, as a function of a batch.

    Inferences run one at a time, under ``lock``, each after a reset: the policy's queues, the state of its processors
    and PyTorch's generator are shared by the whole process.

    Raises:
        BundleError: if the weights are not those of the policy, or it stores its observation history in an unsupported
            way.
    """

    def __init__(self, path: Path) -> None:
        self.config = PreTrainedConfig.from_pretrained(path)
        for name in _OVERRIDES.keys() & vars(self.config).keys():
            setattr(self.config, name, _OVERRIDES[name])
        self.policy = get_policy_class(self.config.type).from_pretrained(path, config=self.config)
        _check_weights(self.policy.state_dict(), path / _WEIGHTS)
        self.policy.eval().requires_grad_(False)
        # It may have been saved on a device that this machine does not have.
        device = {"device_processor": {"device": self.config.device}}
        self._before, self._after = make_pre_post_processors(
            self.config, pretrained_path=str(path), preprocessor_overrides=device
        )
        self.lock = threading.Lock()
        self.policy.reset()
        self._has_queues = any(key != ACTION for key in getattr(self.policy, "_queues", None) or {})
        self._history = int(self.config.n_obs_steps)
        if self._history > 1 and not self._has_queues:
            raise BundleError(
                f"policies of type {self.config.type} use {self._history} observations and store them in a way that "
                "is not supported; supported are those with a queue for each observation, such as diffusion"
            )
        self._keys = {
            lerobot_name(key): key
            for key, feature in self.config.input_features.items()
            # The policy itself fills in cameras that a robot does not have.
            if feature.type in _OBSERVED and not key.startswith(f"{OBS_IMAGES}.empty_camera_")
        }
        fields = {name: self._field(self.config.input_features[key]) for name, key in self._keys.items()}
        instruction = any(hasattr(step, "task_key") or hasattr(step, "language_key") for step in self._before.steps)
        self.observation = ObservationSpec(fields, instruction)

    @property
    def absolute(self) -> bool:
        """Whether actions are absolute: the postprocessor does not need the observation."""
        steps = (step for step in self._after.steps if isinstance(step, AbsoluteActionsProcessorStep))
        return not any(step.enabled for step in steps) and not getattr(self.config, "adapt_to_pi_aloha", False)

    def answer(
        self, inputs: Inputs, rngs: Sequence[np.random.Generator], instruction: Sequence[str] | None = None
    ) -> Array:
        """Chunks ``[B, H, A]`` in the environment's units, each sampled with its own generator."""
        with self.lock, torch.no_grad():
            if self.config.type in _FLOWS:
                shape = (self.config.chunk_size, self.config.max_action_dim)
                noise = np.stack([rng.standard_normal(shape, dtype=np.float32) for rng in rngs])
                return self.actions(self.predict(inputs, instruction, noise=self.tensor(noise)))
            if self.config.type in _DETERMINISTIC:
                return self.actions(self.predict(inputs, instruction))
            # All others draw from PyTorch's generator: one by one, so that a chunk does not depend on its batch.
            chunks, place = [], torch.device(self.config.device)
            for row, rng in enumerate(rngs):
                alone = {name: array[row : row + 1] for name, array in inputs.items()}
                with torch.random.fork_rng([place] if place.type == "cuda" else []):
                    torch.manual_seed(int(rng.integers(1 << 63)))
                    text = None if instruction is None else instruction[row : row + 1]
                    chunks.append(self.actions(self.predict(alone, text)))
            return np.concatenate(chunks)

    def predict(self, inputs: Inputs, instruction: Sequence[str] | None, **noise: torch.Tensor) -> torch.Tensor:
        """The policy's ``predict_action_chunk`` for preprocessed inputs, ``[B, H, A]`` in the policy's units."""
        self.policy.reset()
        tensors = {self._keys[name]: _to_lerobot(array) for name, array in inputs.items()}
        task = {} if instruction is None else {"task": list(instruction)}
        for step in range(self._history):
            batch = self._before({key: tensor[:, step] for key, tensor in tensors.items()} | task)
            batch.pop(ACTION, None)  # it is None, which a queue would store as an action
            if self._has_queues:
                if self.config.image_features:
                    batch[OBS_IMAGES] = torch.stack([batch[key] for key in self.config.image_features], dim=-4)
                self.policy._queues = populate_queues(self.policy._queues, batch)
        chunk: torch.Tensor = self.policy.predict_action_chunk(batch, **noise)
        return chunk

    def actions(self, chunk: torch.Tensor) -> Array:
        """The postprocessed chunk, in the environment's units."""
        actions: Array = self._after(chunk).float().cpu().numpy()
        return actions

    def tensor(self, array: Array) -> torch.Tensor:
        """A copy on the policy's device."""
        return torch.tensor(array, device=self.config.device)

    def limits(self) -> tuple[Array, Array] | None:
        """Minimum and maximum of the demonstrated actions ``[A]``, from the postprocessor's statistics, or None."""
        for step in self._after.steps if self.absolute else ():
            stats = (getattr(step, "stats", None) or {}).get(ACTION, {})
            if "min" in stats and "max" in stats:
                low, high = (np.asarray(stats[end], np.float32).reshape(-1) for end in ("min", "max"))
                return low, high
        return None

    def _field(self, feature: Any) -> Field:
        if feature.type is not FeatureType.VISUAL:
            return Field(tuple(feature.shape), "float32", self._history)
        channels, height, width = feature.shape
        return Field((height, width, channels), "uint8", self._history)


class LeRobotFlow:
    """The parts of SmolVLA, pi0 or pi05, see :class:`~specact.families.chunks.flow.FlowNetworks`.

    Their time runs from 1, noise, to 0, data: ``v(x, t) = -v'(x, 1 - t)``. Their chunks are padded to a width W common
    to all robots, ``[H, W]`` with W at least A; padded dimensions are not guided.
    """

    def __init__(self, model: LeRobotModel) -> None:
        self._model = model
        # The tokens that were encoded last, and the embedded prefix they were made from.
        self._last: tuple[Array, Any] | None = None

    def tokens(self, windows: Sequence[Window]) -> Array:
        """The embeddings of images, instruction and state, ``[B, N, W]``; N does not depend on the instruction.

        Masked tokens are moved to the end as zeros. In pi0 only the expert reads the state; its embedding is the last
        token. Positions, which the policy's own layers receive separately, are added to the tokens.
        """
        kind, network, embedded = self._model.config.type, self._model.policy.model, list[Any]()

        def embed(
            images: Any, masks: Any, words: torch.Tensor, read: Any, *state: torch.Tensor, noise: torch.Tensor
        ) -> torch.Tensor:
            prefix = network.embed_prefix(images, masks, words, read, *(state if kind == "smolvla" else ()))
            whole = prefix[0].shape[1] == getattr(network, "prefix_length", -1)
            more = 0 if whole else self._model.config.tokenizer_max_length - words.shape[1]
            tokens = _with_positions(_unmasked_first(prefix[0].float(), prefix[1], more))
            if kind == "pi0":
                extra = network.state_proj(state[0].to(network.state_proj.weight.dtype))[:, None]
                extra = torch.nn.functional.pad(extra, (0, tokens.shape[-1] - extra.shape[-1]))
                tokens = torch.cat([tokens, extra.float()], dim=1)
            embedded.extend((tokens.cpu().numpy(), prefix))
            return noise

        self._predict(windows, sample_actions=embed)
        tokens: Array = embedded[0]
        self._last = tokens, embedded[1]
        return tokens

    def cache(self, windows: Sequence[Window], tokens: Array | None = None) -> dict[str, Any]:
        """The arguments of every denoising step of these windows, besides the chunk and the time.

        Images are encoded again, unless ``tokens`` is the array that :meth:`tokens` returned last.
        """
        arguments, last = dict[str, Any](), self._last

        def note(x_t: torch.Tensor, timestep: torch.Tensor, **prefix: Any) -> torch.Tensor:
            arguments.update(prefix)
            return torch.zeros_like(x_t)

        known = {} if last is None or tokens is not last[0] else {"embed_prefix": lambda *given, **named: last[1]}
        self._predict(windows, denoise_step=note, **known)
        return arguments

    def _predict(self, windows: Sequence[Window], **seams: Any) -> None:
        """Runs an inference in which some methods of the network are replaced."""
        model, network = self._model, self._model.policy.model
        spec = model.observation
        texts = [window.instruction or "" for window in windows] if spec.instruction else None
        shape = (len(windows), model.config.chunk_size, model.config.max_action_dim)
        with model.lock, torch.no_grad():
            try:
                for name, method in seams.items():
                    setattr(network, name, method)
                model.predict(spec.stack(windows), texts, noise=model.tensor(np.zeros(shape, np.float32)))
            finally:
                for name in seams:
                    delattr(network, name)  # the methods of the class are visible again

    def velocity(self, chunks: Array, times: Array, cache: dict[str, Any]) -> Array:
        with self._model.lock, torch.no_grad():
            velocity: Array = self._velocity(self._model.tensor(chunks), self._model.tensor(times), cache).cpu().numpy()
        return velocity

    def guide(
        self, chunk: Array, time: Array, cache: dict[str, Any], wanted: Array, weights: Array
    ) -> tuple[Array, Array]:
        tensor, actions = self._model.tensor, self._model.config.action_feature.shape[0]
        with self._model.lock, torch.enable_grad():
            x, now = tensor(chunk).requires_grad_(), tensor(time)
            velocity = self._velocity(x, now, cache)
            outcome = x + (1.0 - now)[:, None, None] * velocity
            missing = (tensor(weights)[..., None] * (tensor(wanted) - outcome)).detach()
            missing[..., actions:] = 0.0
            (pull,) = torch.autograd.grad(outcome, x, missing)
        return velocity.detach().cpu().numpy(), pull.cpu().numpy()

    def _velocity(self, x: torch.Tensor, times: torch.Tensor, cache: dict[str, Any]) -> torch.Tensor:
        given = {name: _expanded(value, len(x)) for name, value in cache.items()}
        velocity: torch.Tensor = -self._model.policy.model.denoise_step(x_t=x, timestep=1.0 - times, **given)
        return velocity


def load_lerobot(source: str, *, steps: int = 10) -> LoadedPolicy:
    """The LeRobot policy ``lerobot:PATH@HZ`` as a chunk policy.

    SmolVLA, pi0 and pi05 become a :class:`~specact.families.chunks.flow.FlowPolicy` of so many steps, unless their
    actions are relative to the observation; all others are called by their ``predict_action_chunk``.

    Raises:
        ConfigError: if the source does not name a saved policy and a rate.
        BundleError: if the policy cannot be used.
    """
    path, rate_hz = _named(source)
    # LeRobot prints progress on stdout.
    with third_party(f"{path} cannot be used as a LeRobot policy"), contextlib.redirect_stdout(sys.stderr):
        model = LeRobotModel(path)
        zeros = model.observation.zeros()
        texts = None if zeros.instruction is None else [zeros.instruction]
        chunk = model.answer(model.observation.stack([zeros]), [np.random.default_rng(0)], texts)
        limits = model.limits()
        units = _flow_units(model, limits) if model.config.type in _FLOWS and model.absolute else None
    spec, fingerprint = ChunkSpec(model.observation, chunk.shape[1], chunk.shape[2], rate_hz), _fingerprint(path)
    span = None if limits is None else ActionUnits.of_range(*limits)
    policy: ChunkPolicy = (
        FunctionPolicy(spec, model.answer, units=span, fingerprint=fingerprint, seeded=True)
        if units is None
        else FlowPolicy(LeRobotFlow(model), units, spec, steps=steps)
    )
    return LoadedPolicy(path.resolve().name, policy, span, fingerprint)


def _named(source: str) -> tuple[Path, float]:
    """Folder and control rate [Hz] of a source ``lerobot:PATH@HZ``."""
    folder, _, rate = source.removeprefix("lerobot:").rpartition("@")
    try:
        rate_hz = float(rate)
    except ValueError:
        rate_hz = 0.0
    if not folder or not 0.0 < rate_hz < np.inf:
        raise ConfigError(
            f"{source!r} does not say at which rate the policy is to act, which a LeRobot policy does not know; it "
            "must be lerobot:PATH@HZ, such as lerobot:outputs/pretrained_model@30; the rate is the fps of its dataset"
        )
    path = Path(folder).expanduser()
    lacking = [name for name in _FILES if not (path / name).is_file()]
    if lacking:
        raise ConfigError(
            f"{path} lacks {', '.join(lacking)}; it must be a folder on this machine in which the save_pretrained of a "
            "LeRobot policy and of both its processors wrote, such as checkpoints/last/pretrained_model of "
            "lerobot-train"
        )
    return path, rate_hz


def _check_weights(state: dict[str, torch.Tensor], file: Path) -> None:
    """Refuses missing and incompatible weights, which LeRobot reports and then leaves at their initial values."""
    with safe_open(file, "pt") as saved:
        shapes = {name: list(saved.get_slice(name).get_shape()) for name in saved.keys()}  # noqa: SIM118
    strange = [name for name, shape in shapes.items() if name not in state or list(state[name].shape) != shape]
    # Tied weights are saved under one of their names.
    held = {state[name].data_ptr() for name in shapes.keys() & state.keys()}
    missing = [name for name, tensor in state.items() if name not in shapes and tensor.data_ptr() not in held]
    if strange or missing:
        raise BundleError(
            f"{file} does not fit the policy that its config.json describes: {len(missing)} weights are missing and "
            f"{len(strange)} are unknown or have another shape, first {(missing + strange)[0]}; save it again"
        )


def _flow_units(model: LeRobotModel, limits: tuple[Array, Array] | None) -> FlowUnits | None:
    """Units of the padded flow, or None if its outputs are not mapped to actions by offset and scale."""
    width, padded = model.config.action_feature.shape[0], model.config.max_action_dim
    centre, unit, other = (
        model.actions(torch.full((1, 1, width), value))[0, 0] for value in (0.0, 1.0, -3.0)
    )  # fmt: skip
    scale = unit - centre
    if not np.allclose(other, centre - 3.0 * scale, rtol=1e-4, atol=1e-5):
        return None
    low, high = limits or (np.full(width, -np.inf, np.float32), np.full(width, np.inf, np.float32))
    more = (0, padded - width)
    return FlowUnits(
        np.pad(centre, more), np.pad(scale, more, constant_values=1.0),
        np.pad(low, more, constant_values=-np.inf), np.pad(high, more, constant_values=np.inf),
    )  # fmt: skip


def _to_lerobot(array: Any) -> torch.Tensor:
    """An array as LeRobot's processors expect it: camera frames channels first, in [0, 1]."""
    tensor = torch.tensor(array)
    return (tensor.movedim(-1, -3).float() / 255.0).contiguous() if tensor.dtype == torch.uint8 else tensor


def _unmasked_first(tokens: torch.Tensor, mask: torch.Tensor, padding: int) -> torch.Tensor:
    """Of ``[B, N, W]`` the tokens that are attended to, then zeros for the others and so many more."""
    order = torch.argsort(~mask.bool(), dim=1, stable=True)[..., None].expand_as(tokens)
    return torch.nn.functional.pad((tokens * mask[..., None]).gather(1, order), (0, 0, 0, padding))


def _with_positions(tokens: torch.Tensor) -> torch.Tensor:
    """Tokens ``[B, N, W]`` plus sinusoidal position encodings scaled by each token's norm: zeros stay zeros."""
    count, width = tokens.shape[1:]
    rates = 10_000.0 ** (-torch.arange(0, width, 2, device=tokens.device) / width)
    angles = torch.arange(count, device=tokens.device)[:, None] * rates
    size = tokens.square().mean(-1, keepdim=True).sqrt()
    return tokens + size * torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


def _expanded(value: Any, count: int) -> Any:
    """A prefix's value for a batch of ``count`` chunks; KV caches are copied, because a step writes to them."""
    if isinstance(value, torch.Tensor):
        return value.expand(count, *value.shape[1:])
    keys = copy.deepcopy(value)
    if keys.layers[0].keys.shape[0] != count:
        keys.batch_repeat_interleave(count)
    return keys


def _fingerprint(path: Path) -> str:
    """Fingerprint of the weights and of all settings."""
    digest = hashlib.sha256()
    for file in sorted([*path.glob("*.json"), *path.glob("*.safetensors")]):
        with file.open("rb") as content:
            digest.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()[:16]
