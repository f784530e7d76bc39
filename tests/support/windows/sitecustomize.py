"""Let fedskew see what Windows has, on any system. Python imports this file at its start if it is on PYTHONPATH.

Modules of fedskew get copies of `os`, `signal`, `sys` and others without what Windows lacks, and cannot import modules
that only POSIX systems have. `os.name` is "nt", and `sys.platform` is "win32". All other packages see the real system,
because they have their own ways for Windows. Child processes inherit PYTHONPATH, so it holds for them, too.
"""

from __future__ import annotations

import builtins
import errno
import importlib
import os
import select
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

POSIX_MODULES = {"fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"}

MISSING = {
    "os": """chown fchmod fchown fork forkpty getegid geteuid getgid getgroups getloadavg getpgid getpgrp getresuid
        getsid getuid killpg lchown memfd_create MFD_CLOEXEC mkfifo mknod nice O_CLOEXEC O_DIRECTORY O_NOFOLLOW
        O_NONBLOCK O_SYNC openpty pidfd_open pipe2 posix_fallocate posix_fadvise posix_spawn pread preadv pwrite pwritev
        register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile setgid setpgid setsid setuid statvfs
        sync sysconf tcgetpgrp ttyname uname wait wait3 wait4 waitid WNOHANG WIFEXITED WEXITSTATUS WIFSIGNALED
        WTERMSIG""",
    "signal": """SIGALRM SIGCHLD SIGCONT SIGHUP SIGKILL SIGPIPE SIGQUIT SIGSTOP SIGTSTP SIGUSR1 SIGUSR2 SIGWINCH
        SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt
        sigpending sigwait sigwaitinfo""",
    "socket": "AF_UNIX SCM_RIGHTS send_fds recv_fds",
    "select": "poll epoll kqueue devpoll",
    "mmap": "MAP_PRIVATE MAP_SHARED MAP_ANONYMOUS PROT_READ PROT_WRITE",
    "time": "tzset clock_gettime clock_settime pthread_getcpuclockid",
    "sys": "abiflags",
    "ctypes": "",
}


def refuse_folders(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Windows cannot open a folder", str(path))
    return os.open(path, flags, *arguments, **options)


def refuse_to_overwrite(source: Any, target: Any) -> None:
    if os.path.exists(target):
        raise FileExistsError(errno.EEXIST, "Windows does not rename a file to one that exists", str(target))
    os.rename(source, target)


open_elsewhere: set[str] = set()


def refuse_once(source: Any, target: Any) -> None:
    """Replace a file that exists at the second attempt, as if another process had read it during the first."""
    if os.path.exists(target) and str(target) not in open_elsewhere:
        open_elsewhere.add(str(target))
        raise PermissionError(errno.EACCES, "another process reads the file", str(target))
    os.replace(source, target)


def refuse_names(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to create a file or folder whose name Windows does not allow. All packages go through here."""
    if event not in ("open", "os.mkdir", "os.rename") or not isinstance(arguments[0], str):
        return
    if event == "open" and not (set(str(arguments[1])) & set("wax") or (arguments[2] or 0) & os.O_CREAT):
        return
    for name in os.path.relpath(arguments[1 if event == "os.rename" else 0]).split(os.sep):
        if set(name) & set('<>:"|?*\\') or (name.endswith((" ", ".")) and name.strip(".")):
            raise OSError(errno.EINVAL, "Windows does not allow this name", name)


def refuse_signal_zero(process: int, number: int) -> None:
    if number == 0:
        raise AssertionError("os.kill(process, 0) sends Ctrl-C on Windows")
    os.kill(process, number)


def select_sockets(*lists: Any) -> Any:
    import socket

    if not all(isinstance(item, socket.socket) for items in lists[:3] for item in items):
        raise OSError(errno.ENOTSOCK, "Windows can only wait for sockets")
    return select.select(*lists)


class Kernel32:
    """The calls of Windows that ask whether a process runs."""

    @staticmethod
    def OpenProcess(access: int, inherit: bool, process: int) -> int:
        return process if os.path.exists(f"/proc/{process}") else 0

    @staticmethod
    def WaitForSingleObject(handle: int, milliseconds: int) -> int:
        return 0x102 if os.path.exists(f"/proc/{handle}") else 0

    @staticmethod
    def CloseHandle(handle: int) -> int:
        return 1


REPLACED: dict[str, dict[str, Any]] = {
    "os": {"name": "nt", "open": refuse_folders, "rename": refuse_to_overwrite, "replace": refuse_once,
           "kill": refuse_signal_zero, "O_BINARY": 0},
    "sys": {"platform": "win32"},
    "select": {"select": select_sockets},
    "ctypes": {"windll": type("Windll", (), {"kernel32": Kernel32})},
}  # fmt: skip


class WindowsCopy(ModuleType):
    """A module without what Windows lacks. Everything else is read from, and written to, the real module."""

    def __getattr__(self, name: str) -> Any:  # called for all names, because the copy's dictionary is empty
        if name in MISSING[self.__name__].split():
            raise AttributeError(f"Windows has no {self.__name__}.{name}")
        replaced = REPLACED.get(self.__name__, {})
        return replaced[name] if name in replaced else getattr(sys.modules[self.__name__], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys.modules[self.__name__], name, value)


COPIES: dict[str, WindowsCopy] = {}
real_import: Callable[..., Any] = builtins.__import__


def import_as_on_windows(
    name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
) -> ModuleType:
    importer = (globals or {}).get("__name__") or ""
    if importer == "__main__":  # a module of fedskew that was started with `python -m`
        importer = getattr((globals or {}).get("__spec__"), "name", "")
    if importer.partition(".")[0] == "fedskew" and level == 0:
        if name in POSIX_MODULES:
            raise ModuleNotFoundError(f"Windows has no module {name!r}", name=name)
        if name in MISSING:
            importlib.import_module(name)
            return COPIES.setdefault(name, WindowsCopy(name))
    module: ModuleType = real_import(name, globals, locals, fromlist, level)
    return module


builtins.__import__ = import_as_on_windows
sys.addaudithook(refuse_names)
