"""Interrupts one of two processes at many places of `initialize_ub` and `destroy_ub`.

    python -m jax_ub launch -n 2 --linger 5 tests/processes/interrupts.py SEED STRIDE

`test_interrupts.py` launches it. Both processes use the same places, with up to STRIDE
lines of `initialize_ub` between them.
"""

import gc
import linecache
import pathlib
import random
import sys
import time

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_ub as ub
from jax_ub._src.runtime import communicators
from jax_ub._src.runtime.bootstrap import JaxStore

FOLDER = str(pathlib.Path(ub.__file__).parent)
SOON_S = 30.0  # far below JAX_UB_TIMEOUT_S


def interrupted(call, line, begin):
    """Raises KeyboardInterrupt at a line of jax_ub; returns whether it was reached.

    Args:
        call: the function to interrupt.
        line: the number of lines of jax_ub to execute before.
        begin: the function in which to begin counting.
    """
    left = [line]
    has_begun = [False]
    has_raised = [False]
    previous = {}  # the line that each frame has executed last

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        has_begun[0] |= frame.f_code.co_name == begin
        # Python traces the line of a `with` again when its body ends. It handles no
        # signal between the body and `__exit__`, so it is not interrupted there.
        number = frame.f_lineno
        text = linecache.getline(frame.f_code.co_filename, number).lstrip()
        ends_with = text.startswith("with ") and previous.get(frame, 0) > number
        previous[frame] = number
        if event == "line" and has_begun[0] and not ends_with:
            left[0] -= 1
            if left[0] < 0 and not has_raised[0]:
                has_raised[0] = True
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return has_raised[0]


class Pair:
    """Runs the same steps in two processes."""

    def __init__(self):
        self.me = jax.process_index()
        self.mesh = Mesh(np.array(jax.devices()), ("tp",))
        self._store = JaxStore("interrupts")
        self._step = 0

    def exchange(self, value):
        """Waits for the other process, and returns its message."""
        self._step += 1
        self._store.write(f"{self._step}-{self.me}", value)
        while (said := self._store.read(f"{self._step}-{1 - self.me}")) is None:
            time.sleep(0.001)  # forever, if it is missing: the launcher has a timeout
        return said

    def initialize(self):
        ub.initialize_ub((64, 64), 2, mesh=self.mesh)

    def check_nothing_is_left(self):
        assert not ub.is_ub_initialized()
        assert not communicators.connections()
        gc.collect()
        maps = pathlib.Path("/proc/self/maps").read_text()
        assert maps.count("memfd:jax_ub (") == 0, maps

    def check_call(self):
        sharding = NamedSharding(self.mesh, P("tp"))
        whole = np.arange(8, dtype=np.float32)[:, None]
        x = jax.make_array_from_callback((8, 1), sharding, lambda i: whole[i])
        program = jax.shard_map(
            lambda x: ub.all_reduce(x, axis_name="tp"),
            mesh=self.mesh,
            in_specs=P("tp"),
            out_specs=P(),
        )
        y = jax.block_until_ready(jax.jit(program)(x))
        found = np.asarray(y.addressable_shards[0].data)
        np.testing.assert_array_equal(found, whole[:4] + whole[4:])

    def destroy_is_interrupted(self, victim, line):
        """Checks that a second `destroy_ub` completes the first."""
        self.initialize()
        has_come = True
        if self.me == victim:
            has_come = interrupted(ub.destroy_ub, line, "destroy_ub")
        ub.destroy_ub()
        self.check_nothing_is_left()
        return self.goes_on(has_come)

    def initialize_is_interrupted(self, victim, line):
        """Checks that the other process fails soon."""
        has_come = True
        if self.me == victim:
            has_come = interrupted(self.initialize, line, "publish_pid")
            assert ub.is_ub_initialized() == (not has_come)
            assert bool(communicators.connections()) == (not has_come)
        else:
            begin = time.monotonic()
            try:
                self.initialize()
            except ub.errors.CommunicatorError as error:
                assert not isinstance(error, ub.errors.TimeoutError), error
            assert time.monotonic() - begin < SOON_S
        ub.destroy_ub()
        self.check_nothing_is_left()
        return self.goes_on(has_come)

    def goes_on(self, has_come):
        victim_has_come = self.exchange(str(has_come)) == str(has_come) == "True"
        self.initialize()
        jax.clear_caches()
        self.check_call()
        self.exchange("called")
        ub.destroy_ub()
        self.check_nothing_is_left()
        return victim_has_come


def main():
    seed, stride = map(int, sys.argv[1:])
    jax.distributed.initialize()
    pair = Pair()
    gc.freeze()  # collections need not traverse the objects of all modules
    for what, longest in (
        (pair.destroy_is_interrupted, 1 + stride // 100),
        (pair.initialize_is_interrupted, stride),
    ):
        for victim in (0, 1):
            steps, line, count = random.Random(seed), 0, 0
            while what(victim, line):
                line += steps.randint(1, longest)
                count += 1
            print(f"{what.__name__} of {victim}: {count} of {line} lines", flush=True)
    print("passed", flush=True)


if __name__ == "__main__":
    main()
