"""A real Slurm of several nodes on one machine: munged, slurmctld, and a slurmd for each node in namespaces of its own.

A node is a process in its own mount, host name, IPC, network and process namespaces (node_init.sh); a virtual cable leads from its
eth0 to a bridge in the controller's network namespace. Nothing is added to the machine's own network, to /etc or to /run, so that
several clusters run side by side, each in a folder of its own and all with the same addresses. Files are shared by all nodes, as on a
network file system; /dev/shm is the node's own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from recorded import Recorded, start_time

HERE = Path(__file__).resolve().parent
#: Those of a node, and what is done in them.
_NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child")
_PROBE = (
    "mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs tmpfs /mnt && hostname probe && "
    "ip link add br0 type bridge && ip link add one type veth peer name other"
)
PROGRAMS = ("slurmctld", "slurmd", "sinfo", "munged", "mungekey", "nsenter", "unshare", "ip")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2"
#: munged's socket is in the folder, and a socket's path may have 107 bytes.
_FOLDER_CHARS_MAX = 80
_BOOT_TIMEOUT_S = 5.0
_UP_TIMEOUT_S = 30.0
_POLL_S = 0.02


class LabError(Exception):
    """What the person at the keyboard can mend."""


@dataclass(frozen=True)
class Settings:
    """The cluster's shape. Each node claims `cpus` CPUs, which may be more than the machine has, and pretends to have `gpus` GPUs."""

    nodes: int = 4  # n1, n2, …
    cpus: int = 4
    gpus: int = 0
    network: str = "10.77.0"  # the controller is .1, nK is .(10 + K)
    slurmd_timeout_s: int = 6  # with the next one: a dead node is DOWN after 10 to 13 s
    message_timeout_s: int = 3

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 200:
            raise LabError(f"a cluster has 1 to 200 nodes here, got {self.nodes}")


def missing() -> str:
    """Why no cluster can run here, in words; empty if one can."""
    if os.geteuid() != 0:
        return "a Slurm lab needs root, for namespaces"
    absent = [name for name in PROGRAMS if _which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}; Debian, Ubuntu: apt-get install --no-install-recommends {PACKAGES}"
    tried = subprocess.run(["unshare", *_NAMESPACES, "bash", "-c", _PROBE], capture_output=True, text=True, check=False)
    if tried.returncode != 0:  # a container's root may lack the rights
        return f"namespaces, mounts or virtual cables are not allowed here: {tried.stderr.strip() or 'unshare failed'}"
    return ""


def _which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Lab:
    """The cluster of one folder. It outlives this object, and is found again by its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self.pids = Recorded(self.folder / "pids")
        self._children: list[subprocess.Popen[bytes]] = []  # kept so that Python does not warn of them

    # ---- the cluster

    def start(self, settings: Settings, owner: int | None = None) -> float:
        """Start it; returns the seconds until every node was idle.

        Args:
            settings: its shape.
            owner: a process with whose end the cluster ends too, however that ends.

        Raises:
            LabError: something is missing, or a node did not come up.
        """
        began = time.monotonic()
        if reason := missing():
            raise LabError(reason)
        if len(str(self.folder)) > _FOLDER_CHARS_MAX:
            raise LabError(f"the folder of a cluster has at most {_FOLDER_CHARS_MAX} characters (a socket lies in it), got {self.folder}")
        if self.pids.pid("ctl") is not None:
            raise LabError(f"a cluster runs in {self.folder}: stop it first, or give another --dir")
        self._write_files(settings)
        self._spawn("munged", *self._munged())
        self._start_controller_node()
        self._wait("munged's socket", lambda: stat.S_ISSOCK(_mode(self.folder / "munge" / "socket")))
        self.start_slurmctld()
        for node in self.nodes():
            self.boot(node)
        if owner is not None:
            self._spawn("watchdog", sys.executable, str(HERE), "--dir", str(self.folder), "watch", str(owner))
        self._wait("idle nodes", lambda: self._count_idle() == settings.nodes, _UP_TIMEOUT_S)
        return time.monotonic() - began

    def stop(self, clean: bool = False) -> None:
        """End every process of the cluster, each by its recorded pid and start time; `clean` removes the folder too."""
        if (self.folder / "pids").is_dir():
            self.pids.end("watchdog")
            for node in self.nodes():  # all at once: the kernel ends all of a process namespace with its process 1
                if (pid := self.pids.pid(node)) is not None:
                    os.kill(pid, signal.SIGKILL)
            for node in self.nodes():
                self.pids.end(node)
            self.pids.end("slurmctld", signal.SIGTERM, 1.0)  # without nodes it may dawdle, and nothing of it is kept
            self.pids.end("ctl")
            self.pids.end("munged", signal.SIGTERM, 1.0)
        for child in self._children:
            child.wait()
        self._children.clear()
        if clean:
            shutil.rmtree(self.folder, ignore_errors=True)

    def watch(self, owner: int) -> None:
        """Be the watchdog: when its owner has ended, stop the cluster and leave nothing of it."""
        began = start_time(owner)
        while start_time(owner) == began and self.pids.pid("ctl") is not None:
            time.sleep(1.0)
        self.pids.forget("watchdog")  # else stopping would end this process first
        self.stop(clean=True)

    def settings(self) -> Settings:
        """What it was started with.

        Raises:
            LabError: no cluster was.
        """
        try:
            return Settings(**json.loads((self.folder / "lab.json").read_text()))
        except FileNotFoundError:
            raise LabError(f"no cluster was started in {self.folder}: start one, or give its --dir") from None

    def nodes(self) -> list[str]:
        """Their names."""
        return [f"n{k}" for k in range(1, self.settings().nodes + 1)]

    def run(self, *command: str, check: bool = True, timeout_s: float = 60.0) -> str:
        """Run a command as on the login node; returns what it wrote.

        Raises:
            subprocess.CalledProcessError: it failed, and `check` is set.
        """
        done = subprocess.run(self.login(*command), capture_output=True, text=True, timeout=timeout_s, check=False)
        if check and done.returncode:
            raise LabError(f"{' '.join(command)} ended with code {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def login(self, *command: str) -> list[str]:
        """The command line that runs a command on the login node (which is the controller's)."""
        return ["nsenter", "-t", str(self._alive("ctl")), "-n", "-u", "-m", f"--wdns={os.getcwd()}", "--", *command]

    def state(self, node: str) -> str:
        """A node's state as Slurm has it, such as IDLE or DOWN*."""
        text = self.run("scontrol", "-o", "show", "node", node)
        return text.split(" State=", 1)[1].split()[0]

    def start_slurmctld(self) -> None:
        """Start the controller's daemon (again); it finds its jobs in its state folder."""
        first = [] if any((self.folder / "state").iterdir()) else ["-c"]
        self._spawn("slurmctld", *self.login("slurmctld", "-D", *first))

    def kill_slurmctld(self) -> None:
        """As when its host goes down."""
        self.pids.end("slurmctld")

    # ---- what happens to nodes

    def boot(self, node: str) -> None:
        """Power on: namespaces, a cable to the switch, and a slurmd."""
        self._require_known(node)
        if self.pids.pid(node) is not None:
            raise LabError(f"node {node} is running: crash it or cut its power first")
        booted = self.folder / "pids" / f"{node}.booted"
        booted.unlink(missing_ok=True)
        address = f"{self.settings().network}.{10 + int(node[1:])}"
        self._spawn("", "unshare", *_NAMESPACES, "bash", str(HERE / "node_init.sh"), node, address, str(self.folder), log=f"init-{node}")
        self._wait(f"node {node}", booted.is_file)
        pid = int(booted.read_text())
        self.pids.save(node, pid)
        self.run("ip", "link", "del", f"sw-{node}", check=False)
        self._in_network("ip", "link", "add", f"sw-{node}", "type", "veth", "peer", "name", "eth0", "netns", str(pid))
        self._in_network("ip", "link", "set", f"sw-{node}", "master", "br0", "up")

    def crash(self, node: str) -> None:
        """Everything on it ends at once and its cable stays in: peers see their connections end."""
        self._alive(node)
        self.pids.end(node)

    def poweroff(self, node: str) -> None:
        """The same, seen from outside as silence."""
        self._alive(node)
        self.unplug(node)
        self.pids.end(node)

    def unplug(self, node: str) -> None:
        """Pull its cable: packets vanish, what runs on it goes on."""
        self._in_network("ip", "link", "set", f"sw-{node}", "down")

    def plug(self, node: str) -> None:
        """Put it back."""
        self._in_network("ip", "link", "set", f"sw-{node}", "up")

    def kill_slurmd(self, node: str) -> None:
        """Only the daemon; its slurmstepds and the tasks go on."""
        for pid in self.processes(node):
            if _name(pid) == "slurmd":
                os.kill(pid, signal.SIGKILL)

    def start_slurmd(self, node: str) -> None:
        """The daemon again."""
        self._spawn("", "nsenter", "-t", str(self._alive(node)), "-a", "--wdns=/", "--", "slurmd", "-D", "-N", node, log=f"init-{node}")

    def freeze(self, node: str) -> None:
        """Stop everything on it."""
        for pid in self.processes(node):
            os.kill(pid, signal.SIGSTOP)

    def thaw(self, node: str) -> None:
        """Let it go on."""
        for pid in self.processes(node):
            os.kill(pid, signal.SIGCONT)

    def processes(self, node: str) -> list[int]:
        """Everything that runs on it, by the pids that this machine knows."""
        inside = os.readlink(f"/proc/{self._alive(node)}/ns/pid")
        return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _namespace(p) == inside]

    def on(self, node: str, *command: str) -> list[str]:
        """The command line that runs a command on a node."""
        return ["nsenter", "-t", str(self._alive(node)), "-a", f"--wdns={os.getcwd()}", "--", *command]

    # ---- parts

    def _write_files(self, settings: Settings) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("etc", "log", "munge", "pids", "state", *(f"spool/n{k}" for k in range(1, settings.nodes + 1))):
            (self.folder / name).mkdir(parents=True)
        for path in (self.folder, *(p for p in self.folder.rglob("*") if p.is_dir())):
            path.chmod(0o755)  # munge wants every user to reach its socket
        (self.folder / "state").chmod(0o700)
        (self.folder / "lab.json").write_text(json.dumps(asdict(settings)))
        etc = self.folder / "etc"
        gpus = ""
        if settings.gpus:
            (self.folder / "gpu").mkdir()
            for k in range(settings.gpus):
                os.mknod(self.folder / "gpu" / f"gpu{k}", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # /dev/null by another name
            gpus = f"Gres=gpu:{settings.gpus} "
            (etc / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu/gpu[0-{settings.gpus - 1}]\n")
        addresses = {f"n{k}": f"{settings.network}.{10 + k}" for k in range(1, settings.nodes + 1)}
        hosts = ["127.0.0.1 localhost", f"{settings.network}.1 ctl", *(f"{address} {name}" for name, address in addresses.items())]
        (etc / "hosts").write_text("\n".join(hosts) + "\n")
        # It is not used, but looked for: 22.05 wants a cgroup mount unless it is told this; "disabled" is of 23.11 and later.
        (etc / "cgroup.conf").write_text(f"CgroupPlugin={'disabled' if _slurm_version() >= (23, 11) else 'cgroup/v1'}\n")
        text = (HERE / "slurm.conf.in").read_text().format(folder=self.folder, **asdict(settings))
        shape = f"CPUs={settings.cpus} RealMemory=4000 {gpus}State=UNKNOWN"
        lines = [f"NodeName={name} NodeAddr={address} {shape}" for name, address in addresses.items()]
        (etc / "slurm.conf").write_text(text + "\n".join(lines) + "\n")

    def _munged(self) -> list[str]:
        """One serves all nodes: its socket is a file, and files are shared."""
        munge = self.folder / "munge"
        key = munge / "key"
        subprocess.run([_which("mungekey") or "mungekey", "-c", "-k", str(key)], check=True)
        files = {"key-file": key, "socket": munge / "socket", "pid-file": munge / "pid", "seed-file": munge / "seed"}
        return ["munged", "-F", f"--log-file={self.folder}/log/munged.log", *(f"--{name}={path}" for name, path in files.items())]

    def _start_controller_node(self) -> None:
        ready, network = self.folder / "pids" / "ctl.ready", self.settings().network
        script = (
            f"mount --make-rprivate /; mount --bind {self.folder}/etc/hosts /etc/hosts; mount --bind {self.folder}/etc /etc/slurm; "
            f"hostname ctl; ip link set lo up; ip link add br0 type bridge; ip addr add {network}.1/24 dev br0; ip link set br0 up; "
            f": > {ready}; exec sleep infinity"
        )
        self._spawn("ctl", "unshare", "--mount", "--uts", "--net", "bash", "-c", script)
        self._wait("the controller's namespaces", ready.is_file)

    def _spawn(self, name: str, *command: str, log: str = "") -> None:
        """A process that goes on when this one ends; found again by `name`, if it has one."""
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        with open(self.folder / "log" / f"{log or name}.out", "ab") as out:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/", env={**os.environ, "PATH": path}
            )
        self._children.append(child)
        if name:
            self.pids.save(name, child.pid)

    def _in_network(self, *command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._alive("ctl")), "-n", "--", *command], check=True, capture_output=True)

    def _alive(self, name: str) -> int:
        pid = self.pids.pid(name)
        if pid is None:
            what = f"no cluster runs in {self.folder}: start one, or give its --dir" if name == "ctl" else f"node {name} is not running"
            raise LabError(what)
        return pid

    def _require_known(self, node: str) -> None:
        if node not in self.nodes():
            raise LabError(f"there is no node {node!r}; nodes: {' '.join(self.nodes())}")

    def _count_idle(self) -> int:
        return self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split().count("idle")

    def _wait(self, what: str, there: Callable[[], bool], timeout_s: float = _BOOT_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not there():
            if time.monotonic() > deadline:
                self.stop()
                tails = "\n".join(f"{p.name}: {_end_of(p)}" for p in sorted((self.folder / "log").iterdir()))
                raise LabError(f"{what} did not come within {timeout_s:g} s; the ends of the logs:\n{tails}")
            time.sleep(_POLL_S)


def _slurm_version() -> tuple[int, ...]:
    said = subprocess.run([_which("slurmctld") or "slurmctld", "-V"], capture_output=True, text=True, check=True).stdout
    return tuple(int(part) for part in said.split()[-1].split(".")[:2])  # "slurm-wlm 22.05.8"


def _end_of(log: Path) -> str:
    return " / ".join(log.read_text(errors="replace").splitlines()[-3:])


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except OSError:
        return 0


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _namespace(process: Path) -> str:
    try:
        return os.readlink(process / "ns" / "pid")
    except OSError:
        return ""


ACTIONS: dict[str, Callable[[Lab, str], None]] = {
    "crash": Lab.crash,
    "poweroff": Lab.poweroff,
    "unplug": Lab.unplug,
    "plug": Lab.plug,
    "boot": Lab.boot,
    "kill-slurmd": Lab.kill_slurmd,
    "start-slurmd": Lab.start_slurmd,
    "freeze": Lab.freeze,
    "thaw": Lab.thaw,
}


def replace_process(command: Sequence[str]) -> None:
    """Become the command, so that its input, output and exit code are this process's."""
    os.execvp(command[0], list(command))
