"""When bytes are due, and the pipe they wait in; exact, without sockets."""

import math
import threading

import numpy as np
import pytest

from specact.links.faults import OutageLink
from specact.links.model import SteadyLink
from specact.links.recordings import MahimahiLink
from specact.links.relay import Pacer, Pipe


def pacer_of(link: object, up: bool = True, start: float = 100.0) -> Pacer:
    return Pacer(link, up, start, np.random.default_rng(0))  # type: ignore[arg-type]


def test_what_follows_a_big_message_waits_for_it() -> None:
    pacer = pacer_of(SteadyLink(10.0, 0.0, 8.0, 80.0))  # 1 MB/s up, 5 ms each way
    assert pacer.due(500_000, 100.0) == pytest.approx(100.505)
    assert pacer.due(1000, 100.1) == pytest.approx(100.506)  # 0.5 s of the big one, then its own 1 ms
    assert pacer.due(0, 100.2) == pytest.approx(100.506)
    assert pacer.due(1000, 101.0) == pytest.approx(101.006)  # idle again
    down = pacer_of(SteadyLink(10.0, 0.0, 8.0, 80.0), up=False)
    assert down.due(500_000, 100.0) == pytest.approx(100.055)


def test_jitter_never_reorders_and_never_makes_early() -> None:
    pacer = pacer_of(SteadyLink(10.0, 5.0, math.inf, math.inf))
    sent = 100.0 + 1e-3 * np.arange(500)
    due = np.array([pacer.due(100, now) for now in sent])
    assert (np.diff(due) >= 0.0).all() and (due - sent > 2.4999e-3).all()
    assert (np.diff(due) == 0.0).any()  # some would have overtaken


def test_a_link_counts_time_from_its_start() -> None:
    pacer = pacer_of(OutageLink(SteadyLink(0.0, 0.0, math.inf, math.inf), ((5.0, 3.0),)))
    assert [pacer.due(1, now) for now in (104.0, 105.5, 106.0, 109.0)] == pytest.approx([104.0, 108.0, 108.0, 109.0])


def test_messages_share_out_recorded_deliveries() -> None:
    pacer = pacer_of(MahimahiLink(np.array([10]), np.array([10])), start=0.0)  # a packet every 10 ms
    assert [pacer.due(1500, 0.0) for _ in range(4)] == pytest.approx([0.01, 0.02, 0.03, 0.04], abs=1e-6)


def test_a_pipe_is_first_in_first_out_and_bounded() -> None:
    pipe = Pipe(10)
    entered: list[bool] = []

    def fill() -> None:
        entered.extend(pipe.put(bytes(6), float(i)) for i in range(3))

    filler = threading.Thread(target=fill)
    filler.start()
    filler.join(0.2)
    assert filler.is_alive()  # 6 < 10 lets the second in, 12 keeps the third out
    assert [pipe.get() for _ in range(3)] == [(bytes(6), 0.0), (bytes(6), 1.0), (bytes(6), 2.0)]
    filler.join(10)
    assert entered == [True, True, True]
    assert pipe.put(b"", 3.0) and pipe.put(None, 4.0)
    assert [pipe.get(), pipe.get()] == [(b"", 3.0), (None, 4.0)]


@pytest.mark.parametrize("full", [True, False])
def test_closing_a_pipe_lets_nobody_wait(full: bool) -> None:
    pipe = Pipe(1)
    if full:
        pipe.put(b"x", 0.0)
    answers: list[object] = []
    waiter = threading.Thread(target=lambda: answers.append(pipe.put(b"y", 0.0) if full else pipe.get()))
    waiter.start()
    pipe.close()
    waiter.join(10)
    assert not waiter.is_alive() and answers == [False if full else None]
    assert pipe.get() is None and not pipe.put(b"z", 0.0)
