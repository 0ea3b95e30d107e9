"""The sandbox of a child: it can read Python's libraries, compute, and use its open descriptors.

A child locks itself before it reads any foreign byte. Landlock limits the files that it can open,
and seccomp its system calls. Both need no privileges, apply to all threads and cannot be revoked.
Both require no_new_privs. Forbidden calls fail with EPERM.
"""

import ctypes
import os
import platform
import struct
import sys
import sysconfig
from pathlib import Path

_libc = ctypes.CDLL(None, use_errno=True)

# linux/prctl.h
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_NO_NEW_PRIVS = 38
PR_SET_VMA = 0x53564D41
# System calls, which have the same numbers on all machines.
LANDLOCK_CREATE_RULESET = 444
LANDLOCK_ADD_RULE = 445
LANDLOCK_RESTRICT_SELF = 446
# linux/landlock.h
LANDLOCK_CREATE_RULESET_VERSION = 1
LANDLOCK_RULE_PATH_BENEATH = 1
READ_FILE = 4
READ_DIR = 8
# The file access rights by the Landlock version that introduced them: those of version 1, refer,
# truncate, and ioctls on devices.
_FILE_RIGHTS = {1: (1 << 13) - 1, 2: 1 << 13, 3: 1 << 14, 5: 1 << 15}
# linux/seccomp.h
SECCOMP_SET_MODE_FILTER = 1
SECCOMP_FILTER_FLAG_TSYNC = 1
# linux/sched.h
CLONE_THREAD = 0x10000

# The folders and files from which the C library loads shared libraries.
_SYSTEM_LIBRARIES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/local/lib",
    "/etc/ld.so.cache",
)

# The files that Python's libraries read to compute.
_SYSTEM_FILES = (
    "/proc/self",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/sys/devices/system/cpu",
    "/dev/null",
    "/dev/urandom",
)


class NotAvailable(OSError):
    """This kernel does not support or does not permit the sandbox."""


def lock(readable: list[Path]) -> None:
    """Locks this process with all its present and future threads.

    The paths in ``readable``, and everything below them, stay readable.
    """
    _check_call(_libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _restrict_files(readable)
    _filter_calls()


def is_available() -> bool:
    """Returns True if this kernel supports Landlock, and this machine's filter is known."""
    return _landlock_version() > 0 and platform.machine() in _SYSTEM_CALLS


def library_paths() -> list[Path]:
    """Returns the paths of Python and of everything that it may still load.

    The current folder is not among them, although ``python -m`` puts it in ``sys.path``.
    """
    paths = {Path(path) for path in sys.path if path and Path(path).resolve() != Path.cwd()}
    paths |= {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    paths |= {Path(__file__).parent}
    paths |= {Path(path) for path in _SYSTEM_LIBRARIES + _SYSTEM_FILES}
    return sorted(path for path in paths if path.exists())


def die_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends. Exits if it has ended already."""
    _check_call(_libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def _check_call(result: int, name: str) -> int:
    """Returns the result of a C function. Raises NotAvailable if it reports an error."""
    if result < 0:
        number = ctypes.get_errno()
        raise NotAvailable(number, f"{name}: {os.strerror(number)}")
    return result


def _landlock_version() -> int:
    """Returns the version of the kernel's Landlock interface; not positive without Landlock."""
    return _libc.syscall(
        LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), LANDLOCK_CREATE_RULESET_VERSION
    )


def _restrict_files(readable: list[Path]) -> None:
    version = _check_call(_landlock_version(), "Landlock")
    rights = sum(bits for since, bits in _FILE_RIGHTS.items() if since <= version)
    # Binding and connecting TCP sockets; since version 4.
    network = 3 if version >= 4 else 0
    # Abstract Unix sockets, and signals to processes outside the sandbox; since version 6.
    scopes = 3 if version >= 6 else 0
    attributes = struct.pack("<QQQ", rights, network, scopes)
    attributes = attributes[: 8 if version < 4 else 16 if version < 6 else 24]
    size = ctypes.c_size_t(len(attributes))
    ruleset = _check_call(_libc.syscall(LANDLOCK_CREATE_RULESET, attributes, size, 0), "Landlock")
    try:
        for path in readable:
            _allow_reading(ruleset, path)
        _check_call(_libc.syscall(LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: Path) -> None:
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rights = READ_FILE | (READ_DIR if path.is_dir() else 0)
        rule = struct.pack("<Qi", rights, parent)
        result = _libc.syscall(LANDLOCK_ADD_RULE, ruleset, LANDLOCK_RULE_PATH_BENEATH, rule, 0)
        _check_call(result, f"Landlock for {path}")
    finally:
        os.close(parent)


# The system calls that computing needs: for memory, threads, time, open descriptors, and reading
# files, which Landlock limits. By machine: the AUDIT_ARCH value, and the kernel's numbers.
_SYSTEM_CALLS: dict[str, tuple[int, dict[str, int]]] = {
    "x86_64": (
        0xC000003E,
        {
            "read": 0, "write": 1, "open": 2, "close": 3, "stat": 4, "fstat": 5, "lstat": 6,
            "poll": 7, "lseek": 8, "mmap": 9, "mprotect": 10, "munmap": 11, "brk": 12,
            "rt_sigaction": 13, "rt_sigprocmask": 14, "rt_sigreturn": 15, "pread64": 17,
            "pwrite64": 18, "readv": 19, "writev": 20, "access": 21, "select": 23,
            "sched_yield": 24, "mremap": 25, "mincore": 27, "madvise": 28, "dup": 32,
            "nanosleep": 35, "getpid": 39, "recvfrom": 45, "sendto": 44, "recvmsg": 47,
            "sendmsg": 46, "clone": 56, "exit": 60, "uname": 63, "fcntl": 72, "getcwd": 79,
            "readlink": 89, "gettimeofday": 96, "getrlimit": 97, "getrusage": 98, "sysinfo": 99,
            "times": 100, "getuid": 102, "getgid": 104, "geteuid": 107, "getegid": 108,
            "getppid": 110, "sigaltstack": 131, "prctl": 157, "arch_prctl": 158, "gettid": 186,
            "time": 201, "futex": 202, "sched_getaffinity": 204, "getdents64": 217,
            "set_tid_address": 218, "restart_syscall": 219, "fadvise64": 221, "clock_gettime": 228,
            "clock_getres": 229, "clock_nanosleep": 230, "exit_group": 231, "tgkill": 234,
            "openat": 257, "newfstatat": 262, "readlinkat": 267, "faccessat": 269,
            "set_robust_list": 273, "get_robust_list": 274, "fallocate": 285, "eventfd2": 290,
            "dup3": 292, "pipe2": 293, "prlimit64": 302, "getcpu": 309, "getrandom": 318,
            "membarrier": 324, "statx": 332, "rseq": 334, "clone3": 435, "faccessat2": 439,
        },
    ),
    "aarch64": (
        0xC00000B7,
        {
            "getcwd": 17, "eventfd2": 19, "dup": 23, "dup3": 24, "fcntl": 25, "fallocate": 47,
            "faccessat": 48, "openat": 56, "close": 57, "pipe2": 59, "getdents64": 61, "lseek": 62,
            "read": 63, "write": 64, "readv": 65, "writev": 66, "pread64": 67, "pwrite64": 68,
            "ppoll": 73, "readlinkat": 78, "newfstatat": 79, "fstat": 80, "exit": 93,
            "exit_group": 94, "set_tid_address": 96, "futex": 98, "set_robust_list": 99,
            "get_robust_list": 100, "nanosleep": 101, "clock_gettime": 113, "clock_getres": 114,
            "clock_nanosleep": 115, "sched_getaffinity": 123, "sched_yield": 124,
            "restart_syscall": 128, "tgkill": 131, "sigaltstack": 132, "rt_sigaction": 134,
            "rt_sigprocmask": 135, "rt_sigreturn": 139, "times": 153, "uname": 160,
            "getrusage": 165, "prctl": 167, "getcpu": 168, "gettimeofday": 169, "getpid": 172,
            "getppid": 173, "getuid": 174, "geteuid": 175, "getgid": 176, "getegid": 177,
            "gettid": 178, "sysinfo": 179, "sendto": 206, "recvfrom": 207, "sendmsg": 211,
            "recvmsg": 212, "brk": 214, "munmap": 215, "mremap": 216, "clone": 220, "mmap": 222,
            "fadvise64": 223, "mprotect": 226, "mincore": 232, "madvise": 233, "prlimit64": 261,
            "getrandom": 278, "membarrier": 283, "statx": 291, "rseq": 293, "clone3": 435,
            "faccessat2": 439,
        },
    ),
}

# The allowed commands of fcntl: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC. Other commands
# can send signals to any process of the user (F_SETOWN, F_SETOWN_EX, F_SETSIG, F_SETLEASE,
# F_NOTIFY), or change files that the frontend has open too (F_SETFL).
_FCNTL_COMMANDS = (0, 1, 2, 3, 1030)

# The results of a seccomp filter: allow, fail with EPERM, kill the process, fail with ENOSYS.
_ALLOW = 0x7FFF0000
_DENY = 0x00050001
_KILL = 0x80000000
_NO_SUCH_CALL = 0x00050026
# The codes of BPF instructions: load a word, jump if equal, jump if any bit is set, return.
_LOAD = 0x20
_EQUAL = 0x15
_MASK = 0x45
_RETURN = 0x06
# Offsets in `struct seccomp_data`. The arguments' lower halves are checked.
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_SECOND_ARGUMENT = 24

# The system call `seccomp` by machine.
_SECCOMP = {"x86_64": 317, "aarch64": 277}


def _filter_calls() -> None:
    machine = platform.machine()
    if machine not in _SYSTEM_CALLS:
        raise NotAvailable(0, f"no filter of system calls for {machine}")
    program = b"".join(struct.pack("<HBBI", *instruction) for instruction in _program(os.getpid()))
    buffer = ctypes.create_string_buffer(program)
    filter_ = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(buffer))
    result = _libc.syscall(
        _SECCOMP[machine], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, filter_
    )
    _check_call(result, "seccomp")


def _program(own_pid: int) -> list[tuple[int, int, int, int]]:
    """Returns the filter as classic BPF instructions: code, jumps if true and if false, value."""
    architecture, calls = _SYSTEM_CALLS[platform.machine()]
    calls = dict(calls)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        # clone3 has its flags in memory, which a filter cannot read. After ENOSYS, glibc uses
        # clone.
        (_EQUAL, 0, 1, calls.pop("clone3")),
        (_RETURN, 0, 0, _NO_SUCH_CALL),
        # clone may create threads, but no processes.
        (_EQUAL, 0, 4, calls.pop("clone")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_MASK, 0, 1, CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # prctl may name threads and memory.
        (_EQUAL, 0, 5, calls.pop("prctl")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, PR_SET_NAME),
        (_EQUAL, 0, 1, PR_SET_VMA),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # tgkill may signal this process, as abort does. prlimit64 may use its own limits.
        (_EQUAL, 1, 0, calls.pop("tgkill")),
        (_EQUAL, 0, 5, calls.pop("prlimit64")),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_EQUAL, 0, 1, own_pid),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
        # fcntl may run commands on descriptors that send no signals.
        (_EQUAL, 0, len(_FCNTL_COMMANDS) + 3, calls.pop("fcntl")),
        (_LOAD, 0, 0, _SECOND_ARGUMENT),
        *(
            (_EQUAL, len(_FCNTL_COMMANDS) - index, 0, command)
            for index, command in enumerate(_FCNTL_COMMANDS)
        ),
        (_RETURN, 0, 0, _DENY),
        (_RETURN, 0, 0, _ALLOW),
    ]
    for number in sorted(calls.values()):
        program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _DENY)]
