"""Run generated code in this process, under Landlock, seccomp and resource limits.

    limits ─▶ another user, under root ─▶ Landlock: read Python and libraries, write the current folder
           ─▶ seccomp: no socket, signal, new session, change of owners or modes … ─▶ the code

Its source is given to `python -I -c`, so it imports the standard library alone. Arguments: the descriptor to which it
writes when the sandbox is closed, the program, memory, file size, processes, CPU seconds, user (0: the same one) and
the folders that may be read. Landlock (https://docs.kernel.org/userspace-api/landlock.html) is in Linux from 5.13 on;
what its first version does not cover (network, signals, truncation, modes) is refused by seccomp. Children stay in the
process group of the code, where `killpg` ends all of them. What is not hidden: that a file exists, and its size.
"""

import ctypes
import errno
import os
import platform
import resource
import runpy
import signal
import struct
import sys

READ, ALL = 0b1101, (1 << 13) - 1  # execute, read a file, read a folder; everything that Landlock's version 1 knows
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
KEEP_CAPABILITIES, READ_SEARCH, CAPABILITIES_3 = 8, 2, 0x20080522
NO_NEW_PRIVILEGES, DIE_WITH_PARENT, SECCOMP, FILTER = 38, 1, 22, 2  # of prctl
LOAD_NUMBER, LOAD_MACHINE, EQUAL, AT_LEAST, RETURN = (0x20, 0), (0x20, 4), 0x15, 0x35, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
OPEN_FILES = 64  # of a process; deleted files and memory without a name exist as long as they are open
NEWER = 452  # system calls from this number on are not known here
Numbers = tuple[int | None, int | None]
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # of seccomp, and the column of CALLS
CALLS: dict[str, Numbers] = {
    "socket": (41, 198), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "setsid": (112, 157), "setpgid": (109, 154),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "prlimit64": (302, 261),
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "unshare": (272, 97), "setns": (308, 268),
    "ptrace": (101, 117), "migrate_pages": (256, 238), "move_pages": (279, 239), "process_madvise": (440, 440),
    "inotify_add_watch": (254, 27), "truncate": (76, 45), "chmod": (90, None), "fchmod": (91, 52),
    "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
    "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "open_by_handle_at": (304, 265),
}  # fmt: skip
# calls that are refused with one value of an argument: the value, its place, the numbers of the call
OPTIONS: dict[str, tuple[int, int, tuple[int, int]]] = {
    "F_SETOWN": (8, 1, (72, 25)), "F_SETOWN_EX": (15, 1, (72, 25)), "FIOSETOWN": (0x8901, 1, (16, 29)),
    "SIOCSPGRP": (0x8902, 1, (16, 29)), "PR_SET_PDEATHSIG": (DIE_WITH_PARENT, 0, (157, 167)),
}  # fmt: skip
LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """The result of a C call. Ends the process with the reason where it failed."""
    if result < 0:
        number = ctypes.get_errno()
        missing = (
            " (Landlock needs Linux 5.13, with lsm=landlock)" if number in (errno.ENOSYS, errno.EOPNOTSUPP) else ""
        )
        sys.exit(f"{what}: {os.strerror(number)}{missing}")
    return result


def become(user: int) -> None:
    """Become another user; of the capabilities only that to read root's own folders stays, if needed."""
    check(LIBC.prctl(KEEP_CAPABILITIES, 1, 0, 0, 0), "prctl")
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)
    reached = os.access(os.__file__, os.R_OK) and all(os.access(path, os.X_OK) for path in (sys.prefix, os.getcwd()))
    kept = 0 if reached else 1 << READ_SEARCH  # Landlock still says what is read
    header, sets = struct.pack("Ii", CAPABILITIES_3, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)
    check(LIBC.capset(header, sets), "capset")


def limit_resources(memory: int, size: int, processes: int, seconds: int) -> None:
    """Limit memory, files, processes beside those that the user has, and CPU seconds."""
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                processes += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    limits = {
        resource.RLIMIT_CORE: 0, resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NPROC: processes - 1, resource.RLIMIT_AS: memory, resource.RLIMIT_NOFILE: OPEN_FILES,
    }  # fmt: skip
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def restrict_files(readable: list[str]) -> None:
    """By Landlock: read what is named, and everything in the current folder."""
    handled = struct.pack("Q", ALL)
    rules = check(LIBC.syscall(CREATE_RULESET, handled, len(handled), 0), "Landlock")
    rights = {**dict.fromkeys(readable, READ), ".": ALL, "/dev/null": 0b110, "/dev/zero": 0b100, "/dev/urandom": 0b100}
    for path, allowed in rights.items():
        if os.path.exists(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rule = struct.pack("=Qi", allowed, folder)
            check(LIBC.syscall(ADD_RULE, rules, 1, rule, 0), f"Landlock, {path}")
            os.close(folder)
    check(LIBC.syscall(RESTRICT_SELF, rules, 0), "Landlock")
    os.close(rules)


def seccomp_filter(calls: dict[str, Numbers], options: dict[str, tuple[int, int, tuple[int, int]]]) -> bytes:
    """The program that refuses calls with EPERM, unknown ones with ENOSYS. Raises OSError.

    calls, options: those of CALLS and OPTIONS
    """
    if platform.machine() not in MACHINES:
        raise OSError(f"seccomp: {platform.machine()} is not supported, only {', '.join(MACHINES)}")
    machine, column = MACHINES[platform.machine()]
    refused = [number for numbers in calls.values() if (number := numbers[column]) is not None]
    refuse = len(refused) + 4 * len(options) + 5  # the place of this step; a jump counts from the step after it
    steps = [(*LOAD_MACHINE, 0, 0), (EQUAL, machine, 0, refuse - 2), (*LOAD_NUMBER, 0, 0)]
    steps += [(AT_LEAST, NEWER, refuse + 1 - 4, 0)]
    steps += [(EQUAL, number, refuse - at, 0) for at, number in enumerate(refused, 5)]
    for value, place, numbers in options.values():
        steps += [(EQUAL, numbers[column], 0, 3), (0x20, 16 + 8 * place, 0, 0)]  # the argument's lower half
        steps += [(EQUAL, value, refuse - len(steps) - 1, 0), (*LOAD_NUMBER, 0, 0)]
    steps += [(RETURN, ALLOW, 0, 0), (RETURN, REFUSE | errno.EPERM, 0, 0), (RETURN, REFUSE | errno.ENOSYS, 0, 0)]
    return b"".join(struct.pack("HBBI", code, true, false, value) for code, value, true, false in steps)


def refuse_system_calls() -> None:
    """By seccomp: those of CALLS and OPTIONS."""
    try:
        program = seccomp_filter(CALLS, OPTIONS)
    except OSError as error:
        sys.exit(str(error))
    stored = ctypes.create_string_buffer(program)
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(stored))
    check(LIBC.prctl(SECCOMP, FILTER, filters, 0, 0), "seccomp")


def main() -> None:
    """Close the sandbox, report it, and run the code."""
    ready, program, *numbers = sys.argv[1:8]
    memory, size, processes, seconds, user = map(int, numbers)
    if user:
        become(user)
    check(LIBC.prctl(DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0), "prctl")
    check(LIBC.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "prctl")
    limit_resources(memory, size, processes, seconds)
    restrict_files(sys.argv[8:])
    refuse_system_calls()
    os.write(int(ready), b"closed")
    os.close(int(ready))
    sys.argv = [program]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
