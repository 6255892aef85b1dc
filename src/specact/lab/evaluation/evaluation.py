"""What is to be evaluated, in plain values; a run folder's manifest repeats it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from specact.errors import ConfigError, unknown_name
from specact.families.codes.verify import Offset
from specact.families.load import AnyPair
from specact.gates.settings import BUNDLES_OWN, GateChoices
from specact.lab.data.fit import shapes_in_words
from specact.lab.envs.task import Task
from specact.lab.rollout.methods import load_method
from specact.lab.rollout.realtime import Wire
from specact.links.link import load_link
from specact.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SEED, check_ranges


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate.

    Attributes:
        bundle: name or path.
        env: the environment's name; None for the bundle's own.
        methods: names, see :data:`~specact.lab.rollout.methods.METHODS`.
        episodes: per method; episode k starts the same for all of them.
        seed: of everything random.
        rate: transmission rate the gates are calibrated for; chance runs at the rate that its rival achieved, see
            :class:`~specact.lab.rollout.methods.Method`, and at this one where its rival does not run.
        link: name of a link preset.
        offset: see :class:`~specact.policy.SpeculativePolicy`.
        overlap: whether requests leave ahead of the draft where the prefetch predictor says so.
        gates: readings that the papers leave open.
        draft_ms, gate_ms, head_ms, target_ms: accounted time of one inference, and of one decision of any gate; None
            measures it on this machine.
        kappa: factor on the times of what runs on the device, to stand in for a slower one.
        shard: episodes that run in one batch; part of what makes a result reproducible to the last bit.
        calibration_episodes: per round, where a calibration has to be made first.
        realtime: over real sockets, on a link shaped by a relay, with measured times; else in virtual time.
        mse: also measure each method along the demonstrations kept back in training, see
            :func:`~specact.lab.evaluation.imitation.imitation_error`.
        data: folder that the demonstrations' paths are relative to, where they are files.
        demonstrations: at most so many of them; None for all that were kept back.
        draft, target: of a pair of chunk policies, see :func:`~specact.families.load.load_pair`.
        wire, deadline_ms: of the real sockets, see :class:`~specact.lab.rollout.realtime.RealTime`.
    """

    bundle: str
    env: str | None
    methods: tuple[str, ...]
    episodes: int
    seed: int = 0
    rate: float = 0.6
    link: str = "wifi-paper"
    offset: Offset = "target"
    overlap: bool = False
    gates: GateChoices = BUNDLES_OWN
    draft_ms: float | None = None
    gate_ms: float | None = None
    head_ms: float | None = None
    target_ms: float | None = None
    kappa: float = 1.0
    shard: int = 20
    calibration_episodes: int = 40
    realtime: bool = False
    wire: Wire = "stream"
    deadline_ms: float = 200.0
    mse: bool = False
    data: str | None = None
    demonstrations: int | None = None
    draft: str | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            load_method(method)
        load_link(self.link)
        if self.offset not in get_args(Offset):
            raise unknown_name("offset", self.offset, get_args(Offset))
        if not self.methods or len(set(self.methods)) != len(self.methods):
            raise ConfigError(f"methods must be named once each, got {', '.join(self.methods) or 'none'}")
        check_ranges(self, dict.fromkeys(("episodes", "shard", "calibration_episodes", "demonstrations"), COUNT))
        check_ranges(self, {"seed": SEED, "draft_ms": NOT_NEGATIVE, "target_ms": NOT_NEGATIVE})
        check_ranges(self, {"kappa": POSITIVE, "deadline_ms": POSITIVE})
        if self.realtime and any(load_method(method).gate.startswith("oracle") for method in self.methods):
            raise ConfigError(
                "the latency of an oracle gate is not meaningful, because it queries the target before it decides; "
                "remove it from --methods"
            )
        if not 0.0 < self.rate < 1.0:
            raise ConfigError(f"rate must lie strictly between 0 and 1, got {self.rate}")


def check_fit(bundle: AnyPair, task: Task) -> None:
    """Checks that a pair's observations and actions are the task's; a pair may do without some of the task's.

    Raises:
        ConfigError: if a shape differs.
    """
    seen = bundle.observation.fields
    wanted = task.seeing(seen).shapes()
    found = {"action": bundle.units.centre.shape, **{name: field.shape for name, field in seen.items()}}
    if any(wanted.get(name) != shape for name, shape in found.items()):
        raise ConfigError(
            f"the bundle {bundle.name!r} has {shapes_in_words(found)}, but the task {task.name!r} has "
            f"{shapes_in_words(wanted)}; the bundle was made for the task {bundle.env!r}"
        )
