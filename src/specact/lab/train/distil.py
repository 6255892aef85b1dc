"""Distillation of a draft: retrains it on the target's outputs in states visited by the gated policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from specact.bundle.manifest import write_manifest
from specact.families.codes.bundle import PARTS, Bundle, load_bundle
from specact.gates.settings import GateSettings
from specact.lab.data.distillation import Column, DistillationData, FrameWindows, join
from specact.lab.data.locks import locked
from specact.lab.rollout.distillation import Collect
from specact.lab.train.encoder import PatchEmbedding
from specact.lab.train.export import export_policy
from specact.lab.train.loop import Metrics, Stage, cosine, run
from specact.lab.train.rebuild import architecture, rebuild
from specact.lab.train.vqbet import VQBeT, moments, plain
from specact.lab.train.windows import Statistics
from specact.observation import ObservationSpec
from specact.rng import Role, stream

_BATCH = 256  # windows of frames per encoder pass
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DistilRecipe:
    """The settings of a distillation.

    Attributes:
        rates: transmission rates of the random gates in rollouts.
        rounds: the first one rolls out the bundle's draft, every further one the previous distilled draft.
        steps, batch, learning_rate: AdamW with warm-up and a cosine schedule.
        offset_weight: weight of the offsets' L1 distance to the target's, weighted with p, relative to the codes'
            cross-entropy.
        seed: random seed.
    """

    rates: tuple[float, ...] = (0.0, 0.2, 0.4, 0.6)
    rounds: int = 2
    steps: int = 12_000
    batch: int = 512
    learning_rate: float = 2e-3
    offset_weight: float = 10.0
    seed: int = 0


def distil(
    bundle: Bundle, recipe: DistilRecipe, collect: Collect, out: Path, progress: Progress, *, threads: int = 1
) -> Path:
    """Makes the bundle ``NAME-distilled``: the same target and tokenizer, the draft distilled from the target.

    The draft keeps its architecture and is trained from scratch, on the target's distribution in states that gated
    rollouts visit (DAgger, Ross et al. 2011, with the target as the expert). An image encoder that was trained before
    the draft stays frozen. A stopped run resumes in its last round.

    Args:
        bundle: the pair; made by ``specact train``, so that its manifest has the draft's architecture.
        recipe: its settings.
        collect: rolls a pair out under gates and returns the data of a round, given its number.
        out: folder of the run: weights and ``log.jsonl`` of every round, and the bundle.
        progress: called with (stage, done, total).
        threads: of PyTorch, in the whole process; results are exact for the same number.

    Raises:
        ConfigError: if the manifest lacks the draft's architecture, or ``out`` is locked by another process.
    """
    with locked(out):
        return _distil(bundle, recipe, collect, out, progress, threads)


def _distil(
    bundle: Bundle, recipe: DistilRecipe, collect: Collect, out: Path, progress: Progress, threads: int
) -> Path:
    torch.set_num_threads(threads)
    settings, shapes = architecture(bundle, "draft")
    gates = [GateSettings("random", threshold=rate) for rate in recipe.rates]
    collected: list[DistillationData] = []
    encoders = draft_encoders(bundle) if settings.encoder.learns else {}
    pair = bundle
    for number in range(recipe.rounds):
        collected.append(encoded(collect(pair, gates, number), encoders))
        train, held_out = join(collected).split()
        torch.manual_seed(recipe.seed)
        network = VQBeT(shapes, settings, observation_statistics(shapes.observation, train))
        for camera, encoder in encoders.items():
            network.freeze(camera, encoder)
        stage = _stage(f"distilled-{number}", network, recipe, bundle.spec.temperature, train, held_out)
        network.load_state_dict(run(stage, out, lambda done: progress("distilled draft", done, recipe.steps)))
        pair = _write(bundle, network, recipe, stage.validate(network), out / "bundles" / f"{bundle.name}-distilled")
    return pair.path


def observation_statistics(spec: ObservationSpec, data: DistillationData) -> Statistics:
    """Mean and standard deviation of the observations in all windows, by name."""
    fields = {} if spec.vectors is None else spec.vectors.fields
    values_of_field = {name: np.asarray(data.observation[name]) for name in fields}
    return {name: moments(values_of_field[name].reshape(-1, *field.shape)) for name, field in fields.items()}


def draft_encoders(bundle: Bundle) -> dict[str, nn.Module]:
    """The image encoders of a bundle's draft, by camera: frames ``[N, H, W, 3]`` to features ``[N, width]``.

    Raises:
        ConfigError: if the bundle lacks the draft's architecture or weights.
    """
    cameras = bundle.spec.draft.images
    if not cameras:
        return {}
    draft = rebuild(bundle, "draft", bundle.spec.draft.history)
    embeddings = {camera: getattr(draft, f"embed_{plain(camera)}") for camera in cameras}
    return {
        camera: nn.Sequential(embedding, nn.Flatten()) if isinstance(embedding, PatchEmbedding) else embedding.encoder
        for camera, embedding in embeddings.items()
    }


@torch.no_grad()
def encoded(data: DistillationData, encoders: Mapping[str, nn.Module]) -> DistillationData:
    """Replaces the frames of the encoders' cameras by their features ``[N, T, width]``."""

    def features(name: str, values: Column) -> Column:
        if name not in encoders or not isinstance(values, FrameWindows):
            return values
        parts = []
        for first in range(0, len(values), _BATCH):
            frames = np.asarray(values[np.arange(first, min(first + _BATCH, len(values)))])
            encoding = encoders[name](torch.from_numpy(frames.reshape(-1, *frames.shape[-3:])))
            parts.append(encoding.reshape(*frames.shape[:-3], -1).numpy())
        return np.concatenate(parts)

    return replace(data, observation={name: features(name, values) for name, values in data.observation.items()})


def _stage(
    name: str,
    network: VQBeT,
    recipe: DistilRecipe,
    temperature: float,
    train: DistillationData,
    held_out: DistillationData,
) -> Stage:
    def losses(data: DistillationData, rows: np.ndarray) -> dict[str, Tensor]:
        observation = {name: torch.from_numpy(np.asarray(values[rows])) for name, values in data.observation.items()}
        features = network.features(observation)[:, -1:]
        prediction = network.heads(features)
        p = torch.from_numpy(data.outputs["target_probs"][rows])
        logs = (prediction.logits[:, 0] / temperature).log_softmax(-1)
        target_offsets = torch.from_numpy(data.outputs["target_offsets"][rows].astype(np.float32))
        offset_error = (prediction.offsets[:, 0] - target_offsets).abs().mean((-2, -1))
        return {
            "cross_entropy": -(p * logs).sum((-2, -1)).mean(),
            "offset": (p * offset_error).sum((-2, -1)).mean(),
            "rejection": (p - logs.exp()).abs().sum(-1).mean() / 2,
        }

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
        parts = losses(train, rows)
        loss = parts["cross_entropy"] + recipe.offset_weight * parts["offset"]
        return loss, {name: part.detach() for name, part in parts.items()}

    # Frames without precomputed features take memory, so a subset is used.
    has_frames = any(isinstance(values, FrameWindows) for values in held_out.observation.values())
    rows_held_out = np.arange(min(len(held_out), _BATCH) if has_frames else len(held_out))

    def validate(module: nn.Module) -> Metrics:
        with torch.no_grad():
            return {key: float(value) for key, value in losses(held_out, rows_held_out).items()}

    return Stage(
        name=name,
        module=network,
        optimizer=torch.optim.AdamW(network.parameters(), weight_decay=1e-3, fused=True),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, 100, recipe.steps),
        seed=recipe.seed,
        average=0.998,
    )


def _write(bundle: Bundle, network: VQBeT, recipe: DistilRecipe, metrics: Metrics, path: Path) -> Bundle:
    """Writes the bundle with this draft; the manifest last, to mark it complete."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").unlink(missing_ok=True)
    for part in ("tokenizer", "target"):
        shutil.copyfile(bundle.files[part], path / PARTS[part])
    parity = export_policy(network, path / PARTS["draft"], bundle.manifest.recipe["precision"] == "float16")
    manifest = bundle.manifest.values()
    manifest.pop("head", None)  # it was trained for the old draft
    manifest |= {
        "name": path.name,
        "distilled": {"from": bundle.fingerprint, **vars(recipe), "held_out": metrics},
        "parity": manifest["parity"] | {"draft": parity},
    }
    write_manifest(path, manifest, bundle.spec, PARTS)
    return load_bundle(path)
