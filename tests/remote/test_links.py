"""Links that break, lose or hold back: a device goes on and finds back by itself, at few deadlines' cost."""

from __future__ import annotations

import select
import socket
import struct
import threading

import pytest
from tests.remote.conftest import BOTH, asking, listening, misbehaving


class Cable:
    """A relay to a server of this machine, for :func:`listening`, that breaks as told.

    Attributes:
        flows: cleared, nothing passes, and nothing is lost.
        plugged: cleared, new connections end at once.
        endings: each ends all connections there are: ``reset``, or ``freeze``, after which they look open.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.flows, self.plugged, self._over = threading.Event(), threading.Event(), threading.Event()
        self.endings: list[str] = []
        self.mend()

    def mend(self) -> None:
        self.flows.set()
        self.plugged.set()

    def end(self) -> None:
        """Lets go of what is frozen."""
        self._over.set()
        self.mend()

    def serve(self, side: socket.socket) -> None:
        before = len(self.endings)
        if not self.plugged.is_set():
            return
        with socket.create_connection(("127.0.0.1", self._port)) as server:
            other = {side: server, server: side}
            while not self._over.is_set():
                for ready in select.select(list(other), [], [], 0.01)[0]:
                    self.flows.wait(60)
                    if len(self.endings) == before:
                        other[ready].sendall(data := ready.recv(65536))
                        if not data:
                            return
                if len(self.endings) > before:
                    if self.endings[-1] == "freeze":
                        self._over.wait(60)
                    side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return


@pytest.mark.parametrize("protocol", BOTH)
@pytest.mark.parametrize("fault", ["half open", "reset and refused", "black hole", "patient"])
def test_a_link_that_breaks_costs_few_deadlines(fault: str, protocol: str) -> None:
    silence_s = 60.0 if fault == "patient" else 1.0
    with misbehaving(protocol) as (there, server):
        cable = Cable(server)
        with listening(cable.serve) as port, asking(protocol, port, 200.0, silence_s=silence_s) as device:
            try:
                device.find_back()
                before = device.causes["deadline"]
                if fault == "half open":
                    cable.endings.append("freeze")
                elif fault == "reset and refused":
                    cable.plugged.clear()
                    cable.endings.append("reset")
                else:
                    cable.flows.clear()
                while device.causes.total() < 12:
                    device.ask()
                assert set(device.causes) <= {"deadline", "disconnected", "held_back"}
                # Three in a row, and nothing more is sent before a sign of life; without ids no other waits at all.
                assert not there.native or device.causes["deadline"] - before <= 4
                cable.mend()
                device.find_back()
            finally:
                cable.end()
        assert device.client.counts["connections"] >= (2 if fault in ("half open", "reset and refused") else 1)
        assert len({question.number for question in there.questions}) == len(there.questions)
