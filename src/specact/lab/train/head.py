"""The target head of the learned gate: from window and draft distribution to an estimate of the target's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from specact.errors import BundleError
from specact.families.codes.bundle import PARTS, Bundle, load_bundle
from specact.families.codes.head import TargetHead, give_head
from specact.families.codes.sampling import rejection_probability, sample
from specact.families.codes.spec import PolicySpec
from specact.families.codes.values import CodeDistribution
from specact.files import write_whole
from specact.gates.settings import GateSettings
from specact.lab.data.distillation import DistillationData, join
from specact.lab.statistics import choice_efficiency
from specact.lab.train.distil import taught_statistics
from specact.lab.train.export import PARITY, to_onnx
from specact.lab.train.loop import Metrics, Stage, cosine, run
from specact.lab.train.vqbet import hold_statistics, standardised, statistics_of
from specact.locks import locked
from specact.observation import Window
from specact.rng import Role, stream
from specact.types import Floats

_TINY = 1e-4

Objective = Literal["distribution", "rejection"]
Collect = Callable[[Bundle, Sequence[GateSettings], int], DistillationData]
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class HeadRecipe:
    """How a target head is taught.

    Attributes:
        hidden: width of its two layers.
        steps, batch, learning_rate, weight_decay: AdamW with warm-up and a cosine, on cross-entropy to p.
        rates: transmission rates whose states are visited.
        rounds: first under random gates, then under the head of the round before.
        objective: ``distribution`` learns p, by cross-entropy; ``rejection`` learns nothing but ``r_k(z_k)`` of codes
            drawn from the draft, the direct regression that the former is compared with.
        seed: of everything random.
    """

    hidden: int = 256
    steps: int = 8000
    batch: int = 512
    learning_rate: float = 2e-3
    weight_decay: float = 1e-2
    rates: tuple[float, ...] = (0.2, 0.4, 0.6)
    rounds: int = 2
    objective: Objective = "distribution"
    seed: int = 0


class TargetHeadNetwork(nn.Module):
    """A perceptron that corrects the draft's own distribution: ``p^ = softmax(f(window, q) + s log q)``.

    Of the objective ``rejection`` it estimates ``r^ = sigmoid(-f)`` and answers ``p^ = q (1 - r^)``, whose rejection
    probabilities are ``r^``, so that the same gate reads it.
    """

    def __init__(self, spec: PolicySpec, recipe: HeadRecipe, data: DistillationData) -> None:
        super().__init__()
        hidden, self.objective = recipe.hidden, recipe.objective
        self.shape = (spec.codebooks, spec.codes)
        self.fields = {} if spec.draft.vectors is None else dict(spec.draft.vectors.fields)
        hold_statistics(self, spec.draft, taught_statistics(spec.draft, data))
        widths = [math.prod(field.window_shape) for field in self.fields.values()]
        inputs = sum(widths) + spec.codebooks * spec.codes
        self.read, self.mix = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
        self.write = nn.Linear(hidden, spec.codebooks * spec.codes)
        self.trust = nn.Parameter(torch.tensor(0.5))

    def forward(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """``p^`` ``[B, G, K]`` from arrays ``[B, *window_shape]`` by name and ``draft_probs [B, G, K]``."""
        logits = self.logits(observation, draft_probs)
        return logits.softmax(-1) if self.objective == "distribution" else draft_probs * logits.sigmoid()

    def logits(self, observation: Mapping[str, Tensor], draft_probs: Tensor) -> Tensor:
        """Before the softmax, or of the codes' acceptance."""
        offered = (draft_probs + _TINY).log()
        rows = {name: standardised(observation[name], *statistics_of(self, name)).flatten(1) for name in self.fields}
        seen = [row for name, row in rows.items() if self.fields[name].history]
        seen += [0.25 * offered.flatten(1), *(row for name, row in rows.items() if not self.fields[name].history)]
        hidden = torch.relu(self.read(torch.cat(seen, 1)))
        hidden = hidden + torch.relu(self.mix(hidden))
        correction: Tensor = self.write(hidden).unflatten(-1, self.shape)
        return correction + self.trust * offered if self.objective == "distribution" else correction


def teach_head(bundle: Bundle, recipe: HeadRecipe, collect: Collect, out: Path, progress: Progress) -> Metrics:
    """Trains a bundle's target head on states that gated policies lead to, and writes it beside the draft.

    The bundle gets its head after the last round; the heads of earlier rounds are in a copy of the pair. Run again
    after a stop, it goes on with the round it was in.

    Args:
        bundle: the pair.
        recipe: how.
        collect: rolls a pair out under gates and returns the data of a round, given its number.
        out: folder of the run: weights and ``log.jsonl`` of every round, and the copy.
        progress: told (what is going on, done, in all).

    Returns:
        Metrics on held-out episodes of the last round.
    """
    torch.set_num_threads(1)  # small matrices: more would only wait for each other, and change the last bits
    gates = [GateSettings("random", threshold=rate) for rate in recipe.rates]
    taught: list[DistillationData] = []
    pair = bundle
    with locked(out):
        for number in range(recipe.rounds):
            taught.append(collect(pair, gates, number))
            train, held_out = join(taught).split()
            torch.manual_seed(recipe.seed)
            network = TargetHeadNetwork(bundle.spec, recipe, train)
            stage = _stage(f"head-{number}", network, recipe, train, held_out)
            network.load_state_dict(run(stage, out, lambda done: progress("target head", done, recipe.steps)))
            file = out / f"head-{number}.onnx"
            head = export_head(network.eval(), bundle, file)
            if number == recipe.rounds - 1:
                give_head(bundle.path, file)
            else:
                pair = _copy_with_head(bundle, file, out / "pair")
                gates = [_gate_for(rate, network, held_out, head) for rate in recipe.rates]
    return stage.validate(network)


def _copy_with_head(bundle: Bundle, head: Path, path: Path) -> Bundle:
    """The pair with this head in a folder of its own, from which worker processes load it."""
    path.mkdir(exist_ok=True)
    for name in ("manifest.json", *PARTS.values()):
        write_whole(path / name, (bundle.path / name).read_bytes())
    give_head(path, head)
    return load_bundle(path)


def export_head(network: TargetHeadNetwork, bundle: Bundle, path: Path) -> TargetHead:
    """Writes a head as ONNX, marked with its pair, and checks that it answers like the trained one.

    Raises:
        BundleError: if it does not.
    """
    spec, generator = bundle.spec, torch.Generator().manual_seed(0)
    seen = {name: torch.randn(3, *field.window_shape, generator=generator) for name, field in network.fields.items()}
    draft_probs = torch.randn(3, spec.codebooks, spec.codes, generator=generator).softmax(-1)
    proto = to_onnx(network, {"observation": seen, "draft_probs": draft_probs}, ["target_probs"])
    entry = proto.metadata_props.add()
    entry.key, entry.value = "pair", bundle.fingerprint
    write_whole(path, proto.SerializeToString())
    head = TargetHead(path, spec, bundle.fingerprint)
    with torch.no_grad():
        expected = network(seen, draft_probs).numpy()
    for row, wanted in enumerate(expected):
        draft = CodeDistribution(draft_probs[row].double().numpy(), np.zeros(0, np.float32))
        found = head.estimate(Window({name: values[row].numpy() for name, values in seen.items()}), draft)
        if np.abs(found - wanted).max() > PARITY:
            raise BundleError(f"{path} differs from the trained network by more than {PARITY:.0e}")
    return head


def _stage(
    name: str, network: TargetHeadNetwork, recipe: HeadRecipe, train: DistillationData, held_out: DistillationData
) -> Stage:
    loss_of = _cross_entropy if recipe.objective == "distribution" else _rejection_entropy

    def update(step: int) -> tuple[Tensor, dict[str, Tensor]]:
        rows = stream(recipe.seed, Role.DATA, step=step).integers(len(train), size=recipe.batch)
        return loss_of(network, train.select(rows), step), {}

    def validate(module: nn.Module) -> Metrics:
        with torch.no_grad():
            loss = float(loss_of(network, held_out, 0))
        return {"loss": loss, **_efficiency(network, held_out)}

    return Stage(
        name=name,
        module=network,
        optimizer=torch.optim.AdamW(network.parameters(), weight_decay=recipe.weight_decay, fused=True),
        update=update,
        validate=validate,
        steps=recipe.steps,
        learning_rate=cosine(recipe.learning_rate, 100, recipe.steps),
        seed=recipe.seed,
        average=0.998,
    )


def _seen(data: DistillationData) -> tuple[dict[str, Tensor], Tensor]:
    """What the network takes."""
    observation = {name: torch.from_numpy(values) for name, values in data.observation.items()}
    return observation, torch.from_numpy(data.draft_probs)


def _cross_entropy(network: TargetHeadNetwork, data: DistillationData, step: int) -> Tensor:
    """To the target's distribution; the same whatever the step."""
    logs = network.logits(*_seen(data)).log_softmax(-1)
    return -(torch.from_numpy(data.target_probs) * logs).sum((-2, -1)).mean()


def _rejection_entropy(network: TargetHeadNetwork, data: DistillationData, step: int) -> Tensor:
    """To the acceptance probability of codes that are drawn anew in every step."""
    q, p = data.draft_probs.astype(np.float64), data.target_probs.astype(np.float64)
    codes = sample(q, stream(0, Role.DATA, episode=4, step=step).random(q.shape[:2]))
    accepted = torch.from_numpy(1.0 - rejection_probability(p, q, codes)).float()
    logits = network.logits(*_seen(data)).gather(-1, torch.from_numpy(codes)[..., None])[..., 0]
    return nn.functional.binary_cross_entropy_with_logits(logits, accepted, reduction="none").sum(-1).mean()


def _scores(network: TargetHeadNetwork, data: DistillationData) -> tuple[Floats, Floats]:
    """``R^(z)`` and ``R(z)`` of codes drawn from the draft, ``[N]`` each."""
    with torch.no_grad():
        estimate = network(*_seen(data)).double().numpy()
    q = data.draft_probs.astype(np.float64)
    codes = sample(q, stream(0, Role.DATA, episode=3).random(q.shape[:2]))
    distributions = (estimate, data.target_probs.astype(np.float64))
    estimated, true = (1.0 - np.prod(1.0 - rejection_probability(p, q, codes), axis=-1) for p in distributions)
    return estimated, true


def _efficiency(network: TargetHeadNetwork, data: DistillationData) -> Metrics:
    """Gate efficiency on these states at transmission rates .2, .4, .6: share of the oracle's gain over chance."""
    estimated, true = _scores(network, data)
    found = {}
    for rate in (0.2, 0.4, 0.6):
        sent = np.ones(len(true), dtype=bool)
        sent[np.argsort(estimated, kind="stable")[: round(len(true) * (1.0 - rate))]] = False
        efficiency = choice_efficiency(true, sent)
        if efficiency is not None:
            found[f"efficiency_{rate:g}"] = efficiency
    return found


def _gate_for(rate: float, network: TargetHeadNetwork, data: DistillationData, head: TargetHead) -> GateSettings:
    """The learned gate at about this rate; which states it visits is what matters, not the rate."""
    estimated, _ = _scores(network, data)
    options = (("on", "rejection"), ("weights", head.fingerprint))
    return GateSettings("learned", threshold=float(np.quantile(estimated, 1.0 - rate)), options=options)
