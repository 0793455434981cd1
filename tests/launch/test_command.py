"""Tests the launcher, mostly with programs that do not import jax."""

import contextlib
import errno
import fcntl
import os
import pathlib
import re
import resource
import select
import signal
import subprocess
import sys
import time
import uuid

import pytest
from tools import tool

import jax_ub
from jax_ub.__main__ import main
from jax_ub._src.tools.launch.supervisor import Relay, descendants

ROOT = pathlib.Path(jax_ub.__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
HANGS_S = 300  # longer than any test takes on a busy machine

# Starts a child process, prints a line, and waits to be ended.
WAITING = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)", sys.argv[1]])
print("waits", flush=True)
time.sleep(300)
"""


def command(*arguments):
    return [sys.executable, "-m", "jax_ub", "launch", *map(str, arguments)]


def start(*arguments):
    return subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def end_of(process):
    out, err = process.communicate(timeout=HANGS_S)
    return process.returncode, out, err


def launch(*arguments):
    return end_of(start(*arguments))


def processes_with(token):
    """Returns the processes with the token on their command line, by process id."""
    found = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in words:
            found[int(path.parent.name)] = words
    return found


def is_rank(words):
    # Options of Python precede the script.
    return b"launch" not in words and any(w.endswith(b"script.py") for w in words)


def wait_until(condition):
    deadline = time.monotonic() + HANGS_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


@pytest.fixture
def waiting(script):
    """Starts a job of two processes with a child each; yields it and their token."""
    token = uuid.uuid4().hex
    process = start("-n", 2, script(WAITING), token)
    for _ in range(2):
        assert "waits" in process.stdout.readline()
    # The launcher, two ranks, a child of each; the supervisor has no arguments.
    wait_until(lambda: len(processes_with(token)) == 5)
    yield process, token
    process.kill()
    process.communicate()
    for pid in processes_with(token):
        os.kill(pid, signal.SIGKILL)


def supervisor_of(process):
    """Returns the process id of the launcher's only child."""
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = path.read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == process.pid:
                return int(path.parent.name)
    raise AssertionError("no supervisor")


def test_every_line_is_prefixed_with_its_process(script):
    text = """
import os, sys
print("one\\rtwo", *sys.argv[1:])
print("three", end="")
sys.stderr.write("four\\n")
"""
    status, out, err = launch("-n", 2, script(text), "--flag", "value")
    assert status == 0
    for process in range(2):
        lines = [line for line in out.splitlines() if line.startswith(f"[{process}]")]
        words = ["one", "two --flag value", "three"]
        assert lines == [f"[{process}] {word}" for word in words]
    assert sorted(err.splitlines()) == ["[0] four", "[1] four"]


@pytest.mark.parametrize("options", [(), ("--",)])
def test_arguments_of_the_program_are_passed_unchanged(script, options):
    path = script("import sys; print(sys.argv[1:])")
    given = ("--", "two words", "-n", "", "--", "x\ny")
    status, out, _ = launch("-n", 1, *options, path, *given)
    assert status == 0
    assert out == f"[0] {list(given)}\n"


def test_name_of_a_script_may_begin_with_a_dash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("-script.py").write_text("import sys; print(sys.argv)")
    status, out, err = launch("-n", 1, "--", "-script.py", "-n")
    assert (status, out) == (0, "[0] ['-script.py', '-n']\n"), err


def test_module_is_run():
    status, out, _ = launch("-n", 1, "-m", "platform", "--terse")
    assert status == 0
    assert out.startswith("[0] Linux")


def test_first_failure_ends_all_processes_with_its_status(script):
    text = """
import os, sys, time
if os.environ["SLURM_PROCID"] == "1":
    sys.exit("this is why")
try:
    time.sleep(300)
finally:
    print("last words")
"""
    status, out, err = launch("-n", 3, script(text))
    assert status == 1
    assert "[1] this is why" in err
    assert re.search(r"launch: process 1 \(pid \d+\) ended with exit status 1", err)


def test_first_failure_is_repeated_after_later_output(script, tmp_path):
    # Process 1 fails when process 0 handles the signal. Otherwise end_of() times out.
    text = """
import os, pathlib, signal, sys, time
ready = pathlib.Path(sys.argv[1])
if os.environ["SLURM_PROCID"] == "1":
    while not ready.exists():
        time.sleep(0.01)
    sys.exit("this is why")
signal.signal(signal.SIGTERM, lambda *_: sys.exit("other words"))
ready.touch()
time.sleep(300)
"""
    words = tmp_path / "ready"
    status, _, err = launch("-n", 2, "--grace", 60, script(text), words)
    assert status == 1
    assert err.index("other words") < err.rindex("this is why")
    assert err.splitlines()[-1] == "launch:   this is why"


LOST_PEER = {
    "call": "ValueError: ABORTED: CommunicatorError: jax_ub.all_reduce: rank 1 "
    "(process 1, pid 7) closed its communicator, as ub.destroy_ub and the end of a "
    "program do; rank 0 (process 0, pid 6) waited for rank 1 (process 1, pid 7)",
    "initialize": "jax_ub._src.errors.CommunicatorError: initialize_ub: process 1 (pid "
    "7) failed or exited before it connected",
    "gloo": "jax.errors.JaxRuntimeError: UNKNOWN: Gloo AllGather failed: "
    "[gloo/pair.cc:547] Connection closed by peer [127.0.0.1]:44263",
    "jax": "F1128 21:02:20 client.h:86] Terminating process because the JAX "
    "distributed service detected fatal errors. This most likely indicates that "
    "another task died",
}


@pytest.mark.parametrize("lost", LOST_PEER)
def test_a_failure_before_that_of_the_lost_peer_is_not_the_cause(script, lost):
    # Process 1 fails when process 0, which reports that it lost a peer, has exited.
    text = """
import os, pathlib, sys, time
pid = pathlib.Path(sys.argv[1])
if os.environ["SLURM_PROCID"] == "0":
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    sys.exit(sys.argv[2] + "\\nlast line" * 20)
while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists():
    time.sleep(0.01)  # at most until the launcher ends this process, after two seconds
sys.exit("this is why")
"""
    path = script(text)
    status, _, err = launch("-n", 2, path, path.with_name("pid"), LOST_PEER[lost])
    assert status == 1
    assert "launch: process 0 (pid" in err
    *_, how, why = err.splitlines()
    assert "launch: the first to fail without losing a peer: process 1 (pid" in how
    assert why == "launch:   this is why"


def test_signal_that_ended_a_process_is_named(script):
    text = """
import os, signal, time
if os.environ["SLURM_PROCID"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(300)
"""
    status, _, err = launch("-n", 2, script(text))
    assert status == 128 + signal.SIGKILL
    assert re.search(r"process 1 \(pid \d+\) was ended by SIGKILL", err)


def test_linger_lets_other_processes_run_on(script):
    text = """
import os, sys, time
if os.environ["SLURM_PROCID"] == "1":
    sys.exit(3)
time.sleep(1)
print("saw it")
"""
    status, out, _ = launch("-n", 2, "--linger", 60, script(text))
    assert (status, out) == (3, "[0] saw it\n")


def test_each_failure_before_the_signal_is_reported(script, tmp_path):
    # Process 2 fails when the launcher has seen the exit of process 1.
    text = """
import os, pathlib, sys, time
pid, new = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[1] + ".new")
if os.environ["SLURM_PROCID"] == "1":
    new.write_text(str(os.getpid()))
    new.rename(pid)
    sys.exit(1)
while not pid.exists() or pathlib.Path("/proc", pid.read_text()).exists():
    time.sleep(0.01)
sys.exit(int(os.environ["SLURM_PROCID"]))
"""
    words = tmp_path / "pid"
    status, _, err = launch("-n", 3, "--linger", HANGS_S, script(text), words)
    assert status == 1
    ended = r"process (\d) \(pid \d+\) ended with exit status (\d)"
    assert re.findall(ended, err) == [("1", "1"), ("2", "2")]


def test_timeout_ends_processes_that_ignore_signals(script):
    text = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    time.sleep(300)
"""
    status, _, err = launch("-n", 2, "--timeout", 0.5, "--grace", 0.2, script(text))
    assert status == 124
    assert "--timeout 0.5 s passed before the end of process 0, 1" in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_ends_all_processes(waiting, number):
    process, token = waiting
    process.send_signal(number)
    status, _, err = end_of(process)
    assert status == 128 + number, err
    assert f"launch: {number.name}: ending 2 processes" in err
    assert not processes_with(token)


@pytest.mark.parametrize("victims", ["launcher", "supervisor", "both", "rank"])
def test_no_process_is_left_after_a_kill(waiting, victims):
    process, token = waiting
    supervisor = supervisor_of(process)
    rank = next(pid for pid, words in processes_with(token).items() if is_rank(words))
    killed = {
        "launcher": [process.pid],
        "supervisor": [supervisor],
        "both": [supervisor, process.pid],
        "rank": [rank],
    }[victims]
    # If both are killed, no process knows the children of the ranks.
    ends = is_rank if victims == "both" else lambda _: True
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    process.wait(HANGS_S)
    wait_until(lambda: not any(map(ends, processes_with(token).values())))


def test_names_of_descendants_may_be_invalid_utf8(tmp_path):
    # Linux truncates a process name to 15 bytes, which may cut a character in two.
    program = os.fsencode(tmp_path) + b"/\xc3"
    os.symlink(tool("sleep"), program)
    with subprocess.Popen(["sleep", "300"], executable=program) as child:
        try:
            assert child.pid in descendants()
        finally:
            child.kill()


def test_too_few_descriptors_are_an_error_that_names_the_limit(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(f"import time; time.sleep({HANGS_S})")  # until it is killed
    limited = ["sh", "-c", 'ulimit -n 18; exec "$@"', "sh", *command("-n", 4, program)]
    ended = subprocess.run(
        limited, capture_output=True, text=True, env=ENVIRONMENT, timeout=HANGS_S
    )
    assert ended.returncode == 1
    assert re.fullmatch(
        r"launch: process [1-3] of 4 cannot be started: Too many open files\. Raise "
        r"ulimit -n, or start fewer processes\.\n",
        ended.stderr,
    )
    assert not processes_with(str(program))


def test_output_is_copied_from_descriptors_above_those_of_select():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Fails where fewer than 1025 are allowed; the limit of Linux is at least 4096.
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1025), hard))
    reading, writing = os.pipe()
    copied, target = os.pipe()
    source = fcntl.fcntl(reading, fcntl.F_DUPFD, 1024)
    try:
        os.write(writing, b"one\ntwo")
        Relay(source, target, b"[0] ").close()
        assert os.read(copied, 99) == b"[0] one\n[0] two\n"
    finally:
        for descriptor in (reading, writing, copied, target, source):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_carriage_return_and_its_newline_may_arrive_separately():
    reading, writing = os.pipe()
    copied, target = os.pipe()
    relay = Relay(reading, target, b"[0] ")
    for text in (b"one\r", b"\ntwo\r", b"three\r\n", b"\n"):
        os.write(writing, text)
        assert relay.read()
    assert os.read(copied, 99) == b"[0] one\n[0] two\n[0] three\n[0] \n"
    for descriptor in (reading, writing, copied, target):
        os.close(descriptor)


def test_closed_output_ends_all_processes(script):
    token = uuid.uuid4().hex
    process = start("-n", 2, script("while True: print('more')"), token)
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    status, _, _ = end_of(process)
    assert status == 128 + signal.SIGPIPE
    assert not processes_with(token)


def shell(redirection, *arguments):
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *command(*arguments)],
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("redirection", [">&-", ">&- 2>&-", "<&-", "<&- >&- 2>&-"])
def test_job_runs_with_closed_standard_descriptors(script, tmp_path, redirection):
    text = f"import os; open(r'{tmp_path}/' + os.environ['SLURM_PROCID'], 'w')"
    path = script(text + "; print('output', flush=True)")
    done = shell(redirection, "-n", 2, path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "0").exists() and (tmp_path / "1").exists()


def test_full_disk_ends_all_processes_with_the_reason(script):
    done = shell(">/dev/full", "-n", 2, script("while True: print('more')"))
    assert done.returncode == 1
    assert done.stderr == "launch: cannot write to stdout: No space left on device\n"


def test_nonblocking_output_gets_all_lines(script):
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    lines = 20_000  # more than a pipe holds
    process = subprocess.Popen(
        command("-n", 1, script(f"for i in range({lines}): print('a line', i)")),
        stdout=writing,
        env=ENVIRONMENT,
    )
    while select.select([], [writing], [], 0)[1]:  # until the pipe is full
        assert process.poll() is None
        time.sleep(0.01)
    os.close(writing)
    with open(reading) as output:
        assert sum(1 for _ in output) == lines
    assert process.wait(HANGS_S) == 0


@pytest.mark.parametrize("option", ["--timeout", "--linger", "--grace"])
@pytest.mark.parametrize("seconds", ["inf", "1e12"])
def test_very_long_times_are_accepted(script, option, seconds):
    text = "import os, sys; sys.exit(os.environ['SLURM_PROCID'] == '1' and 'no')"
    status, _, err = launch("-n", 2, option, seconds, script(text))
    assert status == 1
    assert "Traceback" not in err


def test_concurrent_jobs_have_different_ports(script):
    text = "import os; print(os.environ['JAX_COORDINATOR_ADDRESS'])"
    jobs = [start("-n", 1, script(text)) for _ in range(3)]
    ports = {end_of(job)[1] for job in jobs}
    assert len(ports) == 3


JAX = """
import jax
jax.distributed.initialize()
mine = [d.process_index == jax.process_index() for d in jax.devices()]
print(jax.process_index(), jax.process_count(), len(mine), sum(mine))
"""

pytestmark = pytest.mark.slow


def test_jax_distributed_initializes_without_arguments(script):
    status, out, err = launch(
        "-n", 3, "--devices-per-process", 2, "--timeout", 200, script(JAX)
    )
    assert status == 0, err
    wanted = [f"[{process}] {process} 3 6 2" for process in range(3)]
    assert sorted(out.splitlines()) == wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-n", "0", "x.py"), "-n/--processes: '0' is not a positive integer"),
        (("--devices-per-process", "-1", "x.py"), "process: '-1' is not a positive"),
        (("--hosts", "x", "x.py"), "--hosts: 'x' is not a positive integer"),
        (("-n", "3", "--hosts", "2", "x.py"), "launch: --hosts 2 does not divide -n 3"),
        (("--timeout", "-1", "x.py"), "--timeout: '-1' is not a number of seconds."),
        (("--grace", "nan", "x.py"), "--grace: 'nan' is not a number of seconds."),
        (("/",), "launch: there is no script '/'. To run a module"),
        (("no_such.py",), "no script 'no_such.py'. To run a module, put -m before"),
        ((), "arguments are required: script.py"),
    ],
)
def test_invalid_options_are_errors(arguments, message):
    status, _, err = launch(*arguments)
    assert status == 2
    assert message in err


def test_missing_loopback_interface_is_an_error(monkeypatch, capsys):
    # As in a new network namespace, where JAX would wait for five minutes.
    def unreachable(self, address):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr("socket.socket.connect", unreachable)
    assert main(["launch", "-n", "2", __file__]) == 2
    text = "the coordinator's address 127.0.0.1 cannot be reached: Network is unreach"
    assert text in capsys.readouterr().err
