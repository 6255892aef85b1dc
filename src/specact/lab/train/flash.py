"""``specact train`` of FLASH's block for a flow policy: it learns the target's noiseless chunks on demonstrations."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from specact import __version__
from specact.bundle.bundle import find_bundle
from specact.bundle.manifest import read_manifest, write_manifest
from specact.errors import BundleError, ConfigError
from specact.families.chunks.flow import FlowPolicy
from specact.families.chunks.sources import LoadedPolicy, kind_of_source, load_policy
from specact.families.flash.bundle import FLASH_PARTS, Block, FlashSettings, MadeFor, describe_target, flow_of
from specact.files import check_name, write_whole
from specact.lab.data.locks import locked
from specact.lab.data.sources import Source
from specact.lab.train import stages
from specact.lab.train.attention import attend, by_head, perceptron
from specact.lab.train.chunk_recipe import ChunkRecipe
from specact.lab.train.export import PARITY, kept_head, round_to_half, store_as_half, take_manifest, to_onnx
from specact.lab.train.flash_check import fit_check, measure_check
from specact.lab.train.folder import check_free, claim, last_lines
from specact.lab.train.loop import Accelerator, Metrics, Stage, accelerator, adamw, cosine, device_of, run
from specact.lab.train.recipe import HELD_OUT, read_recipe
from specact.lab.train.stages import Progress
from specact.lab.train.teacher import check_teacher, forget_answers, teach, windows_at
from specact.lab.train.train import TrainingResult
from specact.lab.train.windows import Dataset, Windows
from specact.ranges import BELOW_ONE, COUNT, NOT_NEGATIVE, POSITIVE, SEED, check_ranges
from specact.rng import Role, stream
from specact.toml import build

# Windows that are validated on, and that the check is measured on.
_VALIDATED = 512
# Of the paper's weights: the longest prefix, its decay, and what comes after it.
_PREFIX, _DECAY, _REST = 16, 0.9, 0.1


@dataclass(frozen=True)
class FlashRecipe:
    """A training run of FLASH's block.

    Attributes:
        kind: tells it from other recipes.
        bundle: name of the bundle it makes.
        target: the flow policy that is drafted for: a bundle, by name or path, or ``lerobot:PATH@HZ``, see
            :func:`~specact.families.chunks.sources.load_policy`.
        data, observations, held_out: of a target that is no bundle, the demonstrations that it was trained on, see
            :class:`~specact.lab.train.recipe.Recipe`; a bundle's own recipe says it.
        execute: actions of a chunk that are executed at most before the next round.
        grippers: dimensions of an action that are grippers.
        period: checked rounds between two full ones at most; 0 for no limit.
        heads: of the block; they divide the width of the encoder's tokens.
        dropout: in it.
        steps, batch, learning_rate, weight_decay, warmup: AdamW with linear warm-up and a cosine to 2 %.
        average: decay of the exponential average of the weights, which is what is exported.
        precision: of the exported weights.
        seed: of everything random.
    """

    kind: Literal["flash"]
    bundle: str
    target: str
    execute: int
    data: tuple[str, ...] = ()
    observations: dict[str, Source] = field(default_factory=dict)
    held_out: float | None = None
    grippers: tuple[int, ...] = ()
    period: int = 4
    heads: int = 4
    dropout: float = 0.0
    steps: int = 3000
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    warmup: int = 100
    average: float = 0.998
    precision: Literal["float16", "float32"] = "float16"
    seed: int = 0

    def __post_init__(self) -> None:
        check_name("a bundle", self.bundle)
        check_ranges(self, dict.fromkeys(("heads", "steps", "batch"), COUNT))
        check_ranges(self, dict.fromkeys(("weight_decay", "warmup"), NOT_NEGATIVE))
        check_ranges(self, {"dropout": BELOW_ONE, "learning_rate": POSITIVE, "average": BELOW_ONE, "seed": SEED})
        if self.held_out is not None:
            check_ranges(self, {"held_out": HELD_OUT})
        FlashSettings(self.execute, self.grippers, self.period)
        bundled = kind_of_source(self.target) == "folder"
        if bundled and (self.data or self.observations or self.held_out is not None):
            raise ConfigError(
                f"the demonstrations are those of the recipe of {self.target}; leave out data, [observations] and "
                "held_out"
            )
        if not bundled and not self.data:
            raise ConfigError(
                f"nobody here knows what {self.target} was trained on; name those demonstrations, as in "
                'data = ["my_dataset"]'
            )


def is_flash(path: Path) -> bool:
    """Whether a recipe is one of FLASH's block."""
    return read_recipe(path).get("kind") == "flash"


def load_flash_recipe(path: Path) -> FlashRecipe:
    """Reads and checks the recipe of a block.

    Raises:
        ConfigError: if the file is missing, is not TOML, or holds an unknown key or a value of the wrong type.
    """
    return build(FlashRecipe, read_recipe(path), "recipe")


class DraftBlock(nn.Module):
    """One transformer block: learned queries attend to an encoder's tokens and to each other, and become a chunk.

    Args:
        width: W, of the tokens.
        chunk: H and A.
        heads, dropout: of the block.
    """

    def __init__(self, width: int, chunk: tuple[int, int], heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.queries = nn.Parameter(torch.randn(chunk[0], width) * 0.02)
        self.norm_tokens, self.norm_queries = nn.LayerNorm(width), nn.LayerNorm(width)
        self.keys_values, self.qkv = nn.Linear(width, 2 * width), nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp, self.mlp = nn.LayerNorm(width), perceptron(width, 4 * width, width)
        self.norm, self.write = nn.LayerNorm(width), nn.Linear(width, chunk[1])
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Chunks ``[B, H, A]`` in the flow's units, of tokens ``[B, N, W]``."""
        # One for each window without counting them, so that the exported graph computes no sizes.
        x = self.queries + 0.0 * tokens[:, :1, :1]
        queries, keys, values = by_head(self.qkv(self.norm_queries(x)), 3, self.heads)
        seen_keys, seen_values = by_head(self.keys_values(self.norm_tokens(tokens)), 2, self.heads)
        keys, values = torch.cat([seen_keys, keys], -2), torch.cat([seen_values, values], -2)
        x = x + self.dropout(self.project(attend(queries, keys, values)))
        x = x + self.dropout(self.mlp(self.norm_mlp(x)))
        chunks: Tensor = self.write(self.norm(x))
        return chunks


def train_flash(
    recipe: FlashRecipe,
    data: Path,
    out: Path,
    progress: Progress,
    *,
    threads: int = 1,
    on: Accelerator = "cpu",
) -> TrainingResult:
    """Makes the block of a recipe; arguments and errors as for :func:`~specact.lab.train.train.train`.

    The manifest's ``check`` says what the check tells of this target at each noise level, see
    :meth:`CheckMeasured.describe <specact.lab.train.flash_check.CheckMeasured.describe>`.
    """
    torch.set_num_threads(threads)
    device, target = accelerator(on), load_policy(recipe.target)
    flow = flow_of(target)
    spec, shown = flow.spec, _shown(recipe, flow)
    if recipe.execute > spec.chunk or any(place >= spec.actions for place in recipe.grippers):
        raise ConfigError(
            f"execute and grippers must fit chunks of {spec.chunk} x {spec.actions}, got "
            f"{recipe.execute} and {list(recipe.grippers)}"
        )
    asked = asdict(recipe) | {"taught_by": target.fingerprint}
    check_free(out, asked)
    made = stages.demonstrated(shown, stages.task_of(shown), data, progress)
    assert made.rate_hz is not None, "the recipe or its task says it"
    check_teacher(target, spec.chunk, made.action.shape[1], made.rate_hz, made)
    made = stages.needed(made, [spec.observation])
    with locked(out):
        claim(out, asked)
        with stages.frames_at_hand(made, out / "frames", progress) as made:
            dataset = stages.prepare(made, shown)
            calm = FlowPolicy(flow.networks, flow.units, spec, steps=flow.steps, spread=0.0)
            teach(dataset, replace(target, policy=calm), spec.chunk, out, recipe.seed, progress)
            stage = _stage(recipe, flow, dataset)
            best = run(stage, out, lambda done: progress(stage.name, done, recipe.steps), device=device)
            stage.module.load_state_dict(best)
            assert isinstance(stage.module, DraftBlock)
            folder = out / "bundles" / recipe.bundle
            manifest = {
                "name": recipe.bundle, "env": target.env, "specact": __version__, "recipe": asked,
                "training": last_lines(out), "target": describe_target(flow),
            }  # fmt: skip
            _write(folder, manifest, recipe, target, stage.module, dataset, progress)
        forget_answers(out)
        return TrainingResult([folder], last_lines(out))


def _shown(recipe: FlashRecipe, flow: FlowPolicy) -> ChunkRecipe:
    """What says which demonstrations are read, and how they are split: nothing is fitted to what a target learned."""
    if kind_of_source(recipe.target) == "folder":
        own = read_manifest(find_bundle(recipe.target)).recipe
        return build(
            ChunkRecipe, {key: entry for key, entry in own.items() if entry is not None and key != "teacher"}, "recipe"
        )
    return ChunkRecipe(
        "flow", recipe.bundle, rate_hz=flow.spec.rate_hz, observations=recipe.observations, data=recipe.data,
        chunk=flow.spec.chunk, seed=recipe.seed,
        held_out=ChunkRecipe.held_out if recipe.held_out is None else recipe.held_out,
    )  # fmt: skip


def _stage(recipe: FlashRecipe, flow: FlowPolicy, dataset: Dataset) -> Stage:
    torch.manual_seed(int(stream(recipe.seed, Role.DATA, episode=2).integers(2**62)))
    width, shape = _width(recipe, flow), (flow.spec.chunk, flow.spec.actions)
    model = DraftBlock(width, shape, recipe.heads, recipe.dropout)
    held_out = _some(dataset.held_out, recipe.seed, _VALIDATED)

    def batch(windows: Windows, rows: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
        tokens = flow.networks.tokens(windows_at(windows, flow.spec.observation, rows))
        # Of every window there is one answer, at its newest step.
        answers = dataset.centre + dataset.scale * windows.chunks[rows]
        wanted = flow.units.to_flow(answers.numpy())
        return torch.from_numpy(tokens).to(device), torch.from_numpy(wanted).to(device)

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rng = stream(recipe.seed, Role.DATA, step=step)
        tokens, wanted = batch(dataset.train, rng.integers(len(dataset.train), size=recipe.batch), device_of(model))
        error = nn.functional.smooth_l1_loss(model(tokens), wanted, reduction="none").mean(-1)
        weights = _weights(rng.integers(1, 1 + min(_PREFIX, shape[0]), size=recipe.batch), shape[0]).to(error.device)
        return (weights * error).sum() / weights.sum(), {"huber": error.detach().mean()}

    def validate(module: nn.Module) -> Metrics:
        tokens, wanted = batch(dataset.held_out, held_out, device_of(model))
        missing = (model(tokens) - wanted).detach()
        return {
            "rms": float(missing.square().mean().sqrt()),
            "huber": float(nn.functional.smooth_l1_loss(missing, torch.zeros_like(missing))),
        }

    return Stage(
        name="block",
        module=model,
        optimizer=adamw(model, recipe.weight_decay),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, recipe.warmup, recipe.steps),
        seed=recipe.seed,
        average=recipe.average,
    )


def _weights(prefixes: np.ndarray, steps: int) -> Tensor:
    """``.9^h`` within each of B prefixes and .1 after it, ``[B, H]``."""
    step = np.arange(steps)
    weights = np.where(step < prefixes[:, None], _DECAY**step, _REST)
    return torch.from_numpy(weights.astype(np.float32))


def _width(recipe: FlashRecipe, flow: FlowPolicy) -> int:
    width = _tokens(flow)[-1]
    if width % recipe.heads:
        raise ConfigError(f"heads must divide {width}, the width of {recipe.target}, got {recipe.heads}")
    return width


def _some(windows: Windows, seed: int, most: int) -> np.ndarray:
    return np.sort(stream(seed, Role.DATA, episode=5).permutation(len(windows))[:most])


def _write(
    path: Path,
    manifest: dict[str, Any],
    recipe: FlashRecipe,
    target: LoadedPolicy,
    model: DraftBlock,
    dataset: Dataset,
    progress: Progress,
) -> None:
    """Writes a bundle folder; the manifest goes last, so a killed export leaves no folder that loads."""
    path.mkdir(parents=True, exist_ok=True)
    before = take_manifest(path)
    model.eval().requires_grad_(False)
    half, file, flow = recipe.precision == "float16", path / FLASH_PARTS["block"], flow_of(target)
    if half:
        round_to_half(model)
    told = {
        "kind": "flash", **manifest, "parity": {"block": _export(model, _tokens(flow), file, half)},
        "parameters": {"block": sum(p.numel() for p in model.parameters())},
    }  # fmt: skip
    settings = FlashSettings(recipe.execute, recipe.grippers, recipe.period)
    rows = _some(dataset.held_out, recipe.seed, _VALIDATED)
    windows = windows_at(dataset.held_out, flow.spec.observation, rows)
    block = Block(file, (flow.spec.chunk, flow.spec.actions))
    measured = measure_check(
        flow, block, settings, windows, recipe.seed,
        lambda done: progress("check", done, len(windows)),
    )  # fmt: skip
    level, within = fit_check(measured)
    fitted = replace(settings, levels=(level,), within=within)
    told |= {"check": measured.describe(), **kept_head(path, before, FLASH_PARTS)}
    write_manifest(path, told, MadeFor(target.fingerprint, fitted), FLASH_PARTS)


def _tokens(flow: FlowPolicy) -> tuple[int, ...]:
    shape: tuple[int, ...] = flow.networks.tokens([flow.spec.observation.zeros()]).shape[1:]
    return shape


def _export(model: DraftBlock, tokens: tuple[int, ...], file: Path, half: bool) -> float:
    """Exports the block and returns the largest difference found between PyTorch and ONNX Runtime."""

    def example(batch: int) -> Tensor:
        return torch.randn(batch, *tokens, generator=torch.Generator().manual_seed(batch))

    proto = to_onnx(model, {"tokens": example(3)}, ["chunks"])
    if half:
        store_as_half(proto)
    onnx.checker.check_model(proto)
    write_whole(file, proto.SerializeToString())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    difference = max(
        float(np.abs(model(example(batch)).numpy() - session.run(None, {"tokens": example(batch).numpy()})[0]).max())
        for batch in (1, 7)
    )
    if difference > PARITY:
        raise BundleError(f"{file} differs from the trained network by {difference:.1e}, more than {PARITY:.0e}")
    return difference
