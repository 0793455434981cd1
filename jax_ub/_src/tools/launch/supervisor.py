"""Supervisor: the process that starts the ranks, relays their output, and ends them.

The launcher runs this file as an isolated script. It imports neither jax nor jax_ub, so
that it starts fast and has only one thread. Three mechanisms ensure that no process is
left behind:

- Standard input is a pipe from the launcher. When it closes, the supervisor kills all
  ranks.
- Each rank asks the kernel for SIGKILL when the supervisor exits.
- The supervisor and the launcher adopt orphaned descendants and kill them.
"""

import asyncio
import collections
import contextlib
import ctypes
import errno
import json
import os
import pathlib
import re
import select
import shutil
import signal
import subprocess
import sys
import time

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
ENDED_BY = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_TIMED_OUT = 124  # the exit status of timeout(1)
_TAIL_LINES = 15
_CAUSE_S = 2.0  # for the peer that a failed process has lost to exit, too
# Matches output about a lost peer: errors of jax_ub, of XLA's collectives on CPUs, and
# of JAX's coordination service.
_LOST_PEER = re.compile(
    rb"CommunicatorError: .*(?:initialize_ub: process \d| died|closed its communicator"
    rb"|failed or exited before|left before all|does not respond)"
    rb"|Gloo \w+ failed: .*Connection (?:closed|reset) by peer"
    rb"|JAX distributed service detected fatal errors"
)


def not_ignored(numbers=ENDED_BY):
    """Returns the signals that are not ignored, such as SIGHUP without nohup."""
    kept = signal.SIGTERM  # sent at the death of a parent, too
    return [n for n in numbers if n == kept or signal.getsignal(n) != signal.SIG_IGN]


@contextlib.contextmanager
def handling(handler, numbers=ENDED_BY):
    """Sets a handler for signals within the block, except for ignored signals."""
    before = {number: signal.signal(number, handler) for number in not_ignored(numbers)}
    try:
        yield
    finally:
        for number, handler_before in before.items():
            signal.signal(number, handler_before)


def adopt_orphans() -> None:
    """Makes this process the parent of descendants whose parent has exited."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _prctl(option, value):
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def descendants() -> frozenset[int]:
    """Returns the process ids of all live descendants of this process."""
    children = collections.defaultdict(list)
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The state and the parent are read after the last ")", because the command
            # name in parentheses may contain any bytes.
            state, parent = path.read_bytes().rpartition(b")")[2].split()[:2]
            if state != b"Z":
                children[int(parent)].append(int(path.parent.name))
    found: set[int] = set()
    new = [os.getpid()]
    while new:
        new = [child for parent in new for child in children[parent]]
        found.update(new)
    return frozenset(found)


def kill_descendants(spared: frozenset[int] = frozenset()) -> None:
    """Kills the descendants of this process except `spared`, until none is left."""
    while alive := descendants() - spared:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)  # polls: only children can be waited for


def signal_name(number: int) -> str:
    """Returns the name of a signal, such as "SIGKILL" for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class SupervisorError(Exception):
    """Raised if a rank cannot be started, or its output cannot be written.

    For example, the disk is full, or there are too few descriptors.
    """


# Maps the error number of a failed start of a rank to the limit that was exceeded.
_LIMITS: dict[int | None, str] = {
    errno.EMFILE: "ulimit -n",
    errno.ENFILE: "the sysctl fs.file-max",
    errno.EAGAIN: "ulimit -u, or pids.max of the container",
    errno.ENOMEM: "the memory limit of the container",
}


class Relay:
    """Copies output from one descriptor to another, and adds a prefix to each line.

    It also keeps the last lines, to repeat them after a failure, and notes whether a
    line is about a lost peer.
    """

    def __init__(self, source: int, target: int, prefix: bytes):
        os.set_blocking(source, False)
        self.source, self._target, self._prefix = source, target, prefix
        self._rest = b""
        self._has_return = False  # whether the last output ends with b"\r"
        self.num_lines = 0
        self.has_lost_peer = False
        self.tail: collections.deque[bytes] = collections.deque(maxlen=_TAIL_LINES)

    def read(self) -> bool:
        """Copies the output that is available now; returns False at end of file."""
        try:
            found = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return True
        new = found.removeprefix(b"\n") if self._has_return else found
        self._has_return = found.endswith(b"\r")
        # A carriage return also ends a line, because progress bars write no newline.
        text = (self._rest + new).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = text.split(b"\n")
        self._write(lines)
        return bool(found)

    def close(self) -> None:
        """Copies the remaining output. Adds a newline if the last line has none."""
        ready = select.poll()  # not select(), which takes no descriptor above 1023
        ready.register(self.source, select.POLLIN)
        while ready.poll(0) and self.read():
            pass
        if self._rest:
            self._write([self._rest])
        self._rest = b""

    def _write(self, lines):
        self.num_lines += len(lines)
        self.tail.extend(lines)
        self.has_lost_peer |= any(map(_LOST_PEER.search, lines))
        data = memoryview(b"".join(self._prefix + line + b"\n" for line in lines))
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # another process has made it non-blocking
                select.select([], [self._target], [])
            except BrokenPipeError:
                raise
            except OSError as error:
                name = {1: "stdout", 2: "stderr"}.get(self._target, "output")
                reason = f"cannot write to {name}: {error.strerror}"
                raise SupervisorError(reason) from error


class Rank:
    """A process of the job, in a separate session and process group."""

    def __init__(self, index: int, command: list[str], environment: dict[str, str]):
        parent = os.getpid()

        def die_with_parent():
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os.kill(os.getpid(), signal.SIGKILL)

        self.index = index
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with_parent,  # safe: with one thread, no lock can be held
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        self.pidfd = os.pidfd_open(self.process.pid)
        prefix = f"[{index}] ".encode()
        self.stdout = Relay(self.process.stdout.fileno(), 1, prefix)
        self.stderr = Relay(self.process.stderr.fileno(), 2, prefix)

    def send(self, number: int) -> None:
        """Sends a signal to the rank's process group, if it still exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def __str__(self):
        status = self.process.returncode
        how = f"ended with exit status {status}"
        if status is not None and status < 0:
            how = f"was ended by {signal_name(-status)}"
        return f"process {self.index} (pid {self.process.pid}) {how}"


class Supervisor:
    """Relays the processes' output, and handles their exits, signals and deadlines.

    When a rank fails, it ends the other ranks. `job.Job` describes the job.
    """

    def __init__(self, job: dict):
        self._job, self._status = job, 0
        self._failed: list[Rank] = []  # those that failed before the others were ended
        self._is_ending = False  # whether the ranks have been sent a signal
        self._is_launcher_lost = False
        self._num_lines = 0  # lines written when the first rank failed
        self._ranks: list[Rank] = []
        self._begin = time.monotonic()
        self._error: Exception | None = None  # raised by an action of the event loop
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._stop)
        self._loop.add_reader(0, self._launcher_ended)
        for number in not_ignored():
            self._loop.add_signal_handler(number, self._interrupt, number)
        self._running: set[Rank] = set()
        for index, environment in enumerate(job["environments"]):
            self._start(index, environment)
        if job["timeout_s"] is not None:
            self._loop.call_later(job["timeout_s"], self._time_out)

    def _start(self, index, environment):
        try:
            rank = Rank(index, self._job["command"], environment)
        except OSError as error:
            for rank in self._running:
                rank.send(signal.SIGKILL)
            number = len(self._job["environments"])
            limit = _LIMITS.get(error.errno)
            fix = f"Raise {limit}, or start fewer processes." if limit else ""
            raise SupervisorError(
                f"process {index} of {number} cannot be started: {error.strerror}. "
                f"{fix}".rstrip()
            ) from error
        self._ranks.append(rank)
        self._running.add(rank)
        self._loop.add_reader(rank.pidfd, self._ended, rank)
        for relay in (rank.stdout, rank.stderr):
            self._loop.add_reader(relay.source, self._relay, relay)

    def run(self) -> int:
        """Runs until all processes have exited; returns the launcher's exit status."""
        try:
            self._loop.run_forever()
            if self._error is not None:
                raise self._error
        finally:
            for rank in self._running:
                rank.send(signal.SIGKILL)
            kill_descendants()
            if self._is_launcher_lost and self._job["folder"] is not None:
                shutil.rmtree(self._job["folder"], ignore_errors=True)
        self._report()
        return self._status

    def _stop(self, loop, context):
        """Ends `run` with an exception of a callback, which asyncio would only log."""
        self._error = self._error or context.get("exception")
        loop.stop()

    def _relay(self, relay):
        if not relay.read():
            self._loop.remove_reader(relay.source)

    def _ended(self, rank):
        status = rank.process.wait()
        self._loop.remove_reader(rank.pidfd)
        self._running.discard(rank)
        if not self._running:
            self._loop.stop()
        for relay in (rank.stdout, rank.stderr):
            self._loop.remove_reader(relay.source)
            relay.close()
        is_first = not self._status
        if status and (is_first or not self._is_ending):
            seconds = time.monotonic() - self._begin
            self._say(f"{rank} after {seconds:.1f} s.")
            self._failed.append(rank)
        if status and is_first:
            self._num_lines = self._lines_written()
            linger_s = self._job["linger_s"]
            if rank.stderr.has_lost_peer:
                linger_s = max(linger_s, _CAUSE_S)
            self._end(128 - status if status < 0 else status, linger_s=linger_s)

    def _end(self, status, number=signal.SIGTERM, linger_s=0.0):
        """Schedules the signals that end all processes: `number`, and later SIGKILL."""
        self._status = self._status or status  # the job keeps its first status
        kill_s = linger_s + self._job["grace_s"]
        self._loop.call_later(linger_s, self._send, number)
        self._loop.call_later(kill_s, self._send, signal.SIGKILL)

    def _send(self, number):
        self._is_ending = True
        for rank in self._running:
            rank.send(number)

    def _interrupt(self, number):
        self._say(f"{signal_name(number)}: ending {len(self._running)} processes.")
        self._end(128 + number, number)

    def _time_out(self):
        running = ", ".join(str(i) for i in sorted(r.index for r in self._running))
        limit = f"--timeout {self._job['timeout_s']:g} s"
        self._say(f"{limit} passed before the end of process {running}.")
        self._end(_TIMED_OUT)

    def _launcher_ended(self):
        self._loop.remove_reader(0)
        self._status = self._status or 128 + signal.SIGHUP
        self._send(signal.SIGKILL)
        self._is_launcher_lost = True

    def _lines_written(self):
        relays = [r for rank in self._ranks for r in (rank.stdout, rank.stderr)]
        return sum(relay.num_lines for relay in relays)

    def _report(self):
        """Prints the cause of a failure again, unless it was the last output.

        The cause is the first failure of a process that had not lost a peer before.
        """
        if not self._failed:
            return
        causes = [rank for rank in self._failed if not rank.stderr.has_lost_peer]
        cause, how = self._failed[0], "the first to fail"
        if causes and causes[0] is not cause:
            cause, how = causes[0], "the first to fail without losing a peer"
        elif self._lines_written() == self._num_lines:
            return
        tail = " The end of its stderr:" if cause.stderr.tail else ""
        self._say(f"{how}: {cause}.{tail}")
        for line in cause.stderr.tail:
            self._say("  " + line.decode(errors="replace"))

    def _say(self, text):
        with contextlib.suppress(OSError):
            os.write(2, f"launch: {text}\n".encode())


def _open_standard_descriptors():
    """Opens closed standard descriptors, so that no other file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def main() -> int:
    _open_standard_descriptors()
    job = json.loads(sys.stdin.buffer.readline())
    adopt_orphans()
    try:
        return Supervisor(job).run()
    except BrokenPipeError:  # the reader of the output has closed it
        return 128 + signal.SIGPIPE
    except SupervisorError as error:
        with contextlib.suppress(OSError):
            os.write(2, f"launch: {error}\n".encode())
        return 1


if __name__ == "__main__":
    sys.exit(main())
