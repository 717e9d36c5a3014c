"""worker/faults.py and the moments at which they strike: each does to its process what it says, and to nothing else."""

import signal
import subprocess
import sys
import time

import pytest

from megatron.hotswap.control import messages as m
from megatron.hotswap.errors import InjectedFault
from megatron.hotswap.snapshot.slots import ControlBlock, Word
from megatron.hotswap.worker import faults
from megatron.hotswap.worker.session import Session

#: A thread beside the one that is struck says something every tenth of a second.
BESIDE = """
import threading, time
def talk():
    while True:
        time.sleep(0.1)
        print("still here", flush=True)
threading.Thread(target=talk, daemon=True).start()
"""


def start(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


def test_every_fault_of_a_worker_has_a_cause():
    assert {*faults._CAUSES, "fail-collective"} == set(m.WORKER_FAULTS)


def test_an_error_of_the_program():
    with pytest.raises(InjectedFault, match="on purpose"):
        faults.cause("exit")


def test_a_crash_is_one():
    process = start("from megatron.hotswap.worker import faults; faults.cause('segv')")
    assert process.wait(30) == -signal.SIGSEGV


def test_memory_runs_out_for_real_and_what_is_left_is_enough_to_say_so():
    process = start(
        "from megatron.hotswap.worker import faults\n"
        "try:\n    faults.cause('oom')\nexcept MemoryError as error:\n    print(type(error).__name__)\n"
        "try:\n    bytearray(1 << 28)\nexcept MemoryError:\n    print('still out of it')\n"
    )
    said, _ = process.communicate(timeout=30)
    assert said.split("\n")[:2] == ["MemoryError", "still out of it"]


@pytest.mark.parametrize(("fault", "lives"), [("hang", True), ("spin", False)])
def test_who_hangs_lets_other_threads_run_and_who_keeps_the_lock_does_not(fault, lives):
    process = start(f"from megatron.hotswap.worker import faults\n{BESIDE}\ntime.sleep(0.5)\nfaults.cause('{fault}')")
    time.sleep(2.0)
    assert process.poll() is None
    process.kill()
    said, _ = process.communicate(timeout=30)
    assert (len(said.split("\n")) > 10) == lives


def session(*injections):
    """A session without link and monitor thread."""
    made = Session.__new__(Session)
    made.control, made.building, made.version, made._next_collective_fails = ControlBlock.create(), False, 1, False
    made._armed, made.said = list(injections), []
    made.say = made.said.append
    return made


def fault(action, at_step=None, phase=None):
    return m.Injection(action, "worker", "node0", 0, at_step, phase)


def test_a_fault_strikes_in_its_step_and_phase_and_is_written_down_first():
    armed = session(fault("exit", 12, "backward"))
    for step, phase in ((11, "backward"), (12, "forward")):
        armed.enter(phase, step)
    assert armed.said == []
    with pytest.raises(InjectedFault):
        armed.enter("backward", 12)
    assert armed.said[0].injection.action == "exit" and armed._armed == []


def test_at_once_is_the_next_phase():
    with pytest.raises(InjectedFault):
        session(fault("exit")).enter("log", 3)


def test_the_next_collective_fails_once_as_a_broken_link_would():
    armed = session(fault("fail-collective", 5))
    armed.enter("forward", 5)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        armed.check()
    armed.check()


def test_a_fault_waits_until_a_halt_is_over():
    """What the training thread raises while the membership ends is taken for that: the fault would be lost, and said to have struck."""
    armed = session(fault("exit", 5, "backward"))
    armed.control.set(Word.OVER_VERSION, 1)
    armed.enter("backward", 5)
    assert armed.said == []
    armed.version = 2
    with pytest.raises(InjectedFault):
        armed.enter("backward", 5)
