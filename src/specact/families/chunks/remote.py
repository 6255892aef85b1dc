"""A chunk policy on a server, from its address alone."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np

from specact.errors import ConfigError, MissError
from specact.families.chunks.openpi import PREFIX, openpi_source
from specact.families.chunks.policy import Chunk, ChunkSpec, Inpainting
from specact.families.chunks.wire import FAMILY, chunk_contract, spec_of
from specact.observation import Observation, ObservationHistory, Window
from specact.records import validated
from specact.remote.client import Client, NativeConversation
from specact.remote.endpoint import Endpoint, tls_context
from specact.rng import StepAddress
from specact.types import ActionUnits, Miss
from specact.wire.exchange import Request
from specact.wire.messages import Deadline

_INPAINTS_TIMEOUT_MS = 10_000.0


class RemotePolicy:
    """A chunk policy on a server: call it with an observation, and it answers with a chunk of actions.

    :func:`connect` makes one; use it as a context manager. Its history are the observations of calls and of
    :meth:`observe`, one per control period. ::

        with specact.connect("ws://127.0.0.1:8600") as policy:
            actions = policy({"state": state})      # float32 [H, A], in the environment's units

    Attributes:
        spec, units, client: of its observations and chunks, its actions (None if unknown), and the server.
        counts: ``steps`` (calls), ``transmitted`` (requests sent) and ``missed``.
    """

    def __init__(
        self, client: Client, spec: ChunkSpec, deadline_ms: float, *, units: ActionUnits | None = None, seed: int = 0,
        robot: int = 0,
    ) -> None:  # fmt: skip
        self.client, self.spec, self.units = client, spec, units
        self.counts: Counter[str] = Counter()
        client.report = self.counts
        self._deadline_ms = deadline_ms
        self._history = ObservationHistory(spec.observation)
        self._address = StepAddress(seed, robot, 0, 0)

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
        found = self.ask(window, address)
        if isinstance(found, Miss):
            raise MissError(
                f"the server gave no usable answer within {self._deadline_ms:g} ms ({found.cause}"
                + (f": {self.client.problem}" if self.client.problem else "")
                + "); call again, or connect with a longer deadline_ms",
                found.cause,
            )
        return found

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

    @cached_property
    def inpaints(self) -> bool:
        """Whether the server's policy inpaints; determined once, by a request with zeros.

        Raises:
            MissError: if there is no reply.
        """
        shape = (self.spec.chunk, self.spec.actions)
        zeros = Inpainting(np.zeros(shape, np.float32), np.zeros(shape[0], np.float32))
        window, within_ms = self.spec.observation.zeros(), max(_INPAINTS_TIMEOUT_MS, self._deadline_ms)
        found = self._ask(window, self._address, zeros, within_ms)
        if isinstance(found, Miss) and found.cause != "refused":
            raise MissError(f"the server did not say whether its policy inpaints ({found.cause})", found.cause)
        return not isinstance(found, Miss)

    def ask(self, window: Window, address: StepAddress, inpainting: Inpainting | None = None) -> Chunk | Miss:
        """The chunk ``[H, A]`` for a window; blocks until the deadline at most.

        Args:
            window: the policy's input.
            address: of the random stream that the server samples from.
            inpainting: constraint on the new chunk's first actions, or None.
        """
        found = self._ask(window, address, inpainting, self._deadline_ms)
        sent = found.sent if isinstance(found, Miss) else True
        self.counts.update(steps=1, transmitted=int(sent), missed=int(isinstance(found, Miss)))
        return found

    def _ask(
        self, window: Window, address: StepAddress, inpainting: Inpainting | None, deadline_ms: float
    ) -> Chunk | Miss:
        kind, arrays = ("infer", {}) if inpainting is None else ("inpaint", vars(inpainting))
        found = self.client.request(kind, Request(window, address, arrays), deadline_ms, wait_if_busy=True).result()
        return found if isinstance(found, Miss) else found[0]["chunk"]

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self.client.close()


@validated
def connect(
    url: str, *, deadline_ms: Deadline = 1000.0, token: str | None = None, ca: str | Path | None = None,
    robot: str = "robot", timeout: float = 5.0, jpeg_quality: int | None = None, seed: int = 0,
) -> RemotePolicy:  # fmt: skip
    """The chunk policy of a server, ``ws://host:port``, ``wss`` likewise; its spec comes from the server.

    Or of one of openpi's protocol, see :func:`~specact.families.chunks.openpi.openpi_source`. ``deadline_ms`` is a
    call's, ``timeout`` the first connection's [s]; ``token`` and ``ca`` (a PEM file) are for servers that need them;
    ``robot`` is this device's name there; ``jpeg_quality`` sends frames as JPEG; ``seed`` is of the server's sampling.

    Raises:
        RemoteError: if there is no connection in time, or the server refuses this device.
        ConfigError: if an argument is invalid, or the server has no chunk policy.
        BundleError: if the server's spec is invalid.
    """
    tls = tls_context(None if ca is None else Path(ca))
    endpoint: Endpoint
    if url.startswith(PREFIX):
        found = openpi_source(url, token, tls, timeout)
        endpoint, spec, units = found.endpoint, found.spec, found.units
    else:
        endpoint = Endpoint.parse(url, token, tls)
        spec, units = _served_spec(endpoint, robot, timeout)
    client = Client(endpoint, chunk_contract(spec), robot, jpeg_quality=jpeg_quality)
    try:
        client.connect(timeout)
        return RemotePolicy(client, spec, deadline_ms, units=units, seed=seed)
    except BaseException:
        client.close()
        raise


def _served_spec(endpoint: Endpoint, robot: str, timeout: float) -> tuple[ChunkSpec, ActionUnits | None]:
    conversation = NativeConversation(endpoint, timeout, robot, None)
    conversation.close()
    welcome = conversation.welcome
    if welcome.family != FAMILY:
        raise ConfigError(
            f"{endpoint} serves {welcome.bundle}, a target of the family {welcome.family!r:.40}, whose answers only a "
            f"pair on this device can use: specact.load_pair({welcome.bundle!r}) and "
            "specact.remote.remote_verifier(client, bundle, deadline_ms)"
        )
    return spec_of(welcome.spec)
