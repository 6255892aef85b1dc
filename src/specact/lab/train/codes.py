"""Training of pairs of VQ-BeT policies on one tokenizer: action codes (Lee et al. 2024; ADAHI, equations 1 to 3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from msgspec import structs
from torch import Tensor, nn

from specact.errors import ConfigError
from specact.families.codes.pair import PARTS, CodeParts
from specact.families.codes.policy import PolicySpec
from specact.lab.data.episodes import Episodes
from specact.lab.envs import load_task
from specact.lab.envs.task import Task
from specact.lab.train.attention import unknown
from specact.lab.train.dataset import Batch, Dataset, Windows, observation_of, positions
from specact.lab.train.encoder import ImageEncoder, encoded, encoder_stage, learned
from specact.lab.train.export import (
    BundleFolder,
    Graph,
    deployed,
    export_checked,
    observed,
    parameters_of,
    stored_weights,
    write_weights,
)
from specact.lab.train.fit import FromDemonstrations
from specact.lab.train.loop import Losses, Metrics, Progress, Stage, autocast, device_of, seed_weights
from specact.lab.train.recipe import CodesRecipe, EncoderRecipe, PolicyRecipe, plain
from specact.lab.train.vqbet import Prediction, ResidualVQ, Shapes, VQBeT, decoder_table, tokenizer_stage
from specact.observation import ObservationSpec
from specact.records import read_record

Role = Literal["draft", "target"]


class CodesTraining(FromDemonstrations):
    """The tokenizer, image encoders that learn before their policies, and policies of a recipe."""

    def __init__(self, recipe: CodesRecipe, data: Path) -> None:
        super().__init__(recipe, data, recipe.seed, skip_disturbed=recipe.skip_disturbed)
        self.recipe, self.request = recipe, plain(recipe)

    def reads(self, episodes: Episodes) -> set[str]:
        specs = specs_of(self.recipe, episodes)
        seen = {name for spec in specs.values() for name in spec.fields}
        return seen | learned(self.recipe, specs, episodes, self.task)

    @cached_property
    def task(self) -> Task | None:
        """The recipe's environment; None where it says a control rate instead."""
        return None if self.recipe.env is None else load_task(self.recipe.env)

    @cached_property
    def specs(self) -> dict[str, ObservationSpec]:
        """The observations of each policy, by its name."""
        return specs_of(self.recipe, self.episodes)

    @cached_property
    def encoders(self) -> dict[tuple[str, EncoderRecipe], str]:
        """Stages of pre-trained encoders, which policies may share, by camera and recipe."""
        stages: dict[tuple[str, EncoderRecipe], str] = {}
        for policy, settings in self.recipe.policies.items():
            for camera in self._cameras(policy):
                stages.setdefault((camera, settings.encoder), f"{policy}.{camera}")
        return stages

    def plan(self) -> list[dict[str, int]]:
        encoders = {name: recipe.steps for (_, recipe), name in self.encoders.items()}
        policies = {name: policy.steps for name, policy in self.recipe.policies.items()}
        return [{"tokenizer": self.recipe.tokenizer.steps, **encoders}, policies]

    def stage(self, name: str) -> Stage:
        recipe, dataset = self.recipe, self.dataset
        if name == "tokenizer":
            return tokenizer_stage(dataset, recipe)
        for (camera, encoder), encoder_name in self.encoders.items():
            if name == encoder_name:
                return encoder_stage(name, encoder, camera, dataset, self.task, recipe.seed)
        trained = {camera: self._encoder(camera, recipe.policies[name].encoder) for camera in self._cameras(name)}
        for camera, network in trained.items():
            dataset = encoded(dataset, camera, network)
        stage = policy_stage(name, dataset, recipe, self.tokenizer(), self.specs[name])
        assert isinstance(stage.module, VQBeT)
        for camera, network in trained.items():
            stage.module.freeze(camera, network)
        return stage

    def export(self, progress: Progress) -> list[Path]:
        return [self._export(name, target, draft) for name, (target, draft) in self.recipe.bundles.items()]

    def tokenizer(self) -> ResidualVQ:
        """The trained tokenizer."""
        tokenizer = ResidualVQ(self.recipe.tokenizer, self.recipe.chunk, self.dataset.train.chunks.shape[-1])
        tokenizer.load_state_dict(self.weights("tokenizer"))
        return tokenizer.eval().requires_grad_(False)

    def _cameras(self, policy: str) -> tuple[str, ...]:
        """The policy's cameras with pre-trained encoders."""
        return tuple(self.specs[policy].images) if self.recipe.policies[policy].encoder.learns else ()

    def _encoder(self, camera: str, recipe: EncoderRecipe) -> ImageEncoder:
        encoder = ImageEncoder(recipe, self.dataset.train.episodes.frames(camera).shape[1:])
        weights = self.weights(self.encoders[camera, recipe]).items()
        encoder.load_state_dict(
            {name.removeprefix("encoder."): value for name, value in weights if name.startswith("encoder.")}
        )
        return encoder.eval()

    def _export(self, name: str, target: str, draft: str) -> Path:
        recipe, dataset, policies = self.recipe, self.dataset, dict[str, VQBeT]()
        for role, policy in (("draft", draft), ("target", target)):
            shapes = shapes_of(dataset, recipe, self.specs[policy.removesuffix("@snapshot")])
            policies[role] = VQBeT(shapes, structs.replace(recipe.policy(policy), dropout=0.0), dataset.statistics)
            policies[role].load_state_dict(self.weights(policy))
        rate_hz, sizes = self.episodes.rate_hz, policies["target"].shapes
        assert rate_hz is not None, "given by the recipe or its task"
        spec = PolicySpec(
            draft=policies["draft"].shapes.observation, target=sizes.observation, codebooks=sizes.codebooks,
            codes=sizes.codes, chunk=sizes.chunk, actions=sizes.actions, execute=recipe.execute,
            overlap=recipe.overlap, temperature=recipe.temperature, rate_hz=rate_hz,
            sequential=recipe.policy(target).sequential,
        )  # fmt: skip
        manifest = self.manifest(name, recipe.env) | {
            "gates": recipe.gates, "policies": {"target": target, "draft": draft}
        }  # fmt: skip
        words = next((policy.shapes.words for policy in policies.values() if policy.shapes.words is not None), None)
        if words is not None:
            manifest["words"] = plain(words)
        folder = BundleFolder(self.out / "bundles" / name, PARTS)
        table = {"table": decoder_table(self.tokenizer()), "centre": dataset.centre, "scale": dataset.scale}
        folder.arrays("tokenizer", {key: value.numpy() for key, value in table.items()})
        for role, model in policies.items():
            folder.parameters[role] = parameters_of(model)
            folder.parity[role] = export_policy(model, folder.files[role])
        return folder.finish(manifest, spec)


def export_policy(model: VQBeT, path: Path) -> float:
    """Exports a policy, see :func:`~specact.lab.train.export.export_checked`, and its weights to a file beside it.

    They are rounded to float16 in place.
    """
    weights = write_weights(path.with_suffix(".safetensors"), deployed(model))
    return export_checked(policy_graph(model), path, weights=weights)


def policy_graph(model: VQBeT) -> Graph:
    """A policy as it is exported."""
    outputs = ["logits", "offsets"] + ["conditional"] * (model.secondary_head is not None)
    inputs = {"observation": observed(model, model.shapes.words)}
    return Graph(model.eval(), inputs, outputs)


def shapes_of(dataset: Dataset, recipe: CodesRecipe, observation: ObservationSpec) -> Shapes:
    """The sizes of a policy that sees this."""
    return Shapes(
        observation=observation,
        codebooks=recipe.tokenizer.codebooks,
        codes=recipe.tokenizer.codes,
        chunk=recipe.chunk,
        actions=dataset.train.chunks.shape[-1],
        goal_mode=recipe.goal,
        words=dataset.words if observation.instruction else None,
    )


def specs_of(recipe: CodesRecipe, episodes: Episodes) -> dict[str, ObservationSpec]:
    """The observations of each policy of a recipe, by the policy's name.

    Raises:
        ConfigError: if one sees what is not there, or has nothing that a goal could be concatenated to.
    """
    specs = {}
    for name, policy in recipe.policies.items():
        spec = observation_of(policy, recipe, episodes, f"policy {name!r}")
        numbers = [] if spec.vectors is None else list(spec.vectors.fields.values())
        if recipe.goal == "concatenate" and numbers and not any(field.history for field in numbers):
            raise ConfigError(
                f'policy {name!r} sees no numbers with a history that goal = "concatenate" could add to; choose '
                'goal = "token"'
            )
        if policy.encoder.tokens == "patches" and spec.images:
            in_window = [field.history for field in spec.fields.values() if field.history and not field.is_image]
            if not in_window or any(spec[camera].history != 1 for camera in spec.images):
                raise ConfigError(
                    f"policy {name!r} reads patches before its window, which only its newest observation may know: let "
                    "it see numbers beside the camera, and give every camera a history of 1"
                )
        specs[name] = spec
    return specs


def policy_stage(
    name: str, dataset: Dataset, recipe: CodesRecipe, tokenizer: ResidualVQ, observation: ObservationSpec
) -> Stage:
    """The stage that trains one VQ-BeT policy on the frozen tokenizer."""
    settings = recipe.policies[name]
    seed_weights(recipe.seed)
    model = VQBeT(shapes_of(dataset, recipe, observation), settings, dataset.statistics)
    decoded = decoder_table(tokenizer)
    codes = {id(windows): tokenizer.encode(windows.chunks) for windows in (dataset.train, dataset.held_out)}

    def loss_on(windows: Windows, batch: Batch) -> Losses:
        device = device_of(model)
        labels = (codes[id(windows)][batch.step], windows.chunks[batch.step], batch.weight, decoded)
        with autocast(settings.width, settings.bfloat16, device):
            prediction = model.predictions({name: values.to(device) for name, values in batch.observation.items()})
        return policy_loss(model, prediction, *(values.to(device) for values in labels))

    def update(step: int) -> Losses:
        return loss_on(dataset.train, dataset.train.draw(observation, recipe.seed, step, settings.batch))

    def validate(module: nn.Module) -> Metrics:
        torch.manual_seed(recipe.seed)
        return loss_on(dataset.held_out, dataset.held_out.draw(observation, recipe.seed, 0, 2048))[1]

    snapshot_at = round(settings.snapshot * settings.steps)
    return Stage(name, model, settings, update, validate, recipe.seed, snapshot_at=snapshot_at)


def policy_loss(
    model: VQBeT, prediction: Prediction, codes: Tensor, chunks: Tensor, weight: Tensor, decoded: Tensor
) -> Losses:
    """Focal loss on the codes, and L1 on the action after the offset (ADAHI, equation 3), at every position.

    Labels are the tokenizer's ``codes [B, T, G]`` of demonstrated ``chunks [B, T, n, A]``, normalised; ``weight [B,
    T]`` is 0 at padding, else 1; ``decoded [K ** G, n, A]`` is the tokenizer's decoder as a table. Also its parts
    ``nll``, ``code_accuracy`` and ``offset_l1``; all are means over real positions.
    """
    recipe = model.recipe
    share = weight / weight.sum()
    logits = code_logits(model, prediction, codes[..., 0])
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(-1, codes[..., None])[..., 0]
    focal = -((1 - chosen.exp()) ** recipe.focal) * chosen
    weights = chosen.new_tensor([recipe.primary_weight] + [recipe.secondary_weight] * (chosen.shape[-1] - 1))
    code_loss = (focal * weights).sum(-1)

    offered = codes if recipe.offset_on == "ground_truth" else sampled_codes(model, prediction)
    action = chunk_of(prediction.offsets, offered, decoded)
    offset_loss = (action - chunks).abs().mean((-2, -1))

    loss = (share * (code_loss + recipe.offset_weight * offset_loss)).sum()
    correct = (log_probs.argmax(-1) == codes).all(-1).float()
    return loss, {
        "nll": (share * -chosen.sum(-1)).sum(),
        "code_accuracy": (share * correct).sum(),
        "offset_l1": (share * offset_loss).sum(),
    }


def code_logits(model: VQBeT, prediction: Prediction, primary: Tensor) -> Tensor:
    """Logits of all codebooks, ``[B, T, G, K]``, a sequential secondary given this primary code ``[B, T]``."""
    if model.secondary_head is None:
        return prediction.logits
    secondary = model.secondary_head(prediction.features, primary)
    return torch.cat([prediction.logits, secondary[..., None, :]], -2)


@torch.no_grad()
def sampled_codes(model: VQBeT, prediction: Prediction) -> Tensor:
    """Codes drawn from the prediction, ``[B, T, G]``."""

    def draw(logits: Tensor) -> Tensor:
        probs = logits.float().softmax(-1)
        return torch.multinomial(probs.flatten(0, -2), 1).view(logits.shape[:-1])

    primary = draw(prediction.logits[..., 0, :])
    return torch.cat([primary[..., None], draw(code_logits(model, prediction, primary)[..., 1:, :])], -1)


def chunk_of(offsets: Tensor, codes: Tensor, decoded: Tensor) -> Tensor:
    """Decoded chunk plus the summed offsets of the chosen codes, ``[B, T, n, A]``."""
    index = torch.zeros_like(codes[..., 0])
    for g in range(codes.shape[-1]):
        index = index * offsets.shape[-3] + codes[..., g]
    picked = offsets.take_along_dim(codes[..., None, None, None], dim=-3)[..., 0, :, :].sum(-3)
    return decoded[index] + picked


# --- trained policies of a bundle ---


def architecture(bundle: CodeParts, role: Role) -> tuple[PolicyRecipe, Shapes]:
    """The architecture of a bundle's policy, which its manifest must have; without dropout and observation noise."""
    spec, manifest = bundle.spec, bundle.manifest
    try:
        name = manifest.policies[role].removesuffix("@snapshot")
        settings = read_record(manifest.recipe["policies"][name], PolicyRecipe, f"policies.{name}")
        goal_mode = manifest.recipe["goal"]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"the manifest of {bundle.path} does not say how its {role} was made ({error} is missing); "
            "use a bundle that specact train wrote"
        ) from None
    observation = spec.draft if role == "draft" else spec.target
    shapes = Shapes(
        observation=observation, codebooks=spec.codebooks, codes=spec.codes,
        chunk=spec.chunk, actions=spec.actions, goal_mode=goal_mode,
        words=bundle.manifest.words if observation.instruction else None,
    )  # fmt: skip
    return structs.replace(settings, dropout=0.0, state_noise=0.0), shapes


def rebuild(bundle: CodeParts, role: Role, window: int) -> VQBeT:
    """A policy of a bundle with its exported weights, and a history of the newest ``window`` of T observations.

    In training every position of the window predicts from the observations up to its own. So a history of k uses the
    first k positions, and stays within the training distribution.

    Raises:
        ConfigError: if the window is out of range, observations differ in history, or ``specact train`` did not make
            the bundle, which then lacks the architecture or the weights.
    """
    recipe, shapes = architecture(bundle, role)
    observation = shapes.observation
    if not 1 <= window <= observation.history:
        raise ConfigError(f"{bundle.name!r} supports 1 to {observation.history} observations, got {window}")
    if window < observation.history and observation.history != positions(observation):
        raise ConfigError(
            f"the observations of the {role} of {bundle.name!r} differ in history; fewer can only be shown to a policy "
            "that sees as many of each"
        )
    weights = stored_weights(bundle.files[role])
    # With the full window this changes nothing, for any histories.
    cut = {name: replace(field, history=min(window, field.history)) for name, field in observation.fields.items()}
    spec = ObservationSpec(cut, observation.instruction)
    model = VQBeT(replace(shapes, observation=spec), recipe, unknown(cut))
    weights["positions"] = weights["positions"][: len(model.positions)]
    model.load_state_dict(weights)
    return model.eval()
