"""What this machine gives to this process. Reads the system, decides nothing."""

import os
from pathlib import Path

_CPU_FOLDER = Path("/sys/devices/system/cpu")
_CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def physical_cores() -> int:
    """Cores this process may use: its affinity mask without sibling threads, within the cgroup's quota."""
    allowed = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    )
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota_cores() or len(cores)))


def _siblings(cpu: int) -> str:
    """A name that all hardware threads of one core share; where the system is silent, the thread's number."""
    try:
        return (_CPU_FOLDER / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text("ascii").strip()
    except OSError:
        return str(cpu)


def _quota_cores() -> int | None:
    """Whole cores that the version 2 cgroup grants, or None without a limit."""
    try:
        quota, period = _CGROUP_QUOTA.read_text("ascii").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else max(1, int(quota) // int(period))
