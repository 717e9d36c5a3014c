"""Noise at the rendezvous server (csrc/rendezvous.cpp): from strangers, and from who knows the secret. It costs the connection."""

import socket
from datetime import timedelta

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.topology.rendezvous import Rendezvous, RendezvousStore, _frame

pytestmark = pytest.mark.timeout(120)
TIMEOUT = timedelta(seconds=20)
GROWTH_MAX = 32 << 20
NUMBERS = (b"1", b"-1", b"9223372036854775807", b"-9223372036854775808", b"99999999999999999999", b"1e5", b"")


@st.composite
def talk(draw):
    """Frames: operations with too few, too many and odd words, some with a byte changed or their end cut off."""
    said = b""
    for _ in range(draw(st.integers(1, 5))):
        operation = draw(st.sampled_from([b"S", b"G", b"W", b"C", b"A", b"X", b"P", b"D", b"N", b"?", b""]))
        words = draw(st.lists(st.sampled_from([b"key", b"noise/a", b"x" * 5000, *NUMBERS]), max_size=4))
        frame = bytearray(_frame([operation, *words]))
        if draw(st.booleans()):
            frame[draw(st.integers(0, len(frame) - 1))] = draw(st.integers(0, 255))
        said += frame[: draw(st.integers(1, len(frame)))] if draw(st.booleans()) else frame
    return said


def say(served, noise, secret):
    endpoint, right = served.address.rsplit("/", 1)
    host, port = endpoint.rsplit(":", 1)
    with socket.create_connection((host, int(port)), 10) as client:
        try:
            client.sendall((_frame([right.encode()]) if secret else b"") + noise)
            client.shutdown(socket.SHUT_WR)
            while client.recv(65536):
                pass
        except OSError:
            pass  # it has hung up


@pytest.mark.parametrize("secret", [False, True], ids=["a stranger", "a client"])
def test_noise_costs_its_connection_and_nothing_else(secret):
    served = Rendezvous("127.0.0.1")
    store = RendezvousStore(served.address, TIMEOUT)
    store.set("mine", "1")
    before = psutil.Process().memory_info().rss

    @settings(max_examples=150, deadline=None)
    @given(st.one_of(talk(), st.binary(max_size=200), st.just(b"\xff\xff\xff\xff" + b"x" * 100_000), st.just(b"\x00\x00\x00\x0f")))
    def check(noise):
        say(served, noise, secret)
        assert store.get("mine") == b"1"
        assert store.add("asked", 1) > 0
        if not secret:
            assert store.num_keys() == 2

    check()
    assert psutil.Process().memory_info().rss - before < GROWTH_MAX
