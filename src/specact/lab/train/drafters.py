"""``specact train`` of drafters: trains a bundle on a token policy's own rollouts; resumable."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import torch
from safetensors.numpy import load_file, save
from torch import Tensor, nn

from specact import __version__
from specact.bundle.manifest import write_manifest
from specact.errors import BundleError, ConfigError
from specact.families.tokens.bins import BINS
from specact.families.tokens.bundle import TokenBundle, load_tokens
from specact.families.tokens.drafter_bundle import DRAFTER_PARTS, TREE_RANGES, BigramTable, DraftedFor, DrafterSettings
from specact.families.tokens.head import TokenHead
from specact.files import check_name, write_whole
from specact.lab.data.locks import locked
from specact.lab.envs import env_of
from specact.lab.rollout.pool import Pool
from specact.lab.rollout.token_rollouts import SHARD, RolloutRequest, TokenRollouts, read_rollouts, record_rollouts
from specact.lab.train.drafter_head import DrafterHead, Weights, chain_metrics, head_loss, output_layer
from specact.lab.train.drafter_settings import fit_settings, memory_of, scale_of
from specact.lab.train.export import PARITY, round_to_half, store_as_half, to_onnx
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import Accelerator, Metrics, Stage, accelerator, adamw, autocast, cosine, device_of, run
from specact.lab.train.recipe import HELD_OUT, read_recipe
from specact.lab.train.stages import Progress
from specact.lab.train.train import TrainingResult
from specact.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SEED, check_ranges
from specact.rng import Role, stream
from specact.toml import build

# Maximum number of inferences for validation.
_VALIDATED = 2048


@dataclass(frozen=True)
class DrafterRecipe:
    """A training run of a target's drafters.

    Attributes:
        kind: identifies this recipe type.
        bundle: name of the bundle.
        target: bundle of the token policy, by name or path.
        env: environment of its rollouts; its own if not given.
        episodes: number of rollouts.
        strict: dimensions of an action without a tolerance, such as a gripper.
        groups: the group of every dimension for HeiSD's acceptance, such as 0 for positions and 1 for a gripper; each
            its own if not given.
        path: indices into the observation ``state`` of the point for HeiSD's kinematic metric; all if not given.
        window: history of that metric in inferences, at least 3.
        top, tree, nodes: children of a node, depth and size of the head's tree.
        graph: search HeiSD's memory in a graph, approximately, instead of exhaustively; for large memories. Needs
            the extra ``retrieval`` wherever it is used.
        bigrams: K, most frequent successors that are stored per token.
        heads, dropout: of the head's layer.
        ahead: number of autoregressive passes in the head's training.
        feature_weight, token_weight: of the features' smooth L1 loss, and of the cross-entropy to the target's
            distribution.
        feature_noise: half the width of the uniform noise on its input features.
        steps, batch, learning_rate, weight_decay, warmup: AdamW with linear warm-up and a cosine schedule to 2 %.
        average: decay of the exponential moving average of the weights, which is exported.
        bfloat16: whether matrix products in training run in bfloat16.
        precision: of the exported weights.
        seed: random seed.
        held_out: share of the episodes kept for validation.
    """

    kind: Literal["drafters"]
    bundle: str
    target: str
    env: str | None = None
    episodes: int = 300
    strict: tuple[int, ...] = ()
    groups: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    window: int = 5
    top: int = 8
    tree: int = 4
    nodes: int = 50
    graph: bool = False
    bigrams: int = 16
    heads: int = 4
    dropout: float = 0.1
    ahead: int = 4
    feature_weight: float = 1.0
    token_weight: float = 1.0
    feature_noise: float = 0.2
    steps: int = 2000
    batch: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 1e-2
    warmup: int = 100
    average: float = 0.998
    bfloat16: bool = True
    precision: Literal["float16", "float32"] = "float16"
    seed: int = 0
    held_out: float = 0.1

    def __post_init__(self) -> None:
        check_name("a bundle", self.bundle)
        check_ranges(self, dict.fromkeys(("heads", "ahead", "steps", "batch"), COUNT))
        check_ranges(self, {"top": TREE_RANGES["top"], "tree": TREE_RANGES["depth"], "nodes": TREE_RANGES["nodes"]})
        rates = ("feature_weight", "token_weight", "feature_noise", "weight_decay", "warmup")
        check_ranges(self, dict.fromkeys(rates, NOT_NEGATIVE))
        others = {
            "dropout": BELOW_ONE, "learning_rate": POSITIVE, "average": BELOW_ONE, "seed": SEED, "held_out": HELD_OUT,
        }  # fmt: skip
        check_ranges(self, others)
        if self.episodes < 2 * SHARD or self.episodes % SHARD:
            raise ConfigError(
                f"episodes must be a multiple of {SHARD}, which share a file, and at least {2 * SHARD}, of which one "
                f"file is held out; got {self.episodes}"
            )
        if not 1 <= self.bigrams <= BINS:
            raise ConfigError(f"bigrams must be 1 to {BINS}, got {self.bigrams}")


def is_drafters(path: Path) -> bool:
    """Whether a recipe is one of drafters."""
    return read_recipe(path).get("kind") == "drafters"


def load_drafter_recipe(path: Path) -> DrafterRecipe:
    """Reads and checks the recipe of drafters.

    Raises:
        ConfigError: if the file is missing, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    return build(DrafterRecipe, read_recipe(path), "recipe")


def train_drafters(
    recipe: DrafterRecipe,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    jobs: int = 1,
    every: int = 250,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """Trains the drafters of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

    The rollouts are stored in ``out/rollouts``, see :class:`~specact.lab.rollout.token_rollouts.TokenRollouts`.
    """
    torch.set_num_threads(threads)
    device, target = accelerator(on), load_tokens(recipe.target)
    _check_target(recipe, target)
    request = asdict(recipe) | {"taught_by": target.fingerprint}
    check_free(out, request)
    with locked(out):
        claim(out, request)
        # By path, so that other processes read the same bundle.
        rollouts = RolloutRequest(str(target.path), env_of(target, recipe.env), recipe.seed, out / "rollouts")
        files = recipe.episodes // SHARD
        with Pool(jobs) as pool:
            record_rollouts(rollouts, files, pool.each, lambda done, total: progress("rollouts", done, total))
        first_held_out = files - max(1, round(recipe.held_out * files))
        train, held_out = (
            read_rollouts([rollouts.file(number) for number in part])
            for part in (range(first_held_out), range(first_held_out, files))
        )
        # Before the training, so that errors are raised early.
        settings = fit_settings(
            train, held_out, target.spec.actions, strict=recipe.strict, groups=recipe.groups, path=recipe.path,
            window=recipe.window,
        )  # fmt: skip
        settings.check(target.spec)
        settings = replace(settings, top=recipe.top, depth=recipe.tree, nodes=recipe.nodes, graph=recipe.graph)
        stage = _stage(recipe, target, train, held_out)
        stage.module.load_state_dict(
            run(stage, out, lambda done: progress(stage.name, done, recipe.steps), every=every, device=device)
        )
        assert isinstance(stage.module, DrafterHead)
        folder = out / "bundles" / recipe.bundle
        manifest = {
            "name": recipe.bundle, "env": rollouts.env, "specact": __version__, "recipe": request,
            "training": last_lines(out),
        }  # fmt: skip
        write_drafters(folder, manifest, recipe, settings, target, stage.module, train, held_out)
        return TrainingResult([folder], last_lines(out))


def _check_target(recipe: DrafterRecipe, target: TokenBundle) -> None:
    actions = target.spec.actions
    if not all(0 <= dimension < actions for dimension in recipe.strict):
        raise ConfigError(f"strict names dimensions 0 to {actions - 1} of {target.name}, got {list(recipe.strict)}")
    if target.networks.width % recipe.heads:
        raise ConfigError(f"heads must divide {target.networks.width}, the width of {target.name}, got {recipe.heads}")
    if target.networks.length < 2:
        raise ConfigError(f"{target.name} writes chunks of a single token, of which nothing can be drafted")


def _stage(recipe: DrafterRecipe, target: TokenBundle, train: TokenRollouts, held_out: TokenRollouts) -> Stage:
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    embedding = torch.from_numpy(load_file(target.files["embedding"])["embedding"])
    write = output_layer(target.files["decoder"])
    model = DrafterHead(embedding, write, target.networks.length, recipe.heads, recipe.dropout)
    weights, kept = Weights(recipe.feature_weight, recipe.token_weight), slice(_VALIDATED)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
        device = device_of(model)
        tokens, features = _tensors(train, rows, device)
        with autocast(_Width(embedding.shape[1], recipe.bfloat16), device):
            return head_loss(model, tokens, features, weights, recipe.ahead, recipe.feature_noise)

    def validate(module: nn.Module) -> Metrics:
        tokens, features = _tensors(held_out, kept, device_of(model))
        _, parts = head_loss(model, tokens, features, weights, recipe.ahead, 0.0)
        chains = chain_metrics(model, tokens, features, recipe.ahead, recipe.strict, target.spec.actions)
        return {name: float(value) for name, value in parts.items()} | chains

    return Stage(
        name="head",
        module=model,
        optimizer=adamw(model, recipe.weight_decay),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, recipe.warmup, recipe.steps),
        seed=recipe.seed,
        average=recipe.average,
    )


@dataclass(frozen=True)
class _Width:
    """What :func:`~specact.lab.train.loop.autocast` asks of a recipe."""

    width: int
    bfloat16: bool


def _tensors(rollouts: TokenRollouts, rows: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    tokens, features = (torch.from_numpy(column[rows]).to(device) for column in (rollouts.tokens, rollouts.features))
    return tokens.long(), features.float()


def bigram_of(tokens: np.ndarray, most: int) -> BigramTable:
    """How often a token follows another, in chunks ``[N, T]``; the most frequent ``most``, see :class:`BigramTable`.

    The place's own frequencies count as one more observation: they are what is known after a token that never came.
    """
    places, found = tokens.shape[1] - 1, tokens.astype(np.int64)
    counts = np.zeros((places, BINS, BINS))
    np.add.at(counts, (np.arange(places), found[:, :-1], found[:, 1:]), 1.0)
    counts += counts.sum(1, keepdims=True) / len(tokens)
    with np.errstate(divide="ignore"):
        log_probs = np.log(counts / counts.sum(-1, keepdims=True))
    best = np.argsort(-log_probs, axis=-1, kind="stable")[..., :most]
    kept = np.maximum(np.take_along_axis(log_probs, best, -1), np.finfo(np.float16).min)
    return BigramTable(best.astype(np.uint8), kept.astype(np.float16))


def write_drafters(
    path: Path,
    manifest: dict[str, Any],
    recipe: DrafterRecipe,
    settings: DrafterSettings,
    target: TokenBundle,
    head: DrafterHead,
    rollouts: TokenRollouts,
    held_out: TokenRollouts,
) -> None:
    """Writes a bundle folder; the manifest goes last, so a killed export leaves no folder that loads.

    Args:
        path: folder to write; its manifest, if any, is removed first.
        manifest: name, env, recipe, training metrics.
        recipe: of the training.
        settings: all but the scale of a threshold, which takes the head.
        target: that is drafted for.
        head: as trained; its weights are rounded in place where the recipe says so.
        rollouts, held_out: of the target.

    Raises:
        BundleError: if the exported head does not answer like the trained one.
    """
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").unlink(missing_ok=True)
    head.eval().requires_grad_(False)
    half, files = recipe.precision == "float16", {part: path / name for part, name in DRAFTER_PARTS.items()}
    if half:
        round_to_half(head)
    told = {
        "kind": "drafters", **manifest, "parity": {"head": export_head(head, files["head"], half)},
        "parameters": {"head": sum(p.numel() for p in head.parameters())},
    }  # fmt: skip
    write_whole(files["bigram"], save(vars(bigram_of(rollouts.tokens, recipe.bigrams))))
    memory_of(rollouts).save(files["memory"])
    length, width = target.networks.length, target.networks.width
    settings = replace(settings, scale=scale_of(held_out, TokenHead(files["head"], length, width)))
    write_manifest(path, told, DraftedFor(target.fingerprint, length, width, settings), DRAFTER_PARTS)


def export_head(head: DrafterHead, file: Path, half: bool) -> float:
    """Exports the head and returns the largest difference found between PyTorch and ONNX Runtime."""
    new, seen = {1: "tokens"}, {1: "tokens", 2: "cached"}
    free = {
        "tokens": new, "features": new, "places": new, "seen": seen, "among": {1: "tokens", 2: "tokens"},
        "cache": {3: "cached"},
    }  # fmt: skip
    proto = to_onnx(head, {**example(head, 3)}, ["logits", "predicted", "entries"], free=free)
    if half:
        store_as_half(proto)
    onnx.checker.check_model(proto)
    write_whole(file, proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    difference = 0.0
    for batch in (1, 7):
        values = example(head, batch)
        found = session.run(None, {name: value.numpy() for name, value in values.items()})
        for want, got in zip(head(**values), found, strict=True):
            difference = max(difference, float(np.abs(want.numpy() - got).max()))
    if difference > PARITY:
        raise BundleError(f"{file} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference


def example(head: DrafterHead, batch: int) -> dict[str, Tensor]:
    """Inputs of a head: random tokens after random cache entries, one of each hidden from another token."""
    generator, news, cached = torch.Generator().manual_seed(batch), 2 * batch + 1, batch + 2  # all sizes differ
    width, heads = head.embedding.embedding_dim, head.layer.heads
    among, seen = torch.ones(batch, news, news).tril().bool(), torch.ones(batch, news, cached).bool()
    among[:, -1, 0] = seen[:, -1, 0] = False
    return {
        "tokens": torch.randint(BINS, (batch, news), generator=generator),
        "features": torch.randn(batch, news, width, generator=generator),
        "places": torch.arange(news).clamp(max=head.length - 1).expand(batch, -1),
        "seen": seen,
        "among": among,
        "cache": torch.randn(batch, 2, heads, cached, width // heads, generator=generator),
    }
