"""processes.py: a child dies with its parent, also where the parent is process 1."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from megatron.hotswap.processes import remove_shared_memory

_CHILD = "import sys; from megatron.hotswap.processes import die_with_parent as d; d(int(sys.argv[1])); print('lives', flush=True); input()"
#: A parent that starts a child as an agent starts a worker, and tells its own process id.
_PARENT = f"""
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}, str(os.getpid())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
print(os.getpid(), child.pid, child.stdout.readline().strip() or f"ended with {{child.wait()}}", flush=True)
sys.stdin.read()
"""


def start(*before: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*before, sys.executable, "-c", _PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_child_lives_with_its_parent_and_is_killed_with_it():
    parent = start()
    _, child, said = parent.stdout.readline().split(maxsplit=2)
    assert said.strip() == "lives"
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(int(child)) and psutil.Process(int(child)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_child_whose_parent_died_before_it_looked_ends():
    gone = subprocess.Popen(["true"])
    gone.wait()
    child = subprocess.run([sys.executable, "-c", _CHILD, str(gone.pid)], stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert (child.returncode, child.stdout) == (3, b"")


def test_a_parent_that_is_process_1_of_a_container_is_a_parent_like_any_other():
    namespaces = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
    try:
        allowed = subprocess.run([*namespaces, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("this system lets nobody make a process namespace here (unshare --user --pid)")
    parent = start(*namespaces)
    said, _ = parent.communicate()
    assert said.split()[0] == "1"
    assert said.split()[2] == "lives"


#: What a worker is to its agent: it has a child that holds a named semaphore, and Python's tracker of such.
_LEAVER = """
import multiprocessing, os, time
context = multiprocessing.get_context("spawn")
semaphore = context.Semaphore(1)
child = context.Process(target=time.sleep, args=(600,))
child.start()
print(semaphore._semlock.name, flush=True)
time.sleep(600)
"""
_KEEPER = f"""
import os, signal, subprocess, sys
from megatron.hotswap.processes import adopt_orphans, end_children
adopt_orphans()
leaver = subprocess.Popen([sys.executable, "-c", {_LEAVER!r}], stdout=subprocess.PIPE, text=True, env={{**os.environ, "LEAVER": "1"}})
name = leaver.stdout.readline().strip()
assert os.path.exists("/dev/shm/sem." + name.lstrip("/")), name
leaver.kill()
leaver.wait()
assert end_children("LEAVER=1")
print(os.path.exists("/dev/shm/sem." + name.lstrip("/")), flush=True)
"""


def test_what_a_dead_process_leaves_ends_and_its_named_semaphores_go():
    done = subprocess.run([sys.executable, "-c", _KEEPER], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "False\n", done.stdout + done.stderr


_LEAVES_SHARED_MEMORY = """
import os, signal, sys
open(f"/dev/shm/torch_{os.getpid()}_1_0", "w").close()
print(os.getpid(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_shared_memory_that_torch_was_killed_with_before_it_had_taken_the_name_away_goes():
    """Of a child that is ended, and of the process itself; another one's stays."""
    program = f"""
import os, subprocess, sys
from megatron.hotswap.processes import adopt_orphans, end_children
adopt_orphans()
parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=False)"
subprocess.run([sys.executable, "-c", parent, {_LEAVES_SHARED_MEMORY!r}], env={{**os.environ, "LEAVER": "2"}}, check=False)
child = subprocess.Popen([sys.executable, "-c", {_LEAVES_SHARED_MEMORY!r}.replace("os.kill(os.getpid(), signal.SIGKILL)", "input()")],
    stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={{**os.environ, "LEAVER": "1"}})
pid = child.stdout.readline().strip()
end_children("LEAVER=1")
print([name for name in os.listdir("/dev/shm") if name == f"torch_{{pid}}_1_0"], flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    other, left = done.stdout.splitlines()
    path = f"/dev/shm/torch_{other}_1_0"
    assert left == "[]" and os.path.exists(path), done.stderr
    remove_shared_memory(int(other))
    assert not os.path.exists(path)


_ENDS_WHILE_THREADS_ARE_IN_THE_ENGINE = """
import ctypes, random, sys, threading, time
import deadpool_ext
import megatron.hotswap.__main__ as program
import megatron.hotswap.agent.main as agent

memory = ctypes.create_string_buffer(4 << 20)

def move_chunks():
    while True:
        deadpool_ext.crc32c(ctypes.addressof(memory), random.randrange(100_000, len(memory)))

def run_agent(*arguments):
    for _ in range(3): threading.Thread(target=move_chunks, daemon=True).start()
    time.sleep(0.2)
    print("the job is over")
    return 7

agent.run_agent = run_agent
sys.argv = ["x.py", "--hot-swap"]
sys.exit(program.launch_or_train("x.py", lambda: None))
"""


def test_an_agent_ends_with_its_own_code_although_a_transfer_still_runs():
    """A thread that comes back from the engine while Python takes itself down would end the process with an abort."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    for _ in range(4):
        command = [sys.executable, "-c", _ENDS_WHILE_THREADS_ARE_IN_THE_ENGINE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert (done.returncode, done.stdout) == (7, "the job is over\n"), done.stderr
