"""The processes of the tests of faults; `test_faults.py` launches them.

    python -m jax_ub launch -n 3 --linger 60 tests/processes/faults.py dies_before

The last process has the fault. Every other process prints lines of JSON with its errors
and with the resources that it still holds at the end. Times are from the machine's
clock, which is the same in all processes.
"""

import json
import os
import pathlib
import signal
import sys
import threading
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src.runtime import connection_attempt, initialize
from jax_ub._src.runtime.bootstrap import JaxStore

ROWS, WIDTH = 8, 16  # of a rank
FIRST_CALL_S = 6.0  # longer than JAX_UB_TIMEOUT_S in tests that depend on it


def say(what, **details):
    details = {"what": what, "process": jax.process_index(), **details}
    # One write, so that lines of threads and processes are not interleaved.
    os.write(1, (json.dumps(details) + "\n").encode())


class Job:
    """Creates a group of all processes, and a program with an op of each kind."""

    def __init__(self, method):
        self.num_ranks = jax.device_count()
        self.mesh = Mesh(np.array(jax.devices()), ("tp",))
        self.method = method
        self.is_victim = jax.process_index() == jax.process_count() - 1
        self.program = jax.jit(self.pair)

    def initialize(self):
        shape = (2 * ROWS * self.num_ranks, WIDTH)
        ub.initialize_ub(shape, self.num_ranks, mesh=self.mesh)

    def pair(self, x, w, v):
        def on_device(x, w, v):
            options = {"axis_name": "tp", "method": self.method}
            h = ub.all_gather_matmul(x, w, **options)
            return ub.matmul_reduce_scatter(h, v, **options)

        specs = (P("tp"), P(None, "tp"), P("tp"))
        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=specs, out_specs=P("tp")
        )(x, w, v)

    def operands(self, rows=ROWS):
        def sharded(shape, spec):
            whole = np.random.default_rng(rows).integers(-1, 2, shape)
            sharding = NamedSharding(self.mesh, spec)
            part = lambda index: whole[index].astype(np.float32)  # noqa: E731
            return whole, jax.make_array_from_callback(shape, sharding, part)

        x, xs = sharded((rows * self.num_ranks, WIDTH), P("tp"))
        w, ws = sharded((WIDTH, 4 * self.num_ranks), P(None, "tp"))
        v, vs = sharded((4 * self.num_ranks, WIDTH), P("tp"))
        return (xs, ws, vs), x @ w @ v

    def call(self, rows=ROWS):
        """Runs the program once, and checks all results of this process."""
        operands, expected = self.operands(rows)
        with ub.errors.raised():
            y = jax.block_until_ready(self.program(*operands))
        for shard in y.addressable_shards:
            found, wanted = np.asarray(shard.data), expected[shard.index]
            if not np.array_equal(found, wanted):
                ub.check_communicators()  # on GPUs, failed results are NaN
            np.testing.assert_array_equal(found, wanted)

    def expect_error(self, action=None):
        begin = time.monotonic()
        try:
            (action or self.call)()
        except ub.errors.CommunicatorError as error:
            say(
                "error",
                kind=type(error).__name__,
                text=str(error),
                began=begin,
                at=time.monotonic(),
            )
        else:
            say("no error")


def kill_this_process():
    say("dies", at=time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)


def dies_before(job):
    job.call()
    if job.is_victim:
        kill_this_process()
    job.expect_error()


def coordinator_dies(job):
    job.call()
    if jax.process_index() == 0:
        kill_this_process()
    while True:
        job.call()


def dies_inside(job):
    job.call()
    if job.is_victim:
        threading.Timer(0.5, kill_this_process).start()

    def call_for_ever():
        while True:
            job.call()

    job.expect_error(call_for_ever)


def dies_after(job):
    job.call()
    job.call()  # the results are correct, even if a peer has died since
    if job.is_victim:
        kill_this_process()
    say("called")
    job.expect_error()


def stops(job):
    job.call()
    if job.is_victim:
        say("stops", pid=os.getpid(), at=time.monotonic())
        os.kill(os.getpid(), signal.SIGSTOP)
    job.expect_error()
    job.expect_error()  # permanently and at once


def raises(job):
    job.call()
    if job.is_victim:
        say("raises", at=time.monotonic())
        raise ValueError("a bug in the user's program")
    job.expect_error()


def other_shape(job):
    job.call()
    job.expect_error(lambda: job.call(2 * ROWS if job.is_victim else ROWS))
    # All processes know about the failure, so a new communicator works.
    ub.destroy_ub()
    job.initialize()
    job.program = jax.jit(job.pair)
    jax.clear_caches()
    job.call()
    say("goes on")


def other_program(job):
    job.call()
    if job.is_victim:
        job.program = jax.jit(lambda *x: job.pair(*x))
    job.expect_error()


def leaves_a_call_out(job):
    job.call()
    if not job.is_victim:
        job.expect_error()
    # In that process XLA has launched the program fewer times; calls must still match.
    ub.destroy_ub()
    job.initialize()
    job.expect_error()
    jax.clear_caches()
    job.call()
    (x, *kernels), expected = job.operands()
    results = [job.program(i * x, *kernels) for i in range(4)]  # all of them in flight
    for i, y in enumerate(results):
        for shard in y.addressable_shards:
            wanted = i * expected[shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), wanted)
    say("goes on")


def is_missing(job):
    if job.is_victim:
        time.sleep(300)
    job.expect_error(job.initialize)


def dies_connecting(job):
    if job.is_victim:
        connection_attempt.ConnectionAttempt.connect_all = lambda *_: (
            kill_this_process()
        )
    job.expect_error(job.initialize)


def compiles_longer(job):
    # A call of the old program waits behind the new program, with the longer deadline.
    job.call()
    first, job.program = job.program, jax.jit(lambda *x: job.pair(*x))
    if job.is_victim:
        time.sleep(FIRST_CALL_S)
    job.call()
    job.program = first
    job.call()
    if job.is_victim:
        time.sleep(FIRST_CALL_S)
    job.expect_error()


def dies_entering(job):
    if job.is_victim:
        initialize.check_backend = lambda *_: kill_this_process()
    job.expect_error(job.initialize)


def is_interrupted_entering(job):
    wait_for_all("enter")
    if job.is_victim:
        real = initialize.check_backend
        initialize.check_backend = lambda *_: signal.raise_signal(signal.SIGINT)
        try:
            job.initialize()
        except KeyboardInterrupt:
            say("interrupted", at=time.monotonic())
        initialize.check_backend = real
    else:
        job.expect_error(job.initialize)
    # All are alive. Without this wait, others might join the new attempt first.
    wait_for_all("reported")
    job.initialize()
    job.call()
    say("goes on")


def wait_for_all(where):
    store = JaxStore(where)
    store.write(str(jax.process_index()), "")
    while None in [store.read(str(p)) for p in range(jax.process_count())]:
        time.sleep(0.01)  # forever, if one is missing: the launcher has a timeout


def exists_twice(job):
    for _ in range(20):
        job.call()
    say("goes on")


def left():
    """Returns the shared memory and sockets that this process holds."""
    found = []
    for path in pathlib.Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(path).split(":")[0])
        except FileNotFoundError:  # the directory itself
            continue
    maps = pathlib.Path("/proc/self/maps").read_text()
    return {
        "memory": found.count("/memfd"),
        "sockets": found.count("socket"),
        "mappings": maps.count("memfd:jax_ub ("),
    }


# The scenarios in which the failing process does not reach the end of `main`.
LOSING = (
    coordinator_dies,
    dies_before,
    dies_inside,
    dies_after,
    raises,
    is_missing,
    dies_connecting,
    dies_entering,
)
KEEPING = (
    *(stops, other_shape, other_program, leaves_a_call_out, compiles_longer),
    *(exists_twice, is_interrupted_entering),
)
# The scenarios that call `initialize_ub` themselves.
ENTERING = (is_missing, dies_connecting, dies_entering, is_interrupted_entering)
SCENARIOS = {scenario.__name__: scenario for scenario in (*LOSING, *KEEPING)}


def main():
    scenario, method = sys.argv[1], (sys.argv[2] if sys.argv[2:] else "direct")
    jax.distributed.initialize()
    jax.device_put(np.zeros(1)).block_until_ready()
    job = Job(method)
    before = left()
    if SCENARIOS[scenario] not in ENTERING:
        job.initialize()
    SCENARIOS[scenario](job)
    begin = time.monotonic()
    ub.destroy_ub()
    seconds = time.monotonic() - begin
    deadline = time.monotonic() + 30  # XLA may still hold the last results
    while left()["mappings"] > before["mappings"] and time.monotonic() < deadline:
        time.sleep(0.01)
    say("left", before=before, after=left(), seconds=seconds)
    end(jax.process_count() - (SCENARIOS[scenario] in LOSING))


def end(num_processes):
    """Exits without JAX's shutdown barrier, the coordinator last."""
    store = JaxStore("ends")
    if jax.process_index():
        store.write(str(jax.process_index()), str(os.getpid()))
        os._exit(0)
    for process in range(1, num_processes):
        while (pid := store.read(str(process))) is None or os.path.exists(
            f"/proc/{pid}"
        ):
            time.sleep(0.01)  # forever, if it does not end: the launcher has a timeout
    os._exit(0)


if __name__ == "__main__":
    main()
