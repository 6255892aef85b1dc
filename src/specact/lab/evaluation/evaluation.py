"""The settings of an evaluation, as plain values; they are stored in a run folder's manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specact.errors import ConfigError
from specact.gates.settings import ORACLES
from specact.lab.rollout.methods import Method, load_method
from specact.links.link import load_link
from specact.load import check_decoding
from specact.pair import PairSource
from specact.records import Count, InsideUnit, NotNegative, Positive, Seed, check_fields


@dataclass(frozen=True)
class Evaluation:
    """What to evaluate; accounted times are measured if not given."""

    bundle: str  # path or name of a bundle, or MODULE:NAME for a pair of your own
    env: str | None = None  # environment, a name or MODULE:TASK; the bundle's own if not given
    methods: tuple[str | Method, ...] = ("draft", "target", "hybrid", "random", "adahi")  # or names of load_method
    episodes: Count = 100  # per method; episode k starts the same for all of them
    seed: Seed = 0
    # For which gates are calibrated; random runs at the rate ADAHI achieved and with ADAHI's forced steps,
    # random_METHOD at another's.
    rate: InsideUnit = 0.6
    link: str = "wifi-paper"  # see load_link
    gate_options: tuple[str, ...] = ()  # parameters that the papers do not specify, see gate_settings
    draft_ms: NotNegative | None = None  # accounted time of a draft inference
    gate_ms: NotNegative | None = None  # accounted time of a gate's decision
    head_ms: NotNegative | None = None  # accounted time of the learned gate's head where it is the draft
    target_ms: NotNegative | None = None  # accounted time of a target inference
    kappa: Positive = 1.0  # factor on the computation times of the device, to model a slower one
    shard: Count = 20  # episodes that run in one batch; part of what makes a result reproducible to the last bit
    calibration_episodes: Count = 40  # per round, where a calibration has to be made first
    realtime: bool = False  # over real sockets: a server process of its own, behind a relay that behaves like the link
    deadline_ms: Positive = 200.0  # in real time: how long a step waits for the target
    mse: bool = False  # also measure each method's error along the demonstrations that were kept back in training
    data: str | None = None  # of these demonstrations: folder that the recipe's data paths are relative to
    demonstrations: Count | None = None  # at most so many of them; all that were kept back if not given
    # Of a pair of chunk policies, where the pair does not name them: MODULE:NAME or a .toml file; the draft of a token
    # or flow policy is any bundle of a policy.
    draft: str | None = None
    target: str | None = None
    # Of a token or flow policy: how draft, hybrid, random, adahi, random_learned, learned and gates of your own propose
    # and verify; any method of such a policy.
    decoding: str = ""

    @property
    def resolved(self) -> tuple[Method, ...]:
        """Its methods, those that are given by name among them."""
        return tuple(map(load_method, self.methods))

    @property
    def source(self) -> PairSource:
        """How the pair is loaded."""
        return PairSource(self.bundle, self.draft, self.target, self.decoding)

    @property
    def data_folder(self) -> Path | None:
        """The folder of :attr:`data`."""
        return None if self.data is None else Path(self.data)

    def __post_init__(self) -> None:
        check_fields(self)
        load_link(self.link)
        check_decoding(self.decoding)
        names = [method.name for method in self.resolved]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"methods must be named once each, got {', '.join(names) or 'none'}")
        times = self.draft_ms, self.gate_ms, self.head_ms, self.target_ms
        if self.realtime and (times != (None,) * 4 or self.kappa != 1.0):
            raise ConfigError("in real time every time is measured; leave out the accounted ones and kappa")
        if self.realtime and any(method.gate in ORACLES for method in self.resolved):
            raise ConfigError(
                "the latency of an oracle gate is not meaningful, because it queries the target before it decides; "
                "remove it from --methods"
            )
