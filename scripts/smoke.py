"""What an installed specact must do, run by the interpreter that has it: python -I scripts/smoke.py device.

device          only the base dependencies are there: draft, gate and target in one process
client PORT     a pair whose target is on a server
server          the extra `server` is there, too: a server and its clients on loopback
"""

import importlib.util
import pathlib
import sys

import numpy as np

import specact

CHUNKS = "ball-chase-flow"


def device() -> None:
    for package in ("torch", "picows", "gymnasium", "mujoco", "scipy", "matplotlib", "pyarrow"):
        assert importlib.util.find_spec(package) is None, f"{package} is installed; the base install must not bring it"
    try:
        specact.load_pair("pusht")
    except specact.errors.ConfigError as error:
        told = str(error)
        assert "unknown bundle 'pusht'" in told and f"Known: ball, {CHUNKS}" in told, told
        assert "pretrained/" in told and "scripts/make-pretrained" in told, told
    else:
        raise AssertionError(f"the wheel brings ball, {CHUNKS} and no other bundle")
    bundle = specact.load_pair("ball")
    rng = np.random.default_rng(0)
    transmitted = []
    for gate in (specact.gates.Never(), specact.gates.Always(), specact.gates.ActionDeviation(threshold=0.3)):
        policy = specact.SpeculativePolicy(bundle, gate, seed=0)
        policy.reset(episode=0)
        records = {}
        for _ in range(200):
            observation = {name: rng.normal(size=field.shape) for name, field in bundle.observation.fields.items()}
            action = policy.act({key: value.astype(np.float32) for key, value in observation.items()})
            assert action.dtype == np.float32 and action.ndim == 1 and np.isfinite(action).all()
            records[policy.record.address.step] = policy.record.decision.transmit
        transmitted.append(sum(records.values()) / len(records))
    never, always, deviation = transmitted
    assert (never, always) == (0.0, 1.0) and 0.0 < deviation <= 1.0, transmitted


def client(port: int) -> None:
    from specact.remote import Client, Endpoint, remote_verifier

    bundle = specact.load_pair("ball")
    for sampling in ("device", "server"):
        with Client(Endpoint("ws", "127.0.0.1", port), bundle.exchange.contract) as connection:
            connection.connect(10.0)
            verifier = remote_verifier(connection, bundle, 5000.0, sampling)
            policy = specact.SpeculativePolicy(bundle, specact.gates.Always(), verifier=verifier)
            for _ in range(20):
                policy.act({name: np.zeros(field.shape) for name, field in bundle.observation.fields.items()})
            assert policy.counts["missed"] == 0 and policy.counts["verified"] == 8, policy.counts


def server() -> None:
    from specact.lab.rollout.processes import ServerProcess, serving

    with serving("ball") as started:
        client(started.port)
    with (
        ServerProcess(["serve", CHUNKS, "--port", "0"]) as started,
        specact.connect(f"ws://127.0.0.1:{started.port}", deadline_ms=5000.0) as target,
    ):
        actions = target({"state": np.zeros(12)})
        assert actions.dtype == np.float32 and actions.ndim == 2 and np.isfinite(actions).all()


if __name__ == "__main__":
    assert not {"torch", "gymnasium", "picows", "onnxruntime"} & set(sys.modules), "import specact is not light"
    assert pathlib.Path(specact.__file__).is_relative_to(sys.prefix), f"tested {specact.__file__}, not the wheel"
    if sys.argv[1] == "client":
        client(int(sys.argv[2]))
    else:
        {"device": device, "server": server}[sys.argv[1]]()
