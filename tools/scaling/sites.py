"""The machines of the study as their users see them.

We have none of these machines. What stands here is known from their public documentation as far as it is known at all, and every field
that a site may change is named in `to_check`; each can be replaced by a flag of `layout`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megatron.hotswap.sizing.job import Speeds
from megatron.hotswap.sizing.paper import CHECKSUM, MACHINES, SHARE_OF_LINK, SHARE_OF_PEAK, Machine

_GB = 1e9


@dataclass(frozen=True)
class Site:
    """What a batch script and a plan must know of a machine.

    Args:
        key: what `--machine` says.
        machine: data-sheet figures; None for CPUs, of which nothing is assumed.
        ranks_per_node: GPUs of a node (CPUs: processes).
        ask_for_gpus: whether sbatch and srun get --gpus-per-node; where Slurm does not manage the GPUs it must not.
        h2h_bytes_per_s: of the one interface that snapshots take, each direction, by its data sheet.
        to_check: what the site may do otherwise, a sentence each.
    """

    key: str
    title: str
    machine: Machine | None
    ranks_per_node: int
    ask_for_gpus: bool = False
    interface: str | None = None
    h2h_bytes_per_s: float | None = None
    time: str = ""  # of a point, as Slurm writes it; empty: worked out of its plan
    directives: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    python: str = "python"
    container: str = ""
    srun: str = ""
    megatron: str = ""  # more of Megatron's flags, for every point
    to_check: tuple[str, ...] = field(default=(), compare=False)

    @property
    def gpus_per_node(self) -> int:
        """What Slurm is asked for; 0: nothing."""
        return self.ranks_per_node if self.ask_for_gpus else 0

    @property
    def host_memory_bytes(self) -> int | None:
        """Of a node; None: not known."""
        return None if self.machine is None else self.machine.host_memory_bytes

    def speeds(self) -> Speeds:
        """As `deadpool plan --paper` assumes them, of data sheets; nothing for CPUs."""
        if self.machine is None:
            return Speeds()
        return Speeds(
            d2h=SHARE_OF_LINK * self.machine.d2h,
            h2h=SHARE_OF_LINK * (self.h2h_bytes_per_s or self.machine.h2h),
            checksum=CHECKSUM,
            flops_per_gpu=SHARE_OF_PEAK * self.machine.peak_flops,
        )


SITES = {
    site.key: site
    for site in (
        Site(
            "perlmutter",
            "Perlmutter (NERSC): 4 A100 and Slingshot a node",
            MACHINES["A100"],
            ranks_per_node=4,
            ask_for_gpus=True,
            interface="hsn0",
            h2h_bytes_per_s=25 * _GB,  # one of the node's four Slingshot interfaces: hot-swap's own transport takes one
            directives=("--constraint=gpu", "--qos=regular"),
            setup=("module load nccl", "source .venv/bin/activate", "export NCCL_SOCKET_IFNAME=hsn"),
            to_check=(
                "the account (--account): that of GPU time, which used to end in _g",
                "--constraint=gpu takes nodes with A100 of 40 and of 80 GB; gpu&hbm40g or gpu&hbm80g if the site still names them so",
                "--qos: regular, or debug for one small point",
                "module load nccl: a module that brings NCCL with its plug-in for Slingshot; the one of PyTorch's wheel falls back to TCP",
                "the names of the interfaces: hsn0 to hsn3 (ip -brief address, on a compute node)",
            ),
        ),
        Site(
            "vista",
            "Vista (TACC): 1 GH200 and InfiniBand a node, AArch64",
            MACHINES["GH200"],
            ranks_per_node=1,
            interface="ib0",
            directives=("--partition=gh", "--ntasks-per-node=1"),
            setup=("module load gcc cuda nccl python3", "source .venv/bin/activate", "export NCCL_SOCKET_IFNAME=ib0"),
            to_check=(
                "the account (--account), if you have more than one project",
                "--partition: gh, or gh-dev for one small point",
                "that Slurm does not manage the GPUs there, so that --gpus-per-node must be left out (else: --ask-for-gpus)",
                "that --ntasks-per-node is demanded at sbatch (else it does no harm: every node has one task)",
                "the modules' names, and that their Python is 3.12 or 3.13",
                "the name of the InfiniBand interface with an IP address (ip -brief address, on a compute node)",
                "wheels for AArch64: PyTorch with CUDA; what has none is built from source, or comes with a container (--container)",
            ),
        ),
        Site("cpu", "CPUs: to try the whole chain, on this machine or on CPU nodes", None, ranks_per_node=1, time="00:30:00"),
    )
}


def with_user(site: Site, **given: object) -> Site:
    """The site with what the user has said in the place of what stands here. None is not said; lists come after what is there, and a
    flag of sbatch that names the same option replaces it."""
    told = {name: value for name, value in given.items() if value is not None}
    directives = _merged(site.directives, tuple(told.pop("directives", ())))  # type: ignore[arg-type]
    return replace(site, directives=directives, **told)  # type: ignore[arg-type]


def _merged(known: tuple[str, ...], given: tuple[str, ...]) -> tuple[str, ...]:
    options = {flag.partition("=")[0] for flag in given}
    return (*(flag for flag in known if flag.partition("=")[0] not in options), *given)
