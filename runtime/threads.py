"""Threads of the process: how many the numerics use, and how idle ones wait.

The trap this file avoids: between two parallel regions an OpenMP worker spins by default. If another process
wants the core that it spins on, the next region cannot start until the operating system has sorted that out:
on a busy machine with two cores a call of 0.1 ms then took 14 ms with two threads, against 0.1 ms with
sleeping workers. Libraries read the setting when they are loaded, so it must be in the environment before
torch is imported; afterwards there is no way to change it. This file imports no torch for that reason.
"""

import os
import sys
from pathlib import Path

from deepinfer.errors import UsageError

WAIT_POLICY = "OMP_WAIT_POLICY"
MAX_THREADS = 1024
_CPU_DIRECTORY = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")

_passive_in_time = False


def prefer_passive_waiting() -> None:
    """Asks for sleeping OpenMP workers unless the user has chosen; without effect once torch is loaded."""
    global _passive_in_time
    if "torch" in sys.modules:
        return
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    _passive_in_time = os.environ[WAIT_POLICY].upper() == "PASSIVE"


def waits_passively() -> bool:
    """Whether idle workers are known to sleep."""
    return _passive_in_time or os.environ.get(WAIT_POLICY, "").upper() == "PASSIVE"


def physical_cores(
    cpu_directory: Path = _CPU_DIRECTORY, cgroup_limit: Path = _CGROUP_LIMIT, allowed: set[int] | None = None
) -> int:
    """Cores this process may use: its affinity mask without sibling threads, within its cgroup's quota."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    cores = {_siblings(cpu_directory, cpu) for cpu in allowed}
    quota = _quota(cgroup_limit)
    return max(1, len(cores) if quota is None else min(len(cores), quota))


def checked_num_threads(num_threads: int | None) -> int:
    """The number of threads to use: the one given, or a thread per physical core. Raises UsageError."""
    if num_threads is None:
        return physical_cores()
    if (
        isinstance(num_threads, bool)
        or not isinstance(num_threads, int)
        or not 1 <= num_threads <= MAX_THREADS
    ):
        raise UsageError(
            f"{num_threads!r} is no number of threads",
            where="num_threads",
            action=f"allowed: 1 to {MAX_THREADS}",
        )
    return num_threads


def _siblings(cpu_directory: Path, cpu: int) -> str:
    """What a core's hardware threads have in common; the thread's own number if the system is silent."""
    try:
        return (cpu_directory / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota(cgroup_limit: Path) -> int | None:
    """Whole cores that the cgroup (version 2) grants; None without a limit."""
    try:
        quota, period = cgroup_limit.read_text().split()
        return max(1, int(quota) // int(period)) if quota != "max" else None
    except (OSError, ValueError, ZeroDivisionError):
        return None
