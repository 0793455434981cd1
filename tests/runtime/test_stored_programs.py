"""Programs that one process compiled and another one runs."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import os, sys
os.environ["NPROC"] = "16"
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
import numpy as np
import jax_ub as ub
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()), ("tp",))
rows, columns = P("tp"), P(None, "tp")
run = jax.jit(jax.shard_map(
    lambda x, w: ub.all_gather_matmul(x, w, axis_name="tp"),
    mesh=mesh, in_specs=(rows, columns), out_specs=columns,
))
x, w = np.ones((4, 6), "float32"), np.ones((6, 8), "float32")
place = lambda v, spec: jax.device_put(v, jax.sharding.NamedSharding(mesh, spec))
operands = place(x, rows), place(w, columns)
"""

CACHED = """
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
y = run(*operands)
assert (np.asarray(y) == 6).all()
print(events.count("/jax/compilation_cache/cache_hits"))
"""

SERIALIZED = """
import pickle
from jax.experimental import serialize_executable
if sys.argv[2] == "write":
    stored = serialize_executable.serialize(run.lower(*operands).compile())
    pickle.dump(stored, open(sys.argv[1] + "/program", "wb"))
else:
    ub.register_targets()
    stored = pickle.load(open(sys.argv[1] + "/program", "rb"))
    y = serialize_executable.deserialize_and_load(*stored)(*operands)
    assert (np.asarray(y) == 6).all()
    print("loaded")
"""


def run(program, *arguments):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_the_persistent_compilation_cache_stores_overlapped_programs(tmp_path):
    first, second = run(CACHED, tmp_path), run(CACHED, tmp_path)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, second.stderr
    assert int(second.stdout) > int(first.stdout)


def test_compiled_program_runs_in_a_process_that_never_lowered_it(tmp_path):
    written = run(SERIALIZED, tmp_path, "write")
    assert written.returncode == 0, written.stderr
    read = run(SERIALIZED, tmp_path, "read")
    assert read.stdout == "loaded\n", read.stderr
