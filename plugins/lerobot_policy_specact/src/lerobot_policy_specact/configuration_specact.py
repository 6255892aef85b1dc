"""The options of ``--policy.type=specact``."""

from __future__ import annotations

from dataclasses import dataclass, field

from lerobot.configs import PreTrainedConfig

from specact.errors import ConfigError


@PreTrainedConfig.register_subclass("specact")
@dataclass
class SpecactConfig(PreTrainedConfig):
    """A pair of policies, or a chunk policy on a server; what is left out is as in ``specact run``.

    Attributes:
        bundle: path or name of a pair on this device, or MODULE:NAME. Without a server its target runs here as well.
        server: ws://HOST:PORT of a specact serve; of the bundle's target, or of any chunk policy; wss and
            openpi:ws://HOST:PORT likewise. The token is read from the variable SPECACT_TOKEN.
        draft: a chunk policy on this device, such as lerobot:PATH@HZ, in front of the server's, or in place of the
            draft that the bundle names.
        gate: which steps are sent, where there is a draft: adahi, learned, always, never, random, ...
        rate: wanted share of inferences that are sent.
        hold: hold the rate online, without a calibration.
        deadline_ms: how long a step waits for the server; if not given, one control period where there is a draft, with
            execution late the duration of a chunk, and 1000 ms without a draft.
        fallback: what a missed step executes: execute_draft, hold_last or stop. Without a draft the last action is held
            once a chunk is played, unless it is stop.
        max_consecutive_misses: after more misses in a row than this the robot stops.
        stop_action: what makes this robot stand still, in the units of the policies; needed wherever a miss can stop
            it. Without a draft it is the action before the first answer, too.
        execution: synchronous waits for the server. In lerobot-rollout also late for a pair, which acts on the draft
            at once, and append, aligned or rtc for a policy on a server, which is asked while the robot acts.
        n_action_steps: actions of a chunk that are executed before the next inference; the shorter chunk if not given,
            and what a bundle says.
        accept_within: with a draft beside a server's policy, see specact pair.
        terms: what puts the observations and actions of the environment into those of the policies: pusht, for
            gym-pusht with its environment state, or MODULE:NAME.
        rename_map: other names of observations, by LeRobot's.
        jpeg_quality: send camera frames as JPEG of this quality, 1 to 95; raw if not given.
        robot_name: name on the server's status page.
        seed: of the random streams.
        ca: PEM file of the authority that signed the server's certificate.
    """

    device: str | None = "cpu"
    bundle: str | None = None
    server: str | None = None
    draft: str | None = None
    gate: str = "adahi"
    rate: float = 0.6
    hold: bool = False
    deadline_ms: float | None = None
    fallback: str = "execute_draft"
    max_consecutive_misses: int | None = None
    stop_action: list[float] | None = None
    execution: str = "synchronous"
    n_action_steps: int | None = None
    accept_within: float = 0.0
    terms: str | None = None
    rename_map: dict[str, str] = field(default_factory=dict)
    jpeg_quality: int | None = None
    robot_name: str = "lerobot"
    seed: int = 0
    ca: str | None = None

    @property
    def observation_delta_indices(self) -> None:
        """Nothing: the policies keep their own history."""

    @property
    def action_delta_indices(self) -> None:
        """Nothing: LeRobot does not train these policies."""

    @property
    def reward_delta_indices(self) -> None:
        """As :attr:`action_delta_indices`."""

    def get_optimizer_preset(self) -> None:
        """Refuses.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("specact's policies are not trained by LeRobot; train them with: specact train RECIPE")

    def get_scheduler_preset(self) -> None:
        """As :meth:`get_optimizer_preset`."""
        self.get_optimizer_preset()

    def validate_features(self) -> None:
        """Nothing: what is missing is said at the first observation."""
