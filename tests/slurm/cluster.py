"""A Slurm of one machine: munge, a database, slurmctld and four `slurmd -N`, in one folder.

    with Cluster(folder) as cluster:
        job = cluster.submit(script, folder)

It needs root and Debian's packages slurmctld, slurmd, slurm-client and munge; with slurmdbd and
mariadb-server it also has accounting.  Ports are free ones.  Everything it started ends with it.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
ACCOUNTING = ("slurmdbd", "mariadbd", "sacct", "sacctmgr")
COUNT = 4
PATIENCE_S = 600.0
"""How long nothing may change while something is awaited."""
OVER_S = 60.0
"""The same behind the end of a job."""
KILL_WAIT_S = 120
FREEZER = Path("/sys/fs/cgroup/freezer")
SLURM = """\
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/logs/slurmctld.log
SlurmdLogFile={folder}/logs/slurmd-%n.log
ProctrackType={proctrack}
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=0,batch_sched_delay=0
ReturnToService=2
JobRequeue=1
RequeueExitHold=93
KillWait={kill_wait}
FirstJobId={first_job}
MinJobAge=3600
SlurmctldTimeout=600
SlurmdTimeout=600
BatchStartTimeout=600
MessageTimeout=100
TCPTimeout=60
UnkillableStepTimeout=600
InactiveLimit=0
JobAcctGatherType=jobacct_gather/none
{accounting}
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes={every} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""
STORED = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port}
AccountingStoragePass={folder}/munge.socket
JobCompType=jobcomp/none"""
NOT_STORED = """\
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none"""
CGROUP = """\
CgroupPlugin=cgroup/v1
CgroupMountpoint=/sys/fs/cgroup
CgroupAutomount=no
ConstrainCores=no
ConstrainRAMSpace=no
ConstrainDevices=no
"""
DATABASE = """\
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
LogFile={folder}/logs/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={sql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
"""


def missing(*, accounts: bool = False) -> str:
    """Why no cluster can be started here; "": one can."""
    if os.geteuid() != 0:
        return "needs root: slurmd starts jobs of other users"
    wanted = (*NEEDED, *(ACCOUNTING if accounts else ()))
    lacking = [name for name in wanted if shutil.which(name) is None]
    if lacking:
        return (
            f"{', '.join(lacking)}: not installed; apt-get install slurmctld slurmd slurm-client "
            "munge (slurmdbd mariadb-server for accounting)"
        )
    return ""


class Cluster:
    """Four nodes with four cores each, as Slurm believes."""

    def __init__(self, folder: Path, *, accounts: bool = False) -> None:
        """`accounts`: with a database of all jobs, which takes a while to start."""
        self.folder = folder
        self.config = folder / "slurm.conf"
        self.accounts = accounts
        self.ends_steps = FREEZER.is_dir() and os.access(FREEZER, os.W_OK)
        """The end of a step ends every process in it (proctrack/cgroup), keepers too."""
        # Groups of processes have the names of nodes and jobs, and ports follow from jobs: two
        # clusters of one machine must not share them.
        self.nodes = tuple(f"p{os.getpid()}n{node}" for node in range(1, COUNT + 1))
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")},
            "SLURM_CONF": str(self.config),
        }

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def run(self, *command: str, folder: Path | None = None, check: bool = True) -> str:
        """The output of a command of Slurm."""
        done = subprocess.run(
            command, check=False, cwd=folder or self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{command}: {done.stdout}"
        return done.stdout

    def lose_node(self, name: str) -> None:
        """The machine is gone: slurmd and every process of its steps."""
        self._daemons[f"slurmd-{name}"].kill()
        self._daemons[f"slurmd-{name}"].wait()
        for pid in self._on_node(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=lost")

    def start_now(self, number: str) -> None:
        """A job that is queued again and would wait for a time.

        A node refuses a job that it ended in the same second ("Job credential revoked"), and Slurm
        then ends the job for good.
        """
        seen_s = float("inf")

        def started() -> bool:
            nonlocal seen_s
            state = self.run("squeue", "-h", "-t", "all", "-j", number, "-o", "%T").strip()
            if state == "PENDING":
                seen_s = min(seen_s, time.monotonic())
                if time.monotonic() < seen_s + 2.0:
                    return False
                self.run("scontrol", "update", f"jobid={number}", "starttime=now", check=False)
            return state == "RUNNING"

        wait(started, f"job {number} runs again", self.tale)

    def bring_back(self, name: str) -> None:
        """A machine in its place."""
        self._start_node(name)
        self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        wait(lambda: name in self._idle(), f"node {name} came back", self.tale)

    def tale(self) -> str:
        """The ends of all logs."""
        files = sorted((self.folder / "logs").glob("*.log"))
        return "".join(f"\n--- {x.name}\n{x.read_text(errors='replace')[-800:]}" for x in files)

    def _start(self) -> None:
        for name in ("state", "logs", *(f"spool/{node}" for node in self.nodes)):
            (self.folder / name).mkdir(parents=True)
        controller, database, sql, *nodes = free_ports(3 + COUNT)
        host = socket.gethostname().partition(".")[0]
        self._start_munge()
        if self.accounts:
            self._start_accounting(database, sql)
        stored = STORED.format(port=database, folder=self.folder)
        listed = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 "
            "RealMemory=4000 State=UNKNOWN"
            for name, port in zip(self.nodes, nodes, strict=True)
        )
        proctrack = "proctrack/cgroup" if self.ends_steps else "proctrack/linuxproc"
        self.config.write_text(
            SLURM.format(
                host=host, controller=controller, folder=self.folder,
                accounting=stored if self.accounts else NOT_STORED,
                nodes=listed, every=",".join(self.nodes), proctrack=proctrack,
                kill_wait=KILL_WAIT_S,
                first_job=1000 + os.getpid() % 50_000,
            )
        )  # fmt: skip
        (self.folder / "cgroup.conf").write_text(CGROUP)
        if self.accounts:
            self.run("sacctmgr", "-i", "add", "cluster", "one", check=False)
        self._start_daemon("slurmctld", "slurmctld", "-D", "-f", str(self.config))
        for name in self.nodes:
            self._start_node(name)
        wait(lambda: len(self._idle()) == COUNT, "all nodes are idle", self.tale)

    def _start_node(self, name: str) -> None:
        self._start_daemon(f"slurmd-{name}", "slurmd", "-D", "-N", name, "-f", str(self.config))

    def _start_munge(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {
            "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "logs/munge.log",
            "seed-file": "munge.seed",
        }  # fmt: skip
        self._start_daemon(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}",
            *(f"--{option}={self.folder / name}" for option, name in files.items()),
        )  # fmt: skip
        wait((self.folder / "munge.socket").exists, "munged listens", self.tale)

    def _start_accounting(self, port: int, sql: int) -> None:
        data, pipe = self.folder / "sql", self.folder / "sql.socket"
        self.run(
            "mariadb-install-db", "--no-defaults", f"--datadir={data}", "--user=root",
            "--auth-root-authentication-method=normal", "--skip-test-db",
        )  # fmt: skip
        self._start_daemon(
            "mariadbd", "mariadbd", "--no-defaults", f"--datadir={data}", f"--socket={pipe}",
            f"--port={sql}", "--bind-address=127.0.0.1", "--user=root", "--skip-name-resolve",
            f"--pid-file={self.folder}/sql.pid", "--innodb-buffer-pool-size=64M",
            "--innodb-lock-wait-timeout=900",
        )  # fmt: skip
        wait(pipe.exists, "the database listens", self.tale)
        self.run(
            "mariadb", "--no-defaults", f"--socket={pipe}", "--user=root", "--execute",
            "CREATE USER slurm@'%' IDENTIFIED BY 'slurm'; GRANT ALL ON *.* TO slurm@'%';",
        )  # fmt: skip
        config = self.folder / "slurmdbd.conf"
        config.write_text(DATABASE.format(port=port, folder=self.folder, sql=sql))
        config.chmod(0o600)
        self._start_daemon("slurmdbd", "slurmdbd", "-D")
        wait(lambda: _listens(port), "slurmdbd listens", self.tale)

    def _start_daemon(self, name: str, *command: str) -> None:
        """It ends with this process, however that ends."""
        with (self.folder / "logs" / f"{name}.out").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                ("setpriv", "--pdeathsig", "KILL", *command), cwd=self.folder,
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _stop(self) -> None:
        for name in ("slurmctld", *(f"slurmd-{node}" for node in self.nodes)):
            self._end_daemon(name)
        deadline = time.monotonic() + PATIENCE_S
        while (left := list(self._ours())) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for name in ("slurmdbd", "mariadbd", "munged"):
            self._end_daemon(name)
        if self.ends_steps:
            _remove_cgroups(self.nodes)

    def _end_daemon(self, name: str) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.terminate()
        try:
            daemon.wait(timeout=20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _idle(self) -> set[str]:
        return set(self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False).split())

    def _ours(self) -> Iterator[int]:
        """Steps, jobs and keepers of this cluster: its configuration is in their environment."""
        keep = {os.getpid(), *(daemon.pid for daemon in self._daemons.values())}
        told = os.fsencode(f"SLURM_CONF={self.config}")
        yield from (pid for pid in _told(told) if pid not in keep)

    def _on_node(self, name: str) -> set[int]:
        """All of its steps: processes, and the slurmstepd above each."""
        tasks = set(_told(os.fsencode(f"SLURMD_NODENAME={name}"))) & set(self._ours())
        return tasks | {pid for task in tasks for pid in _stepd_above(task)}


def _stepd_above(pid: int) -> Iterator[int]:
    """The slurmstepd that started this process, if it is its child."""
    with contextlib.suppress(OSError):
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if Path(f"/proc/{parent}/comm").read_text().strip() == "slurmstepd":
            yield parent


def _told(variable: bytes) -> Iterator[int]:
    """Processes that have this variable."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                if variable in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                    yield int(name)


def _remove_cgroups(nodes: Iterable[str]) -> None:
    for node in nodes:
        for path in sorted(FREEZER.glob(f"slurm_{node}/**/"), reverse=True):
            with contextlib.suppress(OSError):
                path.rmdir()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody has."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [probe.getsockname()[1] for probe in probes]


def wait(
    done: Callable[[], object],
    what: str,
    tale: Callable[[], str],
    progress: Callable[[], object] = lambda: None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Until something has happened; as long as `progress` changes, a slow machine has its time.

    Raises AssertionError with the tale where nothing changes for PATIENCE_S, or where nothing can
    change any more.
    """
    last, since = progress(), time.monotonic()
    while not done():
        if (now := progress()) != last:
            last, since = now, time.monotonic()
        quiet_s = time.monotonic() - since
        hopeless = quiet_s > OVER_S and is_over()
        assert not hopeless, f"the job is over: {what}\n{tale()}"
        assert quiet_s < PATIENCE_S, f"{quiet_s:.0f} s idle: {what}\n{tale()}"
        time.sleep(0.1)
