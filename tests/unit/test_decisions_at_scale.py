"""What the coordinator does in a recovery grows with the job, not with its square: thousands of agents report one by one."""

import sys
import zlib
from pathlib import Path

import pytest

from megatron.hotswap import codec
from megatron.hotswap.control import messages as m
from megatron.hotswap.coordinator import wire
from megatron.hotswap.errors import Malformed

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import decisions

SMALL, LARGE = 1024, 16384


def test_no_decision_costs_the_square_of_the_ranks():
    """A square would show as sixteen times as much a rank; what is left is the memory that more ranks take."""
    found = {ranks: [decisions.measure(ranks)["seconds"] for _ in range(2)] for ranks in (SMALL, LARGE)}
    for part in found[SMALL][0]:
        small, large = (min(each[part] for each in found[ranks]) / ranks for ranks in (SMALL, LARGE))
        assert large < 6 * small + 1e-6, (part, found)


def test_the_largest_order_of_the_largest_job_is_received():
    found = decisions.measure(102_400)
    assert found["order_bytes"] < wire.MESSAGE_BYTES_MAX / 2 and found["order_bytes_unpacked"] > wire.MESSAGE_BYTES_MAX


def order(ranks: int) -> m.Start:
    members = tuple(m.Member(f"node{r}", f"node{r}-1", 0, "host:1") for r in range(ranks))
    return m.Start(m.Membership(1, members, tuple(((r + 1) % ranks,) for r in range(ranks))), "store", None)


@pytest.mark.parametrize(("ranks", "packed"), [(4, False), (4096, True)])
def test_an_order_is_read_as_it_was_written(ranks, packed):
    written = wire.encode_order(order(ranks))
    assert (written[:1] == codec.PACKED) == packed
    assert wire.decode_from_coordinator(written) == order(ranks)
    assert wire.encode_order(order(3)) != written and wire.encode_order(order(ranks)) == written


def test_what_was_written_once_is_not_written_again():
    same, write = order(4096), codec.packing_encoder()
    assert write(same) is write(same)
    assert write(order(4096)) is not write(same)


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (codec.PACKED + b"noise", "cannot be unpacked"),
        (codec.PACKED + zlib.compress(bytes(100))[:-1], "cut off"),
        (codec.PACKED + zlib.compress(b"\xc0") + b"more", "followed by more"),
        (codec.PACKED + zlib.compress(bytes(2 << 20)), "more than 1048576 bytes"),
        (codec.PACKED + zlib.compress(b"\xc0"), "no message that is known"),
    ],
)
def test_noise_that_is_packed_is_refused(raw, why, monkeypatch):
    monkeypatch.setattr(codec, "_UNPACKED_BYTES_MAX", 1 << 20)
    with pytest.raises(Malformed, match=why):
        wire.decode_from_coordinator(raw)


def test_nothing_that_an_agent_sends_is_unpacked():
    with pytest.raises(Malformed):
        wire.decode_from_agent(codec.PACKED + zlib.compress(wire.encode(m.Heartbeat(1))))
