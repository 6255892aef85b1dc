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
    """What to evaluate.

    Attributes:
        bundle: path or name of a bundle, or MODULE:NAME for a pair of your own.
        env: environment, a name or MODULE:TASK; the bundle's own if not given.
        methods: values, or names that :func:`~specact.lab.rollout.methods.load_method` knows.
        episodes: number of episodes per method; episode k starts the same for all of them.
        seed: random seed.
        rate: transmission rate the gates are calibrated for; random runs at the rate ADAHI achieved and with ADAHI's
            forced steps, random_METHOD at another's.
        link: wifi-paper, lan, 5g, lte, loopback, rtt:FILE, mahimahi:UP,DOWN, with +loss=, +outage=; see
            specact proxy --help.
        gates: settings that the papers do not specify.
        draft_ms: accounted time of a draft inference; measured if not given.
        gate_ms: accounted time of a gate's decision; measured for each gate if not given.
        head_ms: accounted time of the learned gate's head where it is the draft; measured if not given.
        target_ms: accounted time of a target inference; measured if not given.
        kappa: factor on the computation times of the device, to model a slower one.
        shard: episodes that run in one batch; part of what makes a result reproducible to the last bit.
        calibration_episodes: per round, where a calibration has to be made first.
        realtime: over real sockets: a server process of its own, behind a relay that behaves like the link.
        deadline_ms: with --realtime: how long a step waits for the target.
        mse: also measure each method's error along the demonstrations that were kept back in training.
        data: with --mse: folder that the recipe's data paths are relative to.
        demonstrations: with --mse: at most so many of them; all that were kept back if not given.
        draft: of a pair of chunk policies, where the pair does not name it: MODULE:NAME or a .toml file; of a token or
            flow policy any bundle of a policy.
        target: of a pair of chunk policies likewise.
        decoding: of a token or flow policy: how draft, hybrid, random, adahi, random_learned, learned and gates of your
            own propose and verify; any method of such a policy.
    """

    bundle: str
    env: str | None = None
    methods: tuple[str | Method, ...] = ("draft", "target", "hybrid", "random", "adahi")
    episodes: Count = 100
    seed: Seed = 0
    rate: InsideUnit = 0.6
    link: str = "wifi-paper"
    gate_options: tuple[str, ...] = ()
    draft_ms: NotNegative | None = None
    gate_ms: NotNegative | None = None
    head_ms: NotNegative | None = None
    target_ms: NotNegative | None = None
    kappa: Positive = 1.0
    shard: Count = 20
    calibration_episodes: Count = 40
    realtime: bool = False
    deadline_ms: Positive = 200.0
    mse: bool = False
    data: str | None = None
    demonstrations: Count | None = None
    draft: str | None = None
    target: str | None = None
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
