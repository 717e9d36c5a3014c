"""agent/devices.py, with a module that answers as NVML does: there is no GPU here."""

import pytest
from fake_nvml import FakeNvml

from megatron.hotswap.agent import devices
from megatron.hotswap.agent.devices import FATAL_XIDS, Devices, Finding, NotWatched, load_nvml


def begun(nvml, visible=None):
    found = Devices(nvml, visible)
    found.begin()
    return found


def test_healthy_gpus_have_nothing_to_say():
    nvml = FakeNvml()
    nvml.errors["ecc", 1] = nvml.NVML_ERROR_NOT_SUPPORTED
    found = Devices(nvml, None)
    assert found.begin() == "2 GPUs are watched by NVML"
    assert found.look(0.0) == found.look(0.0) == []


@pytest.mark.parametrize("xid", [13, 31, 43, 45, 63, 74, 94, 109])
def test_xids_of_applications_are_warnings(xid):
    nvml = FakeNvml()
    watched = begun(nvml)
    nvml.xids = [(1, xid)]
    assert watched.look(0.0) == [Finding(f"GPU 1: Xid {xid}, which says nothing against the device by itself", False)]


@pytest.mark.parametrize("xid", sorted(FATAL_XIDS))
def test_xids_whose_answer_is_a_reset_are_fatal(xid):
    nvml = FakeNvml()
    watched = begun(nvml)
    nvml.xids = [(0, 13), (1, xid)]
    assert [f.fatal for f in watched.look(0.0)] == [False, True]


def test_an_xid_of_a_gpu_that_does_not_answer_any_more():
    nvml = FakeNvml()
    watched = begun(nvml)
    nvml.xids, nvml.errors = [(1, 79)], {("uuid", 1): 15, ("ecc", 1): 15}
    assert watched.look(0.0) == [
        Finding("a GPU that does not tell its name: Xid 79, the GPU has fallen off the bus", True),
        Finding("GPU 1 is lost: it has fallen off the bus, or cannot be reached", True),
    ]


def test_memory_errors_count_from_the_start_of_the_agent():
    nvml = FakeNvml()
    watched = begun(nvml)
    assert watched.look(0.0) == []
    nvml.ecc[0] += 1
    assert watched.look(0.0) == watched.look(0.0) == [Finding("GPU 0: uncorrectable memory errors since this agent began", True)]


def test_rows_and_resets_and_heat(monkeypatch):
    nvml = FakeNvml(4)
    watched = begun(nvml)
    nvml.rows[0], nvml.rows[1] = (0, 1, 0, 1), (0, 1, 1, 0)
    nvml.errors["rows", 2] = nvml.NVML_ERROR_RESET_REQUIRED
    nvml.clocks[3] = 0x40
    assert watched.look(0.0) == [
        Finding("GPU 0: a memory row could not be remapped, the GPU has to be replaced", True),
        Finding("GPU 1: a memory row is to be remapped at the next reset of the GPU", False),
        Finding("GPU 2 must be reset before it can be used again", True),
        Finding("GPU 3 has slowed down because it is too hot", False),
    ]
    assert [f.reason for f in watched.look(0.0) if not f.fatal] == []  # not again and again


@pytest.mark.parametrize(
    ("visible", "watched"),
    [(None, 4), (["1"], 1), (["GPU-2", "GPU-3"], 2), (["MIG-7"], 4), (["9"], 4), ([], 0)],
)
def test_the_gpus_that_cuda_may_use_are_watched(visible, watched):
    assert Devices(FakeNvml(4), visible).begin() == f"{watched} GPUs are watched by NVML"


def test_a_gpu_without_events_is_said_and_asked_all_the_same():
    nvml = FakeNvml()
    nvml.errors["register", 1] = nvml.NVML_ERROR_NOT_SUPPORTED
    found = Devices(nvml, None)
    assert found.begin() == "2 GPUs are watched by NVML; without Xid events of GPU 1"


def test_no_driver_is_nothing_to_say_and_the_rest_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "_DRIVER", (tmp_path / "none",))
    with pytest.raises(NotWatched, match=r"^$"):
        load_nvml()
    monkeypatch.setattr(devices, "_DRIVER", (tmp_path,))
    monkeypatch.setattr(devices.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError("no module named pynvml")))
    with pytest.raises(NotWatched, match="no module named pynvml; install nvidia-ml-py"):
        load_nvml()
    nvml = FakeNvml()
    nvml.errors["init", 0] = 9
    with pytest.raises(NotWatched, match="GPUs are not watched: NVML says: NVML error 9"):
        Devices(nvml, None).begin()
