"""Programs run apart: what passes, what fails, and what a bad one cannot do."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest

from dspine.evaluation.sandbox import Limits, Outcome, is_offline, run_program

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no resource limits")
SHORT = Limits(wall_s=2.0, memory_bytes=256 << 20)


@pytest.mark.parametrize(
    ("program", "outcome"),
    [
        ("assert sum([1, 2]) == 3\n", Outcome.PASSED),
        ("import collections, math\nprint('x' * 100_000)\nassert __name__ == '__main__'\n", Outcome.PASSED),
        ("assert False\n", Outcome.FAILED),
        ("def f(:\n", Outcome.FAILED),
        ("import sys\nsys.exit(0)\n", Outcome.FAILED),  # an early end passes no test
        ("import os\nos._exit(0)\n", Outcome.FAILED),
        ("input()\n", Outcome.FAILED),
        ("data = bytearray(1 << 30)\n", Outcome.FAILED),
        ("with open('large', 'wb') as f:\n    f.write(b'0' * (4 << 20))\n", Outcome.FAILED),
    ],
)
def test_outcomes(program: str, outcome: Outcome) -> None:
    assert run_program(program, Limits(memory_bytes=256 << 20)) is outcome


def test_an_endless_program_is_killed_in_time() -> None:
    started = time.monotonic()
    assert run_program("while True: pass\n", SHORT) is Outcome.TIMEOUT
    assert run_program("import time\ntime.sleep(60)\n", SHORT) is Outcome.TIMEOUT
    assert time.monotonic() - started < 20


def test_it_works_in_a_folder_of_its_own_and_sees_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    program = (
        "import os\nassert 'OPENAI_API_KEY' not in os.environ\nassert os.listdir() == []\n"
        "open('note', 'w').write('x')\nassert os.environ['HOME'] == os.getcwd()\n"
    )
    assert run_program(program) is Outcome.PASSED
    assert list(tmp_path.iterdir()) == []


def test_it_reaches_no_network_where_the_system_can_forbid_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = run_program(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\n")
    assert outcome is (Outcome.FAILED if is_offline() else Outcome.PASSED)


def test_what_it_starts_does_not_outlive_it(tmp_path: Path) -> None:
    sign = tmp_path / "alive"
    daemon = f"import time\ntime.sleep(1)\nopen({str(sign)!r}, 'w')"
    session = "True" if is_offline() else "False"  # without namespaces only the process group is killed
    program = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {daemon!r}], start_new_session={session})\n"
    assert run_program(program) is Outcome.PASSED
    time.sleep(1.6)
    assert not sign.exists()


def test_descriptors_are_not_leaked() -> None:
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        run_program("pass\n")
    assert len(list(Path("/dev/fd").iterdir())) == before
