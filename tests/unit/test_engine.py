"""deadpool_ext as Python sees it: copies and flags, checksum, words in shared memory, errors that say what to do."""

import mmap
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

import deadpool_ext as engine

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

PATIENCE_S = 30.0


def address(array: npt.NDArray[np.generic]) -> int:
    return array.ctypes.data


def words(*values: int) -> Words:
    return np.array(values, dtype=np.uint64)


def random_bytes(rng: np.random.Generator, length: int) -> Bytes:
    return rng.integers(0, 256, length, dtype=np.uint8)


class Snapshot:
    """Tensors of random sizes, a slot to copy them to, and the arrays that submit() takes."""

    def __init__(self, rng: np.random.Generator, sizes: list[int]) -> None:
        self.tensors = [random_bytes(rng, size) for size in sizes]
        self.slot = np.zeros(sum(sizes) + 1, dtype=np.uint8)  # a byte more: what lies past the end must stay 0
        self.lengths = words(*sizes)
        self.src = words(*(address(tensor) for tensor in self.tensors))
        self.dst = words(*(address(self.slot) + sum(sizes[:i]) for i in range(len(sizes))))

    def submit(self, queue: engine.CopyQueue, flag: Words, value: int) -> int:
        return queue.submit(self.src, self.dst, self.lengths, address(flag), value)

    def arrived(self) -> bool:
        return bytes(self.slot) == b"".join(bytes(tensor) for tensor in self.tensors) + b"\0"


def run_python(program: str, timeout_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=timeout_s, check=False
    )


# Copies and their flags


@pytest.mark.parametrize("seed", range(5))
def test_copies_arrive_whole_for_many_tensors_of_any_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 7, 8, 4096, 0, *rng.integers(0, 30_000, int(rng.integers(0, 400))).tolist(), 20_000_000, 0]
    snapshot = Snapshot(rng, sizes)
    flag, queue = words(0), engine.CopyQueue()
    ticket = snapshot.submit(queue, flag, 41)
    assert queue.wait(ticket, PATIENCE_S)
    assert flag[0] == 41
    assert snapshot.arrived()
    assert queue.bytes_copied() == sum(sizes)
    assert queue.pending() == 0
    queue.close()


def test_no_tensors_still_set_the_flag() -> None:
    flag, queue, none = words(0), engine.CopyQueue(), words()
    assert queue.wait(queue.submit(none, none, none, address(flag), 2**64 - 1), PATIENCE_S)
    assert flag[0] == 2**64 - 1


def test_jobs_run_in_order_and_tickets_count_up() -> None:
    rng = np.random.default_rng(0)
    snapshots = [Snapshot(rng, [100_000, 5]) for _ in range(20)]
    flag, queue = words(0), engine.CopyQueue()
    tickets = [snapshot.submit(queue, flag, g + 1) for g, snapshot in enumerate(snapshots)]
    assert tickets == list(range(1, 21))
    for g, snapshot in enumerate(snapshots):
        assert engine.wait_u64_at_least(address(flag), g + 1, PATIENCE_S) == 1
        assert snapshot.arrived()
    assert all(queue.wait(ticket, PATIENCE_S) for ticket in reversed(tickets))


def test_submit_takes_its_own_copy_of_the_arrays() -> None:
    rng = np.random.default_rng(0)
    big, small = Snapshot(rng, [30_000_000]), Snapshot(rng, [1000] * 50)
    flag, queue = words(0), engine.CopyQueue()
    big.submit(queue, flag, 1)  # keeps the thread busy
    ticket = small.submit(queue, flag, 2)
    for array in (small.src, small.dst, small.lengths):
        array[:] = 1
    assert queue.wait(ticket, PATIENCE_S)
    assert small.arrived()


def test_submit_of_1000_tensors_returns_at_once() -> None:
    snapshot = Snapshot(np.random.default_rng(0), [60_000] * 1000)
    flag, queue = words(0), engine.CopyQueue()
    took_s = []
    for g in range(5):
        begin = time.perf_counter()
        ticket = snapshot.submit(queue, flag, g + 1)
        took_s.append(time.perf_counter() - begin)
        assert queue.wait(ticket, PATIENCE_S)
    assert min(took_s) < 0.02, f"submit should take well under 1 ms, took {took_s} s"


AGENT = """
import mmap, sys
import numpy as np
import deadpool_ext as engine
path, length, patience_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
with open(path, "r+b") as file:
    base = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
address = base.ctypes.data
print(engine.wait_u64_at_least(address, 7, patience_s), engine.crc32c(address + 8, length))
"""


def test_another_process_sees_the_bytes_once_it_sees_the_flag(tmp_path: Path) -> None:
    source = random_bytes(np.random.default_rng(0), 5_000_000)
    path = tmp_path / "slot"
    path.write_bytes(bytes(8 + source.nbytes))
    with open(path, "r+b") as file:
        slot = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.uint8)
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(path), str(source.nbytes), str(PATIENCE_S)], stdout=subprocess.PIPE, text=True
    )
    queue = engine.CopyQueue()
    queue.submit(words(address(source)), words(address(slot) + 8), words(source.nbytes), address(slot), 7)
    said, _ = agent.communicate(timeout=PATIENCE_S)
    assert said.split() == ["1", str(engine.crc32c(address(source), source.nbytes))]


def test_wait_releases_pythons_lock() -> None:
    word = words(0)
    answers: list[int] = []
    waiter = threading.Thread(target=lambda: answers.append(engine.wait_u64_at_least(address(word), 1, PATIENCE_S)))
    waiter.start()
    engine.store_u64(address(word), 1)  # would not be reached if the waiter held the lock
    waiter.join()
    assert answers == [1]


def test_close_drops_what_has_not_begun_and_says_so() -> None:
    rng = np.random.default_rng(0)
    big = Snapshot(rng, [200_000_000])
    small = Snapshot(rng, [10])
    flag, late_flag, queue = words(0), words(0), engine.CopyQueue()
    first = big.submit(queue, flag, 1)
    while queue.bytes_copied() == 0:
        pass
    second = small.submit(queue, late_flag, 1)
    assert queue.pending() in (1, 2)
    assert queue.close()
    assert queue.wait(first, 0)
    assert flag[0] == 1 and big.arrived()  # never half-written
    if late_flag[0] == 0:  # else this machine copied the first before we closed
        with pytest.raises(RuntimeError, match="was dropped"):
            queue.wait(second, 0)
    with pytest.raises(RuntimeError, match="closed copy queue"):
        small.submit(queue, flag, 2)
    assert queue.close()


def test_no_thread_stays_after_queues_are_gone() -> None:
    def engine_threads() -> int:
        names = []
        for task in os.listdir("/proc/self/task"):
            try:
                with open(f"/proc/self/task/{task}/comm") as comm:
                    names.append(comm.read().strip())
            except OSError:  # ended meanwhile
                continue
        return names.count("deadpool-copy")

    before = engine_threads()
    queues = [engine.CopyQueue() for _ in range(50)]
    assert engine_threads() == before + 50
    for queue in queues[:25]:
        queue.close()
    del queues, queue
    assert engine_threads() == before


def test_a_forked_child_cannot_use_the_queue_and_is_not_hung_by_it() -> None:
    done = run_python(
        """
import os, numpy as np, deadpool_ext as engine
queue, flag, none = engine.CopyQueue(), np.zeros(1, np.uint64), np.zeros(0, np.uint64)
child = os.fork()
if child == 0:
    submit = lambda: queue.submit(none, none, none, flag.ctypes.data, 1)
    for call in (submit, queue.pending, queue.bytes_copied, queue.close):
        try:
            call()
        except RuntimeError as error:
            print(error, flush=True)
    del queue
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert queue.wait(queue.submit(none, none, none, flag.ctypes.data, 1), 10)
"""
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("forked") == 4


def test_a_process_that_ends_with_a_busy_queue_ends() -> None:
    done = run_python(
        """
import numpy as np, deadpool_ext as engine
a, b, flag = np.ones(100_000_000, np.uint8), np.zeros(100_000_000, np.uint8), np.zeros(1, np.uint64)
one = lambda x: np.array([x], dtype=np.uint64)
queue = engine.CopyQueue()
queue.submit(one(a.ctypes.data), one(b.ctypes.data), one(a.nbytes), flag.ctypes.data, 1)
"""
    )
    assert done.returncode == 0, done.stderr


WAIT_FOR_GOOD = """
import signal
import numpy as np
import deadpool_ext as engine
signal.signal(signal.SIGINT, signal.default_int_handler)  # who is started in the background is born deaf to it
flag = np.zeros(1, np.uint64)
print("ready", flush=True)
engine.wait_u64_at_least(flag.ctypes.data, 1, float("inf"))
"""


def test_ctrl_c_ends_a_wait_without_end() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WAIT_FOR_GOOD], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert "KeyboardInterrupt" in said


# Errors


def submit_one(src: int, dst: int, length: int, flag: int, stream: int | None = None) -> Callable[[], int]:
    queue = engine.CopyQueue()
    return lambda: queue.submit(words(src), words(dst), words(length), flag, 1, stream)


A_BUFFER = np.zeros(64, dtype=np.uint64)
A = address(A_BUFFER)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (submit_one(0, A, 8, A + 8), "entry 0 of 1: source is null with a length of 8 bytes"),
        (submit_one(A, 0, 8, A + 8), "destination is null"),
        (submit_one(A, A + 64, 8, 0), "flag_address is null"),
        (submit_one(A, A + 64, 8, A + 12), "flag_address must be a multiple of 8"),
        (submit_one(A, A + 4, 8, A + 32), "must not overlap"),
        (submit_one(A, A + 64, 2**64 - 1, A + 32), "end of the address space"),
        (submit_one(A, A + 64, 8, A + 32, stream=0), "stream is for queues of a CUDA device"),
        (lambda: engine.CopyQueue().wait(1, 0), r"ticket must be one that submit\(\) .* got 1"),
        (lambda: engine.CopyQueue().wait(1, -1), "timeout_s must be 0 or more, got -1"),
        (lambda: engine.crc32c(0, 1), "address is null"),
        (lambda: engine.crc32c_portable(0, 1), "address is null"),
        (lambda: engine.memcpy(A, A + 1, 2), "must not overlap"),
        (lambda: engine.memcpy(A, 0, 2), "source is null"),
        (lambda: engine.load_u64(0), "address is null"),
        (lambda: engine.store_u64(A + 1, 0), "multiple of 8"),
        (lambda: engine.add_u64(A + 4, 0), "multiple of 8"),
        (lambda: engine.wait_u64_at_least(A + 1, 0, 0), "multiple of 8"),
        (lambda: engine.wait_u64_at_least(A, 0, 0, stop_address=A + 1), "stop_address must be a multiple of 8"),
        (lambda: engine.wait_u64_at_least(A, 0, float("nan")), "timeout_s"),
        (lambda: engine.prefault(0, 1), "address is null"),
    ],
)
def test_mistakes_are_refused_with_the_rule_and_the_value(call: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call()


def test_arrays_must_match_in_length_type_and_shape() -> None:
    queue, one, two = engine.CopyQueue(), words(A), words(A, A)
    with pytest.raises(ValueError, match="got 1, 2 and 1"):
        queue.submit(one, two, one, A, 1)
    with pytest.raises(ValueError, match="got 1, 1 and 2"):
        queue.submit(one, one, two, A, 1)
    with pytest.raises(TypeError, match="dst must be a numpy array of dtype uint64, got int64"):
        queue.submit(one, one.astype(np.int64), one, A, 1)
    with pytest.raises(ValueError, match="contiguous"):
        queue.submit(one, one, words(1, 2, 3, 4)[::4].repeat(1).reshape(1, 1), A, 1)
    with pytest.raises(ValueError, match="contiguous"):
        queue.submit(words(1, 2, 3, 4)[::2], two, two, A, 1)


def test_cuda_where_there_is_none_says_why() -> None:
    reason = engine.cuda_unavailable_reason()
    if reason is None:
        pytest.skip("there is a CUDA device here; see tests/gpu")
    assert re.search(r"CUDA", reason)
    for call in (lambda: engine.CopyQueue(0), lambda: engine.host_register(A, 8), lambda: engine.host_unregister(A)):
        with pytest.raises(RuntimeError, match="CUDA"):
            call()


# Checksum


@pytest.mark.parametrize("function", [engine.crc32c, engine.crc32c_portable])
@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, appendix B.4, and the customary check value
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_checksum_of_known_vectors(function: Callable[[int, int], int], data: bytes, expected: int) -> None:
    assert function(address(np.frombuffer(data, dtype=np.uint8)) if data else 0, len(data)) == expected


def test_checksum_agrees_with_the_portable_one_at_any_length_and_alignment() -> None:
    rng = np.random.default_rng(1)
    data = random_bytes(rng, 1 << 20)
    lengths = [*range(300), 767, 768, 769, 12095, 12096, 12097, *rng.integers(0, 100_000, 200).tolist(), 900_000]
    for length in lengths:
        begin, seed = address(data) + int(rng.integers(0, 64)), int(rng.integers(0, 2**32))
        assert engine.crc32c(begin, length, seed) == engine.crc32c_portable(begin, length, seed), (length, begin % 64)


def test_checksum_goes_on_from_a_seed_and_combines() -> None:
    rng = np.random.default_rng(2)
    data = random_bytes(rng, 200_000)
    whole = engine.crc32c(address(data), data.nbytes)
    for cut in [0, 1, data.nbytes, *rng.integers(0, data.nbytes, 50).tolist()]:
        first = engine.crc32c(address(data), cut)
        rest = engine.crc32c(address(data) + cut, data.nbytes - cut)
        assert engine.crc32c(address(data) + cut, data.nbytes - cut, seed=first) == whole
        assert engine.crc32c_combine(first, rest, data.nbytes - cut) == whole


def test_checksum_sees_every_single_flipped_bit() -> None:
    data = random_bytes(np.random.default_rng(3), 13_000)
    whole = engine.crc32c(address(data), data.nbytes)
    for byte in range(0, data.nbytes, 7):
        data[byte] ^= 1 << (byte % 8)
        assert engine.crc32c(address(data), data.nbytes) != whole
        data[byte] ^= 1 << (byte % 8)


# Words and ranges


def test_words_are_loaded_stored_and_added_to() -> None:
    word = words(5)
    assert engine.load_u64(address(word)) == 5
    engine.store_u64(address(word), 2**64 - 1)
    assert engine.add_u64(address(word), 3) == 2
    assert word[0] == 2


def test_adds_of_many_threads_are_all_counted() -> None:
    word = words(0)
    threads = [
        threading.Thread(target=lambda: [engine.add_u64(address(word), 1) for _ in range(5000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert word[0] == 20_000


def test_wait_answers_which_came_first() -> None:
    word, stop = words(5), words(0)
    assert engine.wait_u64_at_least(address(word), 5, 0) == 1
    assert engine.wait_u64_at_least(address(word), 6, 0) == 0
    assert engine.wait_u64_at_least(address(word), 6, 0, address(stop), 0) == 2
    assert engine.wait_u64_at_least(address(word), 5, 0, address(stop), 0) == 1  # what was waited for has happened
    begin = time.monotonic()
    assert engine.wait_u64_at_least(address(word), 6, 0.25, address(stop), 1) == 0
    assert 0.25 <= time.monotonic() - begin < PATIENCE_S


@pytest.mark.parametrize(("which", "answer"), [(0, 1), (1, 2)])
def test_wait_ends_when_another_thread_writes(which: int, answer: int) -> None:
    pair = words(0, 0)
    timer = threading.Timer(0.15, lambda: engine.store_u64(address(pair) + 8 * which, 3))
    timer.start()
    assert engine.wait_u64_at_least(address(pair), 3, PATIENCE_S, address(pair) + 8, 3) == answer
    timer.join()


def test_memcpy_copies() -> None:
    source = random_bytes(np.random.default_rng(4), 10_000)
    target = np.zeros(10_001, dtype=np.uint8)
    engine.memcpy(address(target), address(source), source.nbytes)
    assert bytes(target) == bytes(source) + b"\0"
    engine.memcpy(0, 0, 0)


def test_prefault_makes_pages_present_and_keeps_contents() -> None:
    shared = mmap.mmap(-1, 64 * mmap.PAGESIZE)
    shared[5] = 42
    view = np.frombuffer(shared, dtype=np.uint8)
    before = minor_faults()
    engine.prefault(address(view), view.nbytes)
    view[:: mmap.PAGESIZE] = 1
    assert minor_faults() - before < 64 + 200  # loose: other threads of the test run fault too
    assert view[5] == 42
    engine.prefault(address(view) + 3, 0)


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def test_prefault_of_memory_that_cannot_be_had_raises_instead_of_killing(tmp_path: Path) -> None:
    with open(tmp_path / "slot", "w+b") as file:
        file.truncate(16 * mmap.PAGESIZE)
        mapping = mmap.mmap(file.fileno(), 16 * mmap.PAGESIZE)
        file.truncate(mmap.PAGESIZE)  # as a full /dev/shm: mapped, but nothing behind it
        view = np.frombuffer(mapping, dtype=np.uint8)
        if not kernel_can_populate():
            pytest.skip("Linux before 5.14 has no way to ask for pages without risking SIGBUS")
        with pytest.raises(RuntimeError, match="Shared memory is full or its file shorter"):
            engine.prefault(address(view), view.nbytes)


def kernel_can_populate() -> bool:
    major, minor = (int(part) for part in os.uname().release.split(".")[:2])
    return (major, minor) >= (5, 14)
