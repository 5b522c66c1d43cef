"""The most memory that a process has had resident.

Of itself alone: what getrusage says is inherited from the process that started it.
"""

from pathlib import Path


def peak_memory_bytes() -> int | None:
    """Of this process so far; None where the system does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
