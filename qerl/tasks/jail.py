"""Shut the door, then run: the script that `sandbox.py` starts for every program. Standard library only.

It is run as a file by a fresh interpreter and reads its orders as JSON from a file descriptor. Three processes follow
each other: the outer one leaves the host's namespaces; its child is process 1 of the new ones and lays out a file
system with nothing in it but the system's libraries and Python, read-only; and its children are the programs, which
give up every privilege, take limits and a system call filter, and become a fresh Python. When process 1 ends, the
kernel ends whatever else runs in there. What goes wrong before a program starts is written to the report pipe.

There may be two programs: the main one, and a server which it talks to through pipes and which cannot see its source,
its memory or its output.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
MNT_DETACH, AT_RECURSIVE, AT_FDCWD = 2, 0x8000, -100
ATTR_RDONLY, ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38
SYS_MOUNT_SETATTR = 442  # the same everywhere
NOBODY = 65534
THREADS = 1024  # of all programs at a time
OLD = "/.old"
IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SOURCE, REQUESTS, REPLIES = 3, 4, 5  # file descriptors of a program: its source, and the pipes from and to the other

# The first thing a program's Python does: read its source, which lies in no file, and become it. `exit` and `quit` come
# from the site module, which is left out.
BOOT = """
import builtins, sys
builtins.exit = builtins.quit = sys.exit
with open(3, encoding="utf-8") as source: code = source.read()
code = compile(code, "program.py", "exec")
del builtins, sys, source
exec(code)
"""

# System calls that a program has no honest use for, by machine; refused with EPERM.
CALLS: dict[str, dict[str, Any]] = {
    "x86_64": {
        "arch": 0xC000003E,
        "clone": 56,
        "pivot_root": 155,
        "clone3": 435,
        "kill": (62, 234),  # kill, tgkill: to itself only
        "prctl": 157,  # all but PR_SET_PDEATHSIG: a program ends with its parent
        "fork": (57, 58),
        "refused": (
            # socket; shmget, semget, msgget, mq_open; memfd_create, memfd_secret; ptrace, process_vm_readv and _writev
            *(41, 29, 64, 68, 240, 319, 447, 101, 310, 311),
            # setpgid, setsid: the process group is what gets killed
            *(109, 112),
            # mount, umount2, pivot_root, chroot, unshare, setns, open_tree, move_mount, fsopen, fsmount, mount_setattr
            *(165, 166, 155, 161, 272, 308, 428, 429, 430, 432, 442),
            # keyrings; bpf, perf_event_open, userfaultfd, io_uring; tkill, rt_(tg)sigqueueinfo, pidfd_*; open_by_handle
            *(248, 249, 250, 321, 298, 323, 425, 426, 427, 200, 129, 297, 424, 434, 438, 304),
        ),
    },
    "aarch64": {
        "arch": 0xC00000B7,
        "clone": 220,
        "pivot_root": 41,
        "clone3": 435,
        "kill": (129, 131),
        "prctl": 167,
        "fork": (),
        "refused": (
            *(198, 194, 190, 186, 180, 279, 447, 117, 270, 271),
            *(154, 157),
            *(40, 39, 41, 51, 97, 268, 428, 429, 430, 432, 442),
            *(217, 218, 219, 280, 241, 282, 425, 426, 427, 130, 138, 240, 424, 434, 438, 265),
        ),
    },
}

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def prctl(option: int, value: int = 0, pointer: Any = 0) -> int:
    return int(libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode() or None, ctypes.c_ulong(flags))
    check(libc.mount(*arguments, options.encode() or None), f"mount {target}")


def make_read_only(path: str, recursive: bool) -> None:
    """By mount_setattr (Linux 5.12), or by a remount that keeps the flags which may not be taken away."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", ATTR_RDONLY | ATTR_NOSUID, 0, 0, 0), 32)
    flags = ctypes.c_uint(AT_RECURSIVE if recursive else 0)
    arguments = (ctypes.c_int(AT_FDCWD), os.fsencode(path), flags, attributes, ctypes.c_size_t(32))
    if libc.syscall(ctypes.c_long(SYS_MOUNT_SETATTR), *arguments) < 0:
        kept = os.statvfs(path).f_flag & (MS_NODEV | 8 | 1024 | 2048)  # nodev, noexec, noatime, nodiratime
        mount("none", path, flags=MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | kept)


def can_become_nobody() -> bool:
    """Root of a user namespace, as in containers, can't always: the other user must exist there."""
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= NOBODY < first + count for first, _, count in ranges):
            return False
    with open("/proc/self/setgroups") as file:
        return os.geteuid() == 0 and file.read().strip() == "allow"


def leave_namespaces() -> bool:
    """As root without a user namespace where that is allowed, else with one. Returns whether we are still root."""
    spaces = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if can_become_nobody() and libc.unshare(spaces) == 0:
        return True
    user, group = os.geteuid(), os.getegid()
    check(libc.unshare(spaces | NEWUSER), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {user} 1"), ("gid_map", f"{NOBODY} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return False


def lay_out(visible: list[str], disk: int) -> None:
    """A root of its own: the visible paths read-only, four devices, and an empty /tmp of so many bytes."""
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.mkdir("/tmp" + OLD)
    os.chdir("/tmp")
    check(
        libc.syscall(ctypes.c_long(CALLS[platform.machine()]["pivot_root"]), b".", os.fsencode(OLD[1:])), "pivot_root"
    )
    os.chdir("/")
    os.mkdir("/tmp")
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={disk},nr_inodes=10000")
    bound: list[str] = []
    for path in sorted({*visible, *DEVICES}):
        if not os.path.lexists(OLD + path) or any(path.startswith(parent + "/") for parent in bound):
            continue
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.islink(OLD + path):
            os.symlink(os.readlink(OLD + path), path)
            continue
        if os.path.isdir(OLD + path):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(OLD + path, path, flags=MS_BIND | MS_REC)
        if path not in DEVICES:
            make_read_only(path, recursive=True)
        bound.append(path)
    check(libc.umount2(OLD.encode(), MNT_DETACH), "umount")
    os.rmdir(OLD)
    make_read_only("/", recursive=False)
    os.chdir("/tmp")


def system_call_filter(calls: dict[str, Any], pid: int) -> bytes:
    """A BPF program: no new processes (threads are fine), signals to itself only, none of the refused calls, and no way
    to outlive the parent."""
    load, equal, above, has, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000
    lines = [
        (load, 0, 0, 4),  # architecture
        (equal, 1, 0, calls["arch"]),
        (give, 0, 0, refuse | errno.EPERM),
        (load, 0, 0, 0),  # number of the call
        (above, 0, 1, 0x40000000),  # x32
        (give, 0, 0, refuse | errno.EPERM),
        (equal, 0, 1, calls["clone3"]),
        (give, 0, 0, refuse | errno.ENOSYS),  # the C library then takes clone, whose flags can be looked at
    ]
    for number in calls["fork"]:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse | errno.EAGAIN)]
    for number in calls["refused"]:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse | errno.EPERM)]
    first_argument = (load, 0, 0, 16)
    lines += [(equal, 0, 4, calls["clone"]), first_argument, (has, 1, 0, 0x10000)]  # CLONE_THREAD
    lines += [(give, 0, 0, refuse | errno.EAGAIN), (give, 0, 0, allow)]
    for number in calls["kill"]:
        lines += [(equal, 0, 4, number), first_argument, (equal, 1, 0, pid)]
        lines += [(give, 0, 0, refuse | errno.EPERM), (give, 0, 0, allow)]
    lines += [(equal, 0, 4, calls["prctl"]), first_argument, (equal, 0, 1, PR_SET_PDEATHSIG)]
    lines += [(give, 0, 0, refuse | errno.EPERM), (give, 0, 0, allow), (give, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def take_filter(pid: int) -> None:
    program = system_call_filter(CALLS[platform.machine()], pid)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(buffer)), 16)
    check(prctl(PR_SET_SECCOMP, 2, header), "seccomp")


def take_limits(limits: dict[str, int], unsafe: bool) -> None:
    wanted = {
        resource.RLIMIT_AS: (limits["memory"], limits["memory"]),
        resource.RLIMIT_CPU: (limits["cpu"], limits["cpu"] + 1),
        resource.RLIMIT_FSIZE: (limits["disk"], limits["disk"]),
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
    }
    if not unsafe or platform.machine() not in CALLS:  # without namespaces all that the user runs would count
        wanted[resource.RLIMIT_NPROC] = (THREADS, THREADS)
    for kind, (soft, hard) in wanted.items():
        most = resource.getrlimit(kind)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(kind, (soft, hard))


def become(spec: dict[str, Any], source: int, files: dict[int, int], drop: bool, parent: int) -> NoReturn:
    """The program: files are put in their places, privileges dropped, limits taken, and Python started."""
    high = {place: os.dup2(file, 50 + place, inheritable=False) for place, file in {**files, SOURCE: source}.items()}
    for place, file in high.items():
        os.dup2(file, place)
    for capability in range(64):
        prctl(PR_CAPBSET_DROP, capability)
    if drop:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for number in (signal.SIGPIPE, signal.SIGXFSZ, *IGNORED):
        signal.signal(number, signal.SIG_DFL)
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    take_limits(spec["limits"], spec["unsafe"])
    if platform.machine() in CALLS:
        take_filter(os.getpid())
    os.execve(spec["python"], [spec["python"], "-s", "-P", "-S", "-B", "-c", BOOT], spec["environment"])


def start(spec: dict[str, Any], source: int, files: dict[int, int], drop: bool, report: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        guarded(report, become, spec, source, files, drop, parent)
    return pid


def run_programs(spec: dict[str, Any], sources: list[int], drop: bool, report: int) -> int:
    """Starts the programs, waits for the main one, and returns its exit status as a shell would."""
    others: list[int] = []
    if len(sources) == 1:
        main = start(spec, sources[0], {}, drop, report)
    else:
        requests, replies, nothing = os.pipe(), os.pipe(), os.open("/dev/null", os.O_RDWR)
        server = {0: nothing, 1: 2, REQUESTS: requests[0], REPLIES: replies[1]}  # what it prints is not the result
        others = [start(spec, sources[1], server, drop, report)]
        main = start(spec, sources[0], {REQUESTS: replies[0], REPLIES: requests[1]}, drop, report)
        for file in (*requests, *replies):
            os.close(file)
    os.close(report)
    while True:
        pid, status = os.wait()
        if pid == main:
            break
        if pid in others:
            others.remove(pid)
    for pid in others:
        os.kill(pid, signal.SIGKILL)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def memory_file(text: str) -> int:
    file = os.memfd_create("source")
    with open(file, "w", encoding="utf-8", errors="replace", closefd=False) as stream:
        stream.write(text)
    os.lseek(file, 0, os.SEEK_SET)
    return file


def guarded(report: int, action: Any, *arguments: Any) -> NoReturn:
    """No exception leaves a forked child: it goes to the report."""
    try:
        status = action(*arguments)
        os._exit(status if isinstance(status, int) else 0)
    except BaseException as error:  # noqa: BLE001 - whatever it is, the child must end here
        text = f"{type(error).__name__}: {error.strerror if isinstance(error, OSError) else error}"
        with contextlib.suppress(OSError):
            os.write(report, text.encode())
        os._exit(1)


def process_one(spec: dict[str, Any], sources: list[int], alive: int, drop: bool, report: int) -> int:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.read(alive, 1) != b"x":  # the outer process is gone already
        return 1
    lay_out(spec["visible"], spec["limits"]["disk"])
    return run_programs(spec, sources, drop, report)


def main(orders: int, report: int) -> int:
    with open(orders, encoding="utf-8") as file:  # a memory file, shared with who wrote it: the position too
        file.seek(0)
        spec = json.load(file)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec["parent"]:
        return 1
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o022)
    sources = [memory_file(text) for text in spec["sources"]]
    if spec["unsafe"]:
        return run_programs(spec, sources, False, report)
    if platform.machine() not in CALLS:
        raise OSError(errno.ENOSYS, f"no system call filter is known for {platform.machine()}")
    drop = leave_namespaces()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # changed credentials forget it
    if os.getppid() != spec["parent"]:
        return 1
    alive, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(tell)
        guarded(report, process_one, spec, sources, alive, drop, report)
    os.close(report)
    os.close(alive)
    os.write(tell, b"x")
    status = os.waitpid(child, 0)[1]
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


if __name__ == "__main__":
    high = fcntl.fcntl(int(sys.argv[2]), fcntl.F_DUPFD_CLOEXEC, 60)  # out of the way of a program's files
    os.close(int(sys.argv[2]))
    guarded(high, main, int(sys.argv[1]), high)
