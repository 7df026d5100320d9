"""Programs that a model wrote, run apart from this one: own process, folder and limits, no network where the system can do that.

    run_program("assert 1 + 1 == 2\\n")  # Outcome.PASSED

A child interpreter in isolated mode works in a folder of its own that is removed afterwards, with limits on processor time,
memory and file size, no input and an almost empty environment. Where Linux allows unprivileged namespaces it has no network,
and nothing that it starts outlives it; elsewhere its process group is killed. That keeps a mistake from doing harm; it is no
wall against a program that means harm: for models you do not trust, run the whole command in a container.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

from dspine.errors import UserError

NAMESPACES = ("--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child")
# Reads the program from standard input and tells the secret only when the program has run to its end: exit() in the middle, and
# whatever an answer prints, pass for nothing. The secret leaves by a pipe that the program's output does not go to.
_CHILD = """
import os, resource, sys
pipe, memory, seconds, size, secret = (*map(int, sys.argv[1:5]), sys.argv[5])
del sys.argv[1:]
for limit, value in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds), (resource.RLIMIT_FSIZE, size),
                     (resource.RLIMIT_CORE, 0)):
    try:
        resource.setrlimit(limit, (value, value))
    except (OSError, ValueError):
        pass  # macOS limits no address space
code = compile(sys.stdin.read(), "answer.py", "exec")
sys.stdin = open(os.devnull)
exec(code, {"__name__": "__main__"})
os.write(pipe, secret.encode())
"""


class Outcome(str, Enum):
    """`FAILED` is an exception, an early exit, or too much memory."""

    PASSED = "passed"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one program may use."""

    wall_s: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


DEFAULT_LIMITS = Limits()


def run_program(program: str, limits: Limits = DEFAULT_LIMITS) -> Outcome:
    """Run Python source to its end. Raises UserError on a system without resource limits (Windows)."""
    if sys.platform == "win32":
        raise UserError(
            "programs that a model wrote are run under resource limits, which Windows does not have; use Linux or macOS"
        )
    secret = secrets.token_hex(16)
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryDirectory(prefix="dspine-answer-", ignore_cleanup_errors=True) as folder:
            numbers = (writer, limits.memory_bytes, int(limits.wall_s) + 1, limits.file_bytes)
            child = [sys.executable, "-I", "-B", "-c", _CHILD, *map(str, numbers), secret]
            in_time = _run([*_no_network(), *child], program, Path(folder), writer, limits.wall_s)
        os.set_blocking(reader, False)
        try:
            told = os.read(reader, 2 * len(secret)).decode("utf-8", errors="replace")
        except BlockingIOError:
            told = ""
    finally:
        os.close(reader)
        os.close(writer)
    if told == secret:
        return Outcome.PASSED
    return Outcome.FAILED if in_time else Outcome.TIMEOUT


def _run(command: list[str], program: str, folder: Path, pipe: int, wall_s: float) -> bool:
    """Whether it ended by itself within `wall_s`; whatever of its process group is left then is killed."""
    environment = {"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(pipe,),
        start_new_session=True,
    )
    try:
        process.communicate(program.encode("utf-8", errors="replace"), timeout=wall_s)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its own session: the group bears its id
        process.wait()


@cache
def _no_network() -> tuple[str, ...]:
    """The words before a command that take network and other processes from it; none where the system does not let us."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return ()
    words = (unshare, *NAMESPACES)
    try:
        done = subprocess.run([*words, "true"], capture_output=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return words if done.returncode == 0 else ()


def is_offline() -> bool:
    """Whether programs run here without a network."""
    return bool(_no_network())
