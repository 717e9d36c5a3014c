"""Typical models on two machines, for a table of what hot-swap would cost there. Pure.

Nothing here was measured. Link speeds and peaks are those of data sheets, and of them a share is assumed to be reached; grids and
batches are our own choice, made so that a model fits into the GPUs' memory with room for activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from .job import Cluster, Job, Speeds
from .model import ModelShape, Split
from .shards import OptimizerKind

#: Assumed, not measured: what of a link's data-sheet speed a copy reaches, and what of a GPU's peak training reaches.
SHARE_OF_LINK = 0.7
SHARE_OF_PEAK = 0.4
#: CRC32C on one core with the processor's instruction for it, bytes a second; assumed, `deadpool plan --measure` measures it.
CHECKSUM = 8e9
SEQUENCE = 2048
VOCABULARY = 50_304  # GPT-2's 50257, padded to a multiple of 128
_GB = 1e9


@dataclass(frozen=True)
class Machine:
    """A node's figures, from data sheets."""

    name: str
    gpus: int  # a node
    device_memory_bytes: float
    d2h: float  # bytes a second, one direction, each GPU
    h2h: float  # bytes a second, one direction, each node
    peak_flops: float  # bf16, dense
    host_memory_bytes: int
    source: str


MACHINES = {
    "A100": Machine(
        "Perlmutter, A100",
        gpus=4,
        device_memory_bytes=40 * _GB,
        d2h=31.5 * _GB,
        h2h=4 * 25 * _GB,
        peak_flops=312e12,
        host_memory_bytes=int(256 * _GB),
        source=(
            "NERSC, Perlmutter architecture: 4 A100 (40 GB), 4 Slingshot 11 of 25 GB/s and 256 GB a node; PCIe 4.0 x16: 16 GT/s x 16 lanes "
            "x 128/130; NVIDIA, A100 data sheet: 312 TFLOP/s bf16"
        ),
    ),
    "GH200": Machine(
        "Vista, GH200",
        gpus=1,
        device_memory_bytes=96 * _GB,
        d2h=450 * _GB,
        h2h=50 * _GB,
        peak_flops=990e12,
        host_memory_bytes=int(120 * _GB),
        source=(
            "TACC, Vista: 1 GH200 (96 GB HBM3, 120 GB LPDDR5X) a node, NDR InfiniBand of 400 Gb/s; NVIDIA, GH200 data sheet: NVLink-C2C "
            "900 GB/s in both directions together, 990 TFLOP/s bf16 dense"
        ),
    ),
}


@dataclass(frozen=True)
class Model:
    """A GPT: 4 x hidden in the FFN, learned positions, tied embeddings."""

    name: str
    layers: int
    hidden: int
    heads: int
    batch: int  # sequences a step
    source: str


_GPT3 = "GPT-3 (Brown et al., 2020), table 2.1"
MODELS = (
    Model("0.6B", 28, 1280, 20, 512, "ours"),
    Model("1.3B", 24, 2048, 16, 512, f"{_GPT3}, with 16 heads of 128, as 24 of them are not 2048 wide"),
    Model("2.7B", 32, 2560, 32, 512, _GPT3),
    Model("6.7B", 32, 4096, 32, 1024, _GPT3),
    Model("13B", 40, 5120, 40, 1024, f"{_GPT3}, with a hidden size of 5120 instead of 5140"),
    Model("30B", 48, 7168, 56, 1024, "ours"),
    Model("65B", 80, 8192, 64, 1024, "ours"),
)

#: (machine, model) -> (TP, PP, DP): our own choice.
GRIDS = {
    ("A100", "0.6B"): (1, 1, 16),
    ("A100", "1.3B"): (1, 1, 32),
    ("A100", "2.7B"): (2, 1, 32),
    ("A100", "6.7B"): (4, 1, 32),
    ("A100", "13B"): (4, 2, 32),
    ("A100", "30B"): (4, 4, 32),
    ("A100", "65B"): (4, 8, 32),
    ("GH200", "0.6B"): (1, 1, 8),
    ("GH200", "1.3B"): (1, 1, 16),
    ("GH200", "2.7B"): (1, 1, 32),
    ("GH200", "6.7B"): (1, 2, 32),
    ("GH200", "13B"): (1, 4, 16),
    ("GH200", "30B"): (1, 8, 16),
    ("GH200", "65B"): (1, 16, 16),
}


def paper_job(machine: Machine, model: Model, grid: tuple[int, int, int]) -> Job:
    """The job of one line of the table."""
    tensor, pipeline, data = grid
    shape = ModelShape(
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        query_groups=model.heads,
        head_width=model.hidden // model.heads,
        ffn=4 * model.hidden,
        vocabulary=VOCABULARY + -VOCABULARY % (128 * tensor),
        positions=SEQUENCE,
    )
    cluster = Cluster(tensor * pipeline * data // machine.gpus, machine.gpus, host_memory_bytes=machine.host_memory_bytes)
    speeds = Speeds(
        d2h=SHARE_OF_LINK * machine.d2h,
        h2h=SHARE_OF_LINK * machine.h2h,
        checksum=CHECKSUM,
        flops_per_gpu=SHARE_OF_PEAK * machine.peak_flops,
    )
    optimizer = OptimizerKind(distributed=True, element_bytes=2)
    return Job(shape, Split(tensor, pipeline), optimizer, SEQUENCE, model.batch, cluster, speeds)


def paper_jobs() -> list[tuple[Machine, Model, Job]]:
    """All lines of the table."""
    models = {model.name: model for model in MODELS}
    return [(MACHINES[m], models[name], paper_job(MACHINES[m], models[name], grid)) for (m, name), grid in GRIDS.items()]
