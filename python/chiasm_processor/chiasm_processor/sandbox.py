"""What a child may do from its first foreign byte on: read Python's libraries, compute, and talk over what it has open.

Landlock says which files it may open, seccomp which system calls there are for it. Both need no privilege, hold for all threads
and can't be taken back. Calls that are not allowed fail with EPERM. Without no_new_privs neither can be asked for.
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_NO_NEW_PRIVS, PR_SET_VMA = 1, 15, 38, 0x53564D41
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
# Rights over files by the version of Landlock that brought them: all there are, refer, truncate, devices.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC = 1, 1
CLONE_THREAD = 0x10000


class NotAvailable(OSError):
    """This kernel has no such lock, or gives it to nobody."""


def lock(libraries: list[Path]) -> None:
    """Locks this process, with all threads that it has and will have. ``libraries`` stay readable."""
    _call(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(libraries)
    _filter_calls()


def is_available() -> bool:
    """Whether this kernel has both locks."""
    return _landlock_version() > 0 and platform.machine() in _CALLS


def libraries() -> list[Path]:
    """Where Python and everything that it may still load is. The current folder is none, though ``python -m`` takes it for one."""
    paths = {Path(path) for path in sys.path if path and Path(path).resolve() != Path.cwd()}
    paths |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")} | {Path(__file__).parent}
    paths |= {Path(path) for path in ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")}
    paths |= {Path(path) for path in ("/proc/self", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu", "/dev/null", "/dev/urandom")}
    return sorted(path for path in paths if path.exists())


def die_with_parent(parent: int) -> None:
    _call(_libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def _call(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise NotAvailable(number, f"{what}: {os.strerror(number)}")
    return result


def _landlock_version() -> int:
    return _libc.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION)


def _restrict_files(readable: list[Path]) -> None:
    version = _call(_landlock_version(), "Landlock")
    rights = sum(bits for since, bits in _FILE_RIGHTS.items() if since <= version)
    # Since 4: TCP; since 6: abstract sockets and signals beyond this process's own.
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("<QQQ", rights, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    rules = _call(_libc.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0), "Landlock")
    try:
        for path in readable:
            below = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                allowed = READ_FILE | (READ_DIR if path.is_dir() else 0)
                rule = struct.pack("<Qi", allowed, below)
                _call(_libc.syscall(LANDLOCK_ADD_RULE, rules, LANDLOCK_RULE_PATH_BENEATH, rule, 0), f"Landlock for {path}")
            finally:
                os.close(below)
        _call(_libc.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "Landlock")
    finally:
        os.close(rules)


# Calls that computing takes: memory, threads, time, what is open, and reading files, which Landlock bounds. By machine, as the
# kernel numbers them.
_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6, "poll": 7, "lseek": 8, "mmap": 9,
            "mprotect": 10, "munmap": 11, "brk": 12, "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
            "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "select": 23, "sched_yield": 24, "mremap": 25, "mincore": 27, "madvise": 28,
            "dup": 32, "nanosleep": 35, "getpid": 39, "recvfrom": 45, "sendto": 44, "recvmsg": 47, "sendmsg": 46, "clone": 56,
            "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79, "readlink": 89, "gettimeofday": 96, "getrlimit": 97,
            "getrusage": 98, "sysinfo": 99, "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
            "getppid": 110, "sigaltstack": 131, "prctl": 157, "arch_prctl": 158, "gettid": 186, "time": 201, "futex": 202,
            "sched_getaffinity": 204, "getdents64": 217, "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221,
            "clock_gettime": 228, "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "tgkill": 234, "openat": 257,
            "newfstatat": 262, "readlinkat": 267, "faccessat": 269, "set_robust_list": 273, "get_robust_list": 274,
            "fallocate": 285, "eventfd2": 290, "dup3": 292, "pipe2": 293, "prlimit64": 302, "getcpu": 309, "getrandom": 318,
            "membarrier": 324, "statx": 332, "rseq": 334, "clone3": 435, "faccessat2": 439,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "getcwd": 17, "eventfd2": 19, "dup": 23, "dup3": 24, "fcntl": 25, "fallocate": 47, "faccessat": 48, "openat": 56,
            "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62, "read": 63, "write": 64, "readv": 65, "writev": 66,
            "pread64": 67, "pwrite64": 68, "ppoll": 73, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93, "exit_group": 94,
            "set_tid_address": 96, "futex": 98, "set_robust_list": 99, "get_robust_list": 100, "nanosleep": 101,
            "clock_gettime": 113, "clock_getres": 114, "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124,
            "restart_syscall": 128, "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134, "rt_sigprocmask": 135,
            "rt_sigreturn": 139, "times": 153, "uname": 160, "getrusage": 165, "prctl": 167, "getcpu": 168, "gettimeofday": 169,
            "getpid": 172, "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177, "gettid": 178,
            "sysinfo": 179, "sendto": 206, "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "brk": 214, "munmap": 215,
            "mremap": 216, "clone": 220, "mmap": 222, "fadvise64": 223, "mprotect": 226, "mincore": 232, "madvise": 233,
            "prlimit64": 261, "getrandom": 278, "membarrier": 283, "statx": 291, "rseq": 293, "clone3": 435, "faccessat2": 439,
        },
    ),
}

# The allowed commands of fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Others can send signals to any process of the user
# (F_SETOWN, F_SETOWN_EX, F_SETSIG, F_SETLEASE, F_NOTIFY), or change files that the frontend has open as well (F_SETFL).
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)

_ALLOW, _DENY, _KILL, _NO_SUCH_CALL = 0x7FFF0000, 0x00050001, 0x80000000, 0x00050026
_LOAD, _EQUAL, _MASK, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24


def _filter_calls() -> None:
    if platform.machine() not in _CALLS:
        raise NotAvailable(0, f"no filter of system calls for {platform.machine()}")
    program = b"".join(struct.pack("<HBBI", *instruction) for instruction in _program(os.getpid()))
    buffer = ctypes.create_string_buffer(program)
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    number = 317 if platform.machine() == "x86_64" else 277
    _call(_libc.syscall(number, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, filter_), "seccomp")


def _program(own_pid: int) -> list[tuple[int, int, int, int]]:
    """Instructions of classic BPF: code, jumps if true and if false, value."""
    architecture, calls = _CALLS[platform.machine()]
    calls = dict(calls)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # Its flags lie in memory, where no filter sees them; glibc then takes clone.
        (_EQUAL, 0, 1, calls.pop("clone3")),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        # Threads, no processes.
        (_EQUAL, 0, 4, calls.pop("clone")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_MASK, 0, 1, CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # Names for threads and for memory.
        (_EQUAL, 0, 5, calls.pop("prctl")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, PR_SET_NAME),
        (_EQUAL, 0, 1, PR_SET_VMA),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # Signals to itself, which is how a program ends that has found itself broken, and its own limits.
        (_EQUAL, 1, 0, calls.pop("tgkill")),
        (_EQUAL, 0, 5, calls.pop("prlimit64")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_EQUAL, 0, 1, own_pid),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # Commands for descriptors, none that send signals.
        (_EQUAL, 0, len(_FCNTL_COMMANDS) + 3, calls.pop("fcntl")),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        *((_EQUAL, len(_FCNTL_COMMANDS) - place, 0, command) for place, command in enumerate(_FCNTL_COMMANDS)),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in sorted(calls.values()):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _DENY)]
