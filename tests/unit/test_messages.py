"""control/messages.py on the wire: every message survives the trip, and nothing that arrives can do more than be refused."""

import contextlib
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.hotswap.agent import local
from megatron.hotswap.codec import decoder
from megatron.hotswap.control import messages as m
from megatron.hotswap.coordinator import wire
from megatron.hotswap.errors import Malformed

FROM_AGENT = typing.get_args(m.FromAgent)
FROM_COORDINATOR = typing.get_args(m.FromCoordinator)
FROM_WORKER = typing.get_args(local.FromWorker)
TO_WORKER = typing.get_args(local.FromAgent)


def values(kind):
    """Values of a field's type."""
    if typing.get_origin(kind) is typing.Annotated:
        number, bounds = typing.get_args(kind)
        assert number is int
        return st.integers(bounds.ge, bounds.le if bounds.le is not None else bounds.lt - 1)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is list:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if args:  # a union with None
        return st.one_of([st.none() if a is type(None) else values(a) for a in args])
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs(kind)
    return {
        str: st.text(max_size=20),
        bytes: st.binary(max_size=20),
        bool: st.booleans(),
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
    }[kind]


def structs(kind):
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


DECODERS = {"agent": (wire.decode_from_agent, FROM_AGENT), "coordinator": (wire.decode_from_coordinator, FROM_COORDINATOR)}
LOCAL = decoder(local.FromWorker), decoder(local.FromAgent)
ALL = [(kind, wire.decode_from_agent) for kind in FROM_AGENT]
ALL += [(kind, wire.decode_from_coordinator) for kind in FROM_COORDINATOR]
ALL += [(kind, LOCAL[0]) for kind in FROM_WORKER] + [(kind, LOCAL[1]) for kind in TO_WORKER]
ALL += [(wire.Command, wire.decode_command), (wire.Status, wire.decode_status)]


@pytest.mark.parametrize(("kind", "decode"), ALL, ids=lambda x: getattr(x, "__name__", ""))
def test_every_message_survives_the_round_trip(kind, decode):
    @settings(max_examples=10, deadline=None)
    @given(structs(kind))
    def check(message):
        assert decode(wire.encode(message)) == message

    check()


@pytest.mark.parametrize("decode", [wire.decode_from_agent, wire.decode_from_coordinator, *LOCAL, wire.decode_command])
def test_noise_raises_and_never_crashes(decode):
    @settings(max_examples=150, deadline=None)
    @given(st.binary(max_size=200))
    def check(noise):
        with pytest.raises(Malformed):
            decode(b"\xc1" + noise)  # a byte that msgpack never uses: no message begins like this
        with contextlib.suppress(Malformed):
            decode(noise)

    check()


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(FROM_AGENT).flatmap(structs), st.data())
def test_a_damaged_message_is_refused_or_is_another_valid_one(message, data):
    """Cut short it is always refused; a changed byte may make another message of the right types, never a crash."""
    raw = wire.encode(message)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(Malformed):
        wire.decode_from_agent(raw[:cut])
    at, flip = data.draw(st.integers(0, len(raw) - 1)), data.draw(st.integers(1, 255))
    damaged = bytearray(raw)
    damaged[at] ^= flip
    with contextlib.suppress(Malformed):
        assert isinstance(wire.decode_from_agent(bytes(damaged)), FROM_AGENT)


def test_a_field_of_another_type_is_refused_by_name():
    raw = msgspec.msgpack.encode({"type": "Heartbeat", "sequence": "one"})
    with pytest.raises(Malformed, match=r"Expected `int`, got `str` - at `\$.sequence`"):
        wire.decode_from_agent(raw)


def test_a_message_for_the_other_side_is_refused():
    """An agent cannot order a halt."""
    with pytest.raises(Malformed, match="Invalid value 'Halt'"):
        wire.decode_from_agent(wire.encode(m.Halt(1, "now")))


@settings(max_examples=30, deadline=None)
@given(st.binary(max_size=8))
def test_a_huge_announced_length_costs_no_memory(tail):
    """An array of 2^32 - 1 entries in ten bytes."""
    with pytest.raises(Malformed):
        wire.decode_from_agent(b"\xdd\xff\xff\xff\xff" + tail)


def test_messages_are_frozen():
    """The simulator and the service hand the same value to several receivers."""
    assert all(kind.__struct_config__.frozen for kind, _ in ALL)
