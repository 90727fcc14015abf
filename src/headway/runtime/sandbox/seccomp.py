"""System calls that the kernel refuses in the sandbox, as a filter for ``bwrap --seccomp``.

Namespaces do not cover everything: memory that belongs to no process (memfd, System V, shared anonymous mappings,
buffers of TCP), kernel interfaces with a history of holes (io_uring, BPF, keyrings), other kinds of sockets (vsock
reaches a virtual machine's host).
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterator

from headway.errors import ConfigError

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine for which the filter is known → its number in the kernel."""
X32 = 0x40000000
"""First number of x86-64's other set of system calls."""
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # control of other processes, and access to their resources; memory of the same call's is open in /proc anyway
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # memory that belongs to no process
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    # mounts and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # keys, which are the user's and no namespace's
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # large interfaces that no such code needs
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "fanotify_init": (300, 262),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # the machine
    "syslog": (103, 116),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "vhangup": (153, 58),
}
"""Refused system call → its numbers on x86-64 and aarch64; None if a machine lacks it."""
CLONE, CLONE3, SOCKET, PRCTL, IOCTL = (56, 220), (435, 435), (41, 198), (157, 167), (16, 29)
MMAP, MADVISE, SETSOCKOPT = (9, 222), (28, 233), (54, 208)
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20
"""Flags of mmap that together make memory which counts for no process once its pages are dropped."""
MADV_PAGEOUT = 21
"""Advice of madvise that moves memory from a process to swap, where it is not measured."""
SO_SNDBUF = 7
"""Socket option that lets a socket hold more memory than is counted for it."""
NEW_NAMESPACES = 0x7E020000
"""Flags of clone that make namespaces of any kind."""
UNIX = 1
"""Family of the allowed sockets. Sockets of IPv4 and IPv6, loopback included, have buffers: memory that belongs to no
process."""
SET_PDEATHSIG = 1
"""Operation of prctl by which a process would outlive its parent again."""
TERMINAL_INPUT = (0x5412, 0x541C)
"""Operations TIOCSTI and TIOCLINUX of ioctl, which type on a terminal."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets in the kernel's ``seccomp_data``; an argument has 8 bytes, its low half first on these machines."""

Step = tuple[int, int, int, int]
"""One step of the filter: operation, steps to skip if it is true, steps to skip if it is false, operand."""


def seccomp_filter() -> bytes:
    """Return the filter for this machine, as an array of the kernel's ``sock_filter``.

    Raises:
        ConfigError: the system calls of this kind of machine are not known here.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise ConfigError(
            f"the sandbox knows the system calls of {' and '.join(AUDIT_ARCH)}, and this machine is {machine}; choose "
            "sandbox=process_limits, which protects from less"
        )
    return b"".join(struct.pack("=HBBI", *step) for step in _steps(machine))


def _steps(machine: str) -> Iterator[Step]:
    which = list(AUDIT_ARCH).index(machine)
    # The machine first: for 32-bit programs the numbers mean other calls, which would pass the rest.
    yield (_LOAD, 0, 0, _ARCH)
    yield (_EQUAL, 1, 0, AUDIT_ARCH[machine])
    yield (_RETURN, 0, 0, _KILL)  # 32-bit calls, whose numbers differ
    yield (_LOAD, 0, 0, _NUMBER)
    if machine == "x86_64":
        yield (_AT_LEAST, 0, 1, X32)
        yield (_RETURN, 0, 0, _KILL)
    for numbers in REFUSED.values():
        if (number := numbers[which]) is not None:
            yield (_EQUAL, 0, 1, number)
            yield _refusal(errno.EPERM)
    yield (_EQUAL, 0, 1, CLONE3[which])
    yield _refusal(errno.ENOSYS)  # a filter cannot read its flags; libraries fall back to clone
    yield from _on_argument(CLONE[which], 0, [(_ANY_BIT, 0, 1, NEW_NAMESPACES), _refusal(errno.EPERM)])
    yield from _on_argument(PRCTL[which], 0, [(_EQUAL, 0, 1, SET_PDEATHSIG), _refusal(errno.EPERM)])
    shared = [(_ANY_BIT, 0, 2, MAP_ANONYMOUS), (_ANY_BIT, 0, 1, MAP_SHARED), _refusal(errno.EPERM)]
    yield from _on_argument(MMAP[which], 3, shared)
    yield from _on_argument(MADVISE[which], 2, [(_EQUAL, 0, 1, MADV_PAGEOUT), _refusal(errno.EPERM)])
    yield from _on_argument(SETSOCKOPT[which], 2, [(_EQUAL, 0, 1, SO_SNDBUF), _refusal(errno.EPERM)])
    for request in TERMINAL_INPUT:
        yield from _on_argument(IOCTL[which], 1, [(_EQUAL, 0, 1, request), _refusal(errno.EPERM)])
    yield from _on_argument(SOCKET[which], 0, [(_EQUAL, 1, 0, UNIX), _refusal(errno.EAFNOSUPPORT)])
    yield (_RETURN, 0, 0, _ALLOW)


def _on_argument(number: int, place: int, steps: list[Step]) -> Iterator[Step]:
    """Yield the steps for one argument of one system call; other calls, and allowed ones, continue after them."""
    yield (_EQUAL, 0, len(steps) + 2, number)
    # Only the low half: these arguments are ints, and the kernel ignores the high half.
    yield (_LOAD, 0, 0, _ARGUMENT + 8 * place)
    yield from steps
    yield (_LOAD, 0, 0, _NUMBER)


def _refusal(error: int) -> Step:
    return (_RETURN, 0, 0, _ERRNO | error)
