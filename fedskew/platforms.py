"""Portable functions for what differs between Linux, macOS and Windows.

The engine's workers are forked on Linux only. macOS has `os.fork`, but Apple's libraries may abort in a forked process.
Windows has no fork. `fedskew federate` runs federations across machines. The processes that it starts need Unix
sockets, process groups and forks, so they do not run on Windows.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import site
import subprocess
import sys
import time
import warnings
from pathlib import Path

from fedskew.errors import UserError

CAN_FORK = sys.platform == "linux"
"""Whether the engine's workers may be forked. If not, they are spawned."""


def available_cores() -> int:
    """Return the number of cores that the system lets this process use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def usable_cores() -> int:
    """Return the number of available cores, at most OMP_NUM_THREADS."""
    cores = available_cores()
    limit = os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(limit)) if limit.isdecimal() and int(limit) else cores


def python_module(module: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs a module of fedskew in another process, and the environment for it.

    Without -P, files of the current folder, such as the user's random.py, would replace Python's modules. So would
    installed packages, such as the old `pathlib` of PyPI, if their folder were in PYTHONPATH. Hence fedskew's folder is
    added to PYTHONPATH only if it is not a folder of installed packages.
    """
    package = str(Path(__file__).parent.parent)
    is_among_packages = package in (*site.getsitepackages(), site.getusersitepackages())
    paths = [*([] if is_among_packages else [package]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return [sys.executable, "-P", "-m", module, *arguments], environment


def require_posix(action: str) -> None:
    """Refuse an action that needs Unix sockets, forks or process groups on a system without them."""
    if not hasattr(os, "fork"):
        raise UserError(f"{action} needs Linux or macOS; on Windows, use the Windows Subsystem for Linux (WSL)")


def fork() -> int:
    """Fork this process. The child must use no thread and no lock of the parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python warns if there are other threads
        return os.fork()


def kill(process: int) -> None:
    """End a process at once. Windows has no SIGKILL, but SIGTERM has the same effect there."""
    os.kill(process, getattr(signal, "SIGKILL", signal.SIGTERM))


def kill_group(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End a process and its process group at once. On Windows, its children keep running."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()


def is_alive(process: int) -> bool:
    """Return whether a process of this machine is running. On Windows, another user's process counts as ended.

    A zombie counts as running.
    """
    if os.name == "nt":  # os.kill(process, 0) would send Ctrl-C there
        return _is_alive_on_windows(process)
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def start_mark(process: int) -> str | None:
    """Return a text that no other process of this machine ever has. None if the process has ended, or without /proc.

    The text does not depend on the system's clock, which may be corrected while the process runs.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii", errors="replace").strip()
        own = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return f"{process} {own[19]} {boot}"  # `own` begins with field 3 of the file. Field 22 is the start after the boot


def parent_of(process: int) -> int:
    """Return the process id of a process's parent, or 0 if the process has ended or the system has no /proc."""
    try:
        status = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return int(status.rpartition(")")[2].split()[1])


def wait_for_end(*processes: int) -> None:
    """Wait until one of these processes of this machine has ended. On Linux, a zombie counts as ended."""
    watched = [process for process in processes if process > 1]  # 0 is an unknown parent, 1 the system's first process
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(process) for process in watched], [], [])
    else:
        while all(map(is_alive, watched)):
            time.sleep(1)


_SYNCHRONIZE = 0x00100000
"""In Windows, the right to wait for a process."""
_WAIT_TIMEOUT = 0x00000102
"""In Windows, the result of waiting for a process that still runs."""


def _is_alive_on_windows(process: int) -> bool:
    kernel: ctypes.CDLL = ctypes.windll.kernel32  # type: ignore[attr-defined]
    handle = kernel.OpenProcess(_SYNCHRONIZE, False, process)
    if not handle:
        return False
    try:
        return bool(kernel.WaitForSingleObject(handle, 0) == _WAIT_TIMEOUT)
    finally:
        kernel.CloseHandle(handle)


def peak_memory() -> int:
    """Return the peak memory of this process in bytes. 0 on Windows, where Python does not report it."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def wait_and_measure(process: subprocess.Popen[bytes]) -> float:
    """Wait for the end of a child process and return its CPU seconds. 0 on Windows, which does not report them."""
    if not hasattr(os, "wait4"):
        process.wait()
        return 0.0
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds(process: int) -> float:
    """Return the CPU seconds of a process so far. 0 if it has ended, or on systems other than Linux."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    # `fields` begins with field 3 of the file. Fields 14 and 15 are the clock ticks in user and in kernel mode.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
