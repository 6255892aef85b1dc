"""A policy on a server of openpi's protocol, by the server's address and a description of its inputs and outputs."""

from __future__ import annotations

import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from specact.errors import BundleError, ConfigError, MissError, SpecactError
from specact.families.chunks.policy import ChunkSpec
from specact.families.chunks.sources import Description, FunctionPolicy, Inputs
from specact.families.chunks.wire import FAMILY, check_served, chunk_contract
from specact.observation import Window, read_spec
from specact.records import read_toml
from specact.remote.client import Client
from specact.remote.endpoint import Endpoint
from specact.remote.openpi import Key, OpenpiConversation, OpenpiEndpoint
from specact.rng import StepAddress
from specact.types import ActionUnits, Miss
from specact.wire.exchange import Contract, Request
from specact.wire.messages import MAX_DEADLINE_MS, printable
from specact.wire.openpi import CHUNK

PREFIX = "openpi:"
_PORT, _FORM = 8000, "openpi:ws://HOST:PORT#FILE.toml"
# For a first connection [s].
_CONNECT_TIMEOUT_S = 10.0
# In the metadata of a server of this package.
_NAMES = ("bundle", "fingerprint")


@dataclass(frozen=True)
class OpenpiSource:
    """A policy on a server of openpi's protocol; the units of its actions are None if their range is unknown.

    Name and fingerprint are from the server's metadata; its host name and empty if the metadata has none.
    """

    endpoint: OpenpiEndpoint
    spec: ChunkSpec
    units: ActionUnits | None
    name: str
    fingerprint: str


class ServerDescription(Description, frozen=True):
    """See :func:`openpi_source`."""

    instruction: bool = False
    endpoint: bool = False


def openpi_source(
    source: str, token: str | None = None, tls: ssl.SSLContext | None = None, timeout: float = _CONNECT_TIMEOUT_S
) -> OpenpiSource:
    """Requests a server's metadata, and reads the description of its policy, which one of this package does not need.

    The address is ``openpi:ws://HOST:PORT/PATH#FILE.toml`` (``wss`` likewise; port 8000 and path ``/`` if not given).
    The file is as for :func:`~specact.families.chunks.sources.onnx_policy`, without a graph, see docs/openpi.md.

    Raises:
        ConfigError: if it is no such address, or the description cannot be used.
        RemoteError: if the server does not answer within ``timeout`` [s].
        BundleError: if there is no description, and the metadata does not say enough.
    """
    endpoint, spec, units = _parse(source, token, tls)
    conversation = OpenpiConversation(endpoint, timeout)
    conversation.close()
    metadata = conversation.metadata
    if spec is None:
        spec = _spec_of(metadata, source)
    name, fingerprint = (printable(text, 64) if isinstance(text, str) else "" for text in map(metadata.get, _NAMES))
    return OpenpiSource(endpoint, spec, units, name or endpoint.host, fingerprint)


def target_endpoint(server: str, token: str | None, tls: ssl.SSLContext | None, contract: Contract) -> Endpoint:
    """Address of the server of a pair's target, in this package's protocol or openpi's: :func:`openpi_endpoint`.

    Raises:
        ConfigError: if it is no such address, or its protocol does not serve this pair.
    """
    if server.startswith(PREFIX):
        return openpi_endpoint(server, token, tls, contract)
    return Endpoint.parse(server, token, tls)


def openpi_endpoint(source: str, token: str | None, tls: ssl.SSLContext | None, contract: Contract) -> OpenpiEndpoint:
    """Address of a pair's target, see :func:`openpi_source`; a description, if there is one, must be of the contract.

    Raises:
        ConfigError: if it is no such address, the description cannot be used, or the pair is not of chunk policies.
    """
    if contract.family != FAMILY:
        raise ConfigError(
            f"openpi's protocol answers with chunks of actions, and this pair's family is {contract.family!r}; make a "
            "pair with such a target: specact pair"
        )
    endpoint, spec, _ = _parse(source, token, tls)
    if spec is not None and spec.describe() != contract.spec:
        raise ConfigError(
            f"{source} describes a policy with {spec.describe()}, but the pair was made for one with "
            f"{dict(contract.spec)}; make it again with specact pair"
        )
    return endpoint


def openpi_policy(server: OpenpiSource, deadline_s: float = MAX_DEADLINE_MS / 1e3) -> FunctionPolicy:
    """The policy, queried for one window at a time, as the protocol has no batches; for use without step deadlines.

    Raises:
        RemoteError: if there is no connection.
    """
    client = Client(server.endpoint, chunk_contract(server.spec))
    try:
        client.connect(_CONNECT_TIMEOUT_S)
    except BaseException:
        client.close()
        raise

    def ask(window: Window, rng: np.random.Generator) -> Any:
        # A server of this package samples from this address; others have their own randomness.
        request = Request(window, StepAddress(int(rng.integers(2**63)), 0, 0, 0))
        answer = client.request("infer", request, 1e3 * deadline_s, wait_if_busy=True).result()
        if isinstance(answer, Miss):
            why = f": {client.problem}" if client.problem else ""
            raise MissError(f"{server.endpoint} gave no usable answer ({answer.cause}{why})", answer.cause)
        return answer[0][CHUNK]

    def answer(inputs: Inputs, rngs: Sequence[np.random.Generator], instruction: Sequence[str] = ()) -> Any:
        rows = range(len(rngs))
        windows = [Window({name: array[k] for name, array in inputs.items()}, *instruction[k : k + 1]) for k in rows]
        return np.stack([ask(window, rng) for window, rng in zip(windows, rngs, strict=True)])

    return FunctionPolicy(server.spec, answer, units=server.units, fingerprint=server.fingerprint, seeded=True)


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
        spec, units = description.spec(description.instruction), description.units
    except SpecactError as error:
        raise ConfigError(f"{path}: {error}") from None
    keys = {name: Key(entry.input, entry.channels_first) for name, entry in description.observation.items()}
    return replace(endpoint, keys=keys, names_endpoint=description.endpoint), spec, units


def _spec_of(metadata: Mapping[str, Any], source: str) -> ChunkSpec:
    try:
        observation = read_spec({"fields": metadata["observation"], "instruction": metadata["instruction"]})
        spec = ChunkSpec(observation, metadata["action_horizon"], metadata["action_dim"], metadata["rate_hz"])
    except (KeyError, SpecactError) as error:
        raise BundleError(
            f"the server at {source} does not say what its policy takes and gives ({printable(str(error))}); describe "
            f"it in a TOML file and name that as well: {source}#FILE.toml"
        ) from None
    return check_served(spec)
