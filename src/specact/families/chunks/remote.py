"""A chunk policy on a server of this package or of openpi's protocol, from its address alone."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from specact.errors import BundleError, ConfigError, MissError, SpecactError
from specact.families.chunks.policy import FAMILY, Chunk, ChunkSpec, Inpainting, chunk_contract, spec_of
from specact.families.chunks.sources import Description, clipped
from specact.observation import Observation, ObservationHistory, Window
from specact.records import read_toml, validated
from specact.remote.client import Client, NativeConversation
from specact.remote.endpoint import Endpoint, tls_context
from specact.remote.openpi import Key, OpenpiConversation, OpenpiEndpoint
from specact.rng import StepAddress
from specact.types import ActionUnits, Miss
from specact.wire.exchange import Contract, Request
from specact.wire.messages import Deadline, Welcome, printable

PREFIX = "openpi:"
_PORT, _FORM = 8000, "openpi:ws://HOST:PORT#FILE.toml"


class RemotePolicy:
    """A chunk policy on a server: call it with an observation, and it answers with a chunk of actions.

    :func:`connect` makes one; use it as a context manager. Its history are the observations of calls and of
    :meth:`observe`, one per control period. It is a :class:`~specact.families.chunks.policy.ChunkPolicy` as well.

    Attributes:
        name, fingerprint, inpaints: as the server states them.
        spec, units, client: of its observations and chunks, its actions (None if unknown), and the server.
        counts: ``steps`` (calls), ``transmitted`` (requests sent) and ``missed``.
    """

    def __init__(
        self, client: Client, welcome: Welcome, spec: ChunkSpec, units: ActionUnits | None, deadline_ms: float,
        seed: int,
    ) -> None:  # fmt: skip
        self.name, self.fingerprint = welcome.bundle, welcome.target
        self.inpaints = welcome.spec.get("inpaints") is True
        self.client, self.spec, self.units = client, spec, units
        self.counts: Counter[str] = Counter()
        client.report = self.counts
        self._deadline_ms = deadline_ms
        self._history = ObservationHistory(spec.observation)
        self._address = StepAddress(seed, 0, 0, 0)

    def __enter__(self) -> RemotePolicy:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, observation: Observation) -> Chunk:
        """The server's chunk for this observation, float32 ``[H, A]`` in the environment's units, finite.

        Raises:
            ObservationError: if the observation cannot be used; nothing is sent.
            MissError: if there is no usable answer within the deadline, with its ``cause``.
        """
        window, address = self._history.push(observation), self._address
        self._address = address._replace(step=address.step + 1)
        return self._answered(self.ask(window, address))

    def infer(self, window: Window, rng: np.random.Generator, inpainting: Inpainting | None = None) -> Chunk:
        # A server of this package samples from this address; others have their own randomness.
        answer = self.ask(window, StepAddress(int(rng.integers(2**63)), 0, 0, 0), inpainting)
        return clipped(self._answered(answer), self.units)

    def infer_batch(self, windows: Sequence[Window], rngs: Sequence[np.random.Generator]) -> list[Chunk]:
        # The protocols have no batches.
        return [self.infer(window, rng) for window, rng in zip(windows, rngs, strict=True)]

    def observe(self, observation: Observation) -> None:
        """Adds an observation to the history without a request.

        Raises:
            ObservationError: if it cannot be used; the history is unchanged.
        """
        self._history.push(observation)

    def reset(self, episode: int = 0) -> None:
        """Starts an episode with an empty history; its number is part of the random streams' address."""
        self._history.reset()
        self._address = self._address._replace(episode=episode, step=0)

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window, of this address's random stream; blocks until the deadline at most."""
        kind, arrays = ("infer", {}) if inpainting is None else ("inpaint", vars(inpainting))
        request = Request(window, address, arrays)
        reply = self.client.request(kind, request, self._deadline_ms, wait_if_busy=True).result()
        if isinstance(reply, Miss):
            self.counts.update(steps=1, transmitted=int(reply.sent), missed=1)
            return reply
        self.counts.update(steps=1, transmitted=1, missed=0)
        return reply[0]["chunk"]

    def _answered(self, answer: Chunk | Miss) -> Chunk:
        if isinstance(answer, Miss):
            said = self.client.failure if answer.cause == "refused" else self.client.problem
            why = f": {said}" if said else ""
            raise MissError(
                f"the server gave no usable answer within {self._deadline_ms:g} ms ({answer.cause}{why}); call again, "
                "or connect with a longer deadline_ms",
                answer.cause,
            )
        return answer

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self.client.close()


@validated
def connect(
    url: str, *, deadline_ms: Deadline = 1000.0, token: str | None = None, ca: str | Path | None = None,
    robot: str = "robot", timeout: float = 5.0, jpeg_quality: int | None = None, seed: int = 0,
    rate_hz: Callable[[ChunkSpec], float] | float | None = None,
) -> RemotePolicy:  # fmt: skip
    """The chunk policy of a server at ``ws://host:port``, or ``wss``; the server states its spec.

    For servers of openpi's protocol see :func:`~specact.families.chunks.remote.openpi_source`. ``deadline_ms`` is that
    of a call, ``timeout`` that of the first connection [s]. Some servers need a ``token``, or a certificate ``ca``, a
    PEM file. ``robot`` is this device's name at the server, which samples with ``seed``. With a ``jpeg_quality`` frames
    are sent as JPEG. ``rate_hz`` is the expected number of calls per second, or a function that gives it for the spec.

    Raises:
        RemoteError: if there is no connection in time, or the server refuses this device: it may be full.
        ConfigError: if an argument is invalid, or the server has no chunk policy.
        BundleError: if the server's spec is invalid.
    """
    tls = tls_context(None if ca is None else Path(ca))
    endpoint: Endpoint
    if url.startswith(PREFIX):
        endpoint, spec, units = openpi_source(url, token, tls, timeout)
    else:
        endpoint = Endpoint.parse(url, token, tls)
        conversation = NativeConversation(endpoint, timeout, robot)
        conversation.close()
        served = conversation.welcome
        if served.family != FAMILY:
            raise ConfigError(
                f"{endpoint} serves {served.bundle}, a target of the family {served.family!r:.40}, whose answers only "
                f"a pair on this device can use: specact.load_pair({served.bundle!r}) and "
                "specact.remote.remote_verifier(client, bundle, deadline_ms)"
            )
        spec, units = spec_of(served.spec)
    expected_hz = rate_hz(spec) if callable(rate_hz) else rate_hz
    client = Client(endpoint, chunk_contract(spec), robot, jpeg_quality, rate_hz=expected_hz, deadline_ms=deadline_ms)
    try:
        return RemotePolicy(client, client.connect(timeout), spec, units, deadline_ms, seed)
    except BaseException:
        client.close()
        raise


class ServerDescription(Description, frozen=True):
    """See :func:`openpi_source`."""

    instruction: bool = False
    endpoint: bool = False


def openpi_source(
    source: str, token: str | None, tls: ssl.SSLContext | None, timeout: float
) -> tuple[OpenpiEndpoint, ChunkSpec, ActionUnits | None]:
    """A server, the spec of its policy, and the units of its actions if their range is known.

    The address is ``openpi:ws://HOST:PORT/PATH#FILE.toml`` (``wss`` likewise; port 8000 and path ``/`` if not given).
    The file is as for :func:`~specact.families.chunks.sources.onnx_policy`, without a graph (docs/how-to/openpi.md). A
    server of this package needs none: its metadata are requested.

    Raises:
        ConfigError: if it is no such address, or the description cannot be used.
        RemoteError: if the server does not answer within ``timeout`` [s].
        BundleError: if there is no description, and the metadata does not say enough.
    """
    endpoint, spec, units = _parse(source, token, tls)
    if spec is not None:
        return endpoint, spec, units
    conversation = OpenpiConversation(endpoint, timeout)
    conversation.close()
    metadata = conversation.metadata
    try:
        observation = {"fields": metadata["observation"], "instruction": metadata["instruction"]}
        named = {"chunk": metadata["action_horizon"], "actions": metadata["action_dim"], "rate_hz": metadata["rate_hz"]}
        return endpoint, *spec_of({"observation": observation, **named})
    except (KeyError, BundleError) as error:
        raise BundleError(
            f"the server at {source} does not say what its policy takes and gives ({printable(str(error))}); describe "
            f"it in a TOML file and name that as well: {source}#FILE.toml"
        ) from None


def target_endpoint(server: str, token: str | None, tls: ssl.SSLContext | None, contract: Contract) -> Endpoint:
    """Address of the server of a pair's target, in this package's protocol or openpi's, see :func:`openpi_source`.

    Raises:
        ConfigError: if it is no such address, its description cannot be used or is not of the contract, or openpi's
            protocol does not serve this pair.
    """
    if not server.startswith(PREFIX):
        return Endpoint.parse(server, token, tls)
    if contract.family != FAMILY:
        raise ConfigError(
            f"openpi's protocol answers with chunks of actions, and this pair's family is {contract.family!r}; make a "
            "pair with such a target: specact pair"
        )
    endpoint, spec, _ = _parse(server, token, tls)
    if spec is not None and spec.describe() != contract.spec:
        raise ConfigError(
            f"{server} describes a policy with {spec.describe()}, but the pair was made for one with "
            f"{dict(contract.spec)}; make it again with specact pair"
        )
    return endpoint


def _parse(
    source: str, token: str | None, tls: ssl.SSLContext | None
) -> tuple[OpenpiEndpoint, ChunkSpec | None, ActionUnits | None]:
    """The endpoint, and spec and units of the description, if there is one."""
    address, _, file = source.removeprefix(PREFIX).partition("#")
    try:
        parts = urlsplit(address)
        port = _PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(f"{source!r} is not the address of a server ({error}); write {_FORM}") from None
    if parts.scheme not in ("ws", "wss") or not parts.hostname or parts.query or parts.username is not None:
        raise ConfigError(f"{source!r} is not the address of a server of openpi's protocol; write {_FORM}")
    endpoint = OpenpiEndpoint(parts.scheme, parts.hostname, port, token, tls, parts.path or "/")
    if not file:
        return endpoint, None, None
    path = Path(file)
    description = read_toml(path, ServerDescription, "description of a policy")
    try:
        spec, units = description.read(description.instruction)
    except SpecactError as error:
        raise ConfigError(f"{path}: {error}") from None
    keys = {name: Key(entry.input, entry.channels_first) for name, entry in description.observation.items()}
    return replace(endpoint, keys=keys, names_endpoint=description.endpoint), spec, units
