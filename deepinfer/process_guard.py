"""Runs one command and lets neither it nor anything that it starts outlive the process that asked for it.

Run by path with the leader of a new process group as itself, and with a pipe as standard input whose other
end only the asking process holds: when that end closes, whatever the reason, the whole group is killed. A
worker alone could arrange for its own end, but not for that of the compilers below it.

A program of its own that imports nothing of the project, so that it starts in a few milliseconds.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _kill_all_at_end_of_input() -> None:
    while os.read(0, 1):
        pass
    os.killpg(0, signal.SIGKILL)


def main(command: list[str]) -> int:
    """Run the command, end what it left running, and end as it ended: with its exit code or its signal."""
    assert os.getpgrp() == os.getpid(), "the guard must lead a process group"
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent)
    threading.Thread(target=_kill_all_at_end_of_input, daemon=True).start()
    code = child.wait()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.killpg(0, signal.SIGTERM)
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
