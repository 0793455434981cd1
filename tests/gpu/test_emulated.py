"""The programs of the GPU check, by JAX's GPU runtime on emulated GPUs.

It compiles, captures and replays them. Kernels that XLA generates cannot run. The tests
need JAX's plugin for CUDA, and the emulation under the names of NVIDIA's libraries:
JAX_UB_EMULATED_GPU is the folder `emulated_gpu` of a build of the C++ tests.
"""

import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = os.environ.get("JAX_UB_EMULATED_GPU")

pytestmark = [
    pytest.mark.skipif(not LIBRARIES, reason="JAX_UB_EMULATED_GPU is not set"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax_plugins") is None, reason="no CUDA plugin of JAX"
    ),
]

CAPTURED = "--xla_gpu_graph_min_graph_size=1"
EAGER = "--xla_gpu_enable_command_buffer="
TIMEOUT_S = 60
# Loading a kernel holds a lock of the process until its GPU has finished all work.
DRAINING = {"EMULATED_LOADS_DRAIN": "1"}


def run(*command, gpus, flags, delay_us=0, status=0, settings=None):
    """Runs a command on emulated GPUs and returns its output.

    It fails the test if the exit status is wrong or the command broke a rule of CUDA.
    """
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(HERE / "emulated"), str(ROOT), *sys.path]
            ),
            "LD_LIBRARY_PATH": str(pathlib.Path(LIBRARIES).resolve()),
            "EMULATED_GPUS": str(gpus),
            "EMULATED_DELAY_US": str(delay_us),
            "JAX_PLATFORMS": "cuda",
            "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # of the versions of cuDNN, ...
            "JAX_UB_TIMEOUT_S": str(TIMEOUT_S),
            "XLA_FLAGS": flags,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            **(settings or {}),
        },
    )
    assert done.returncode == status, done.stdout
    assert "emulated GPU:" not in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("flags", [CAPTURED, EAGER])
def test_local_ops_are_exact(flags):
    printed = run(HERE / "local.py", "--short", gpus=1, flags=flags)
    assert "all right on Emulated GPU" in printed


@pytest.mark.parametrize("flags", [CAPTURED, EAGER])
def test_fp8_operands_are_exact(flags):
    printed = run(HERE / "local.py", "--fp8", "--short", gpus=1, flags=flags)
    assert "all right on Emulated GPU" in printed
    launch = ("-m", "jax_ub", "launch", "-n", 3)
    program = (HERE / "ranks.py", "--fp8", "--rounds", 1)
    printed = run(*launch, *program, gpus=3, flags=flags)
    assert "all right: 3 ranks on Emulated GPU" in printed
    assert printed.count("right: scaled ") == 4
    assert printed.count("right: scaled_rows ") == 4
    assert "plain jax.lax" not in printed


def test_scales_of_blocks_are_exact_on_blackwell():
    program = ("-m", "jax_ub", "launch", "-n", 2, HERE / "ranks.py", "--fp8")
    settings = {"EMULATED_CAPABILITY": "100"}
    printed = run(*program, "--rounds", 1, gpus=2, flags=CAPTURED, settings=settings)
    assert "all right: 2 ranks on Emulated GPU" in printed
    assert printed.count("right: scaled_blocks ") == 4
    assert "plain jax.lax" not in printed


@pytest.mark.parametrize(
    ("processes", "each", "flags", "delay_us", "settings"),
    [
        (1, 4, CAPTURED, 0, {}),
        (1, 8, CAPTURED, 0, DRAINING),
        (3, 1, CAPTURED, 0, {"EMULATED_QUEUES": "1"}),
        (2, 2, CAPTURED, 100, DRAINING),
        (2, 2, EAGER, 100, {}),
    ],
)
def test_every_op_and_method_is_exact(processes, each, flags, delay_us, settings):
    launch = ("-m", "jax_ub", "launch", "-n", processes, "--devices-per-process", each)
    program = (HERE / "ranks.py", "--rounds", 2, "--calls", 3, "--dtypes", 1)
    ranks = processes * each
    printed = run(
        *(*launch, *program),
        gpus=ranks,
        flags=flags,
        delay_us=delay_us,
        settings=settings,
    )
    assert f"all right: {ranks} ranks on Emulated GPU" in printed
    assert printed.count("right: ") == 4 * 4 + 1 + 1
    assert "plain jax.lax" not in printed


@pytest.mark.parametrize("flags", [CAPTURED, EAGER])
def test_a_death_is_reported_at_once(flags):
    launch = ("-m", "jax_ub", "launch", "-n", 3, "--linger", 60, "--grace", 1)
    faults = (ROOT / "tests/processes/faults.py", "dies_inside", "ring_exchange")
    status = 128 + signal.SIGKILL
    printed = run(*launch, *faults, gpus=3, flags=flags, status=status)
    said = [json.loads(line[4:]) for line in printed.splitlines() if '"what"' in line]
    (death,) = (one for one in said if one["what"] == "dies")
    errors = [one for one in said if one["what"] == "error"]
    assert sorted(error["process"] for error in errors) == [0, 1], printed
    for error in errors:
        assert "rank 2 (process 2, pid" in error["text"], error["text"]
        assert error["text"].count("died") == 1, error["text"]
        assert error["at"] - death["at"] < TIMEOUT_S


def test_processes_share_a_gpu():
    launch = ("-m", "jax_ub", "launch", "-n", 2)
    program = (HERE / "ranks.py", "--share-gpu", "--rounds", 1, "--dtypes", 1)
    printed = run(*launch, *program, gpus=1, flags=CAPTURED)
    assert "all right: 2 ranks on Emulated GPU" in printed


# Two threads dispatch one program each. Process 0 enqueues them in a different order.
TWO_ORDERS = """
import json, threading, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.distributed.initialize()
import jax_ub as ub
num_ranks = len(jax.devices())
mesh = Mesh(np.array(jax.devices()), ("tp",))
ub.initialize_ub((8 * num_ranks, 16), num_ranks, mesh=mesh, dtype=jnp.float32)

def put(value, spec):
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(value.shape, sharding, lambda at: value[at])

x = put(np.ones((8 * num_ranks, 16), np.float32), P("tp"))
w = put(np.ones((16, 8 * num_ranks), np.float32), P(None, "tp"))

def first(x, w):
    return ub.all_gather_matmul(x, w, axis_name="tp", method="ring_exchange")

def second(x, w):
    return ub.all_gather_matmul(x, w, axis_name="tp", method="ring_exchange")

programs = [
    jax.jit(jax.shard_map(one, mesh=mesh, check_vma=False, out_specs=P(None, "tp"),
                          in_specs=(P("tp"), P(None, "tp")))).lower(x, w).compile()
    for one in (first, second)]
for program in programs:
    (y,) = program(x, w).addressable_shards
    assert (np.asarray(y.data) == 16).all()

came = [threading.Event(), threading.Event()]
results = {}
def dispatch(n, comes_first):
    if not comes_first: came[1 - n].wait()
    results[n] = programs[n](x, w)
    came[n].set()

leads = 0 if jax.process_index() == 0 else 1
threads = [threading.Thread(target=dispatch, args=(n, n == leads)) for n in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
began = time.monotonic()
try:
    (y,) = results[leads].addressable_shards
    said = {"nan": bool(np.isnan(np.asarray(y.data)).all())}
except jax.errors.JaxRuntimeError as error:  # a peer was faster, so that it did not run
    said = {"nan": "make different calls" in str(error)}
while "error" not in said:
    try:
        ub.check_communicators()
    except ub.errors.CommunicatorError as error:
        said["error"] = str(error)
print("said", json.dumps(said | {"seconds": time.monotonic() - began}), flush=True)
"""


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("flags", [CAPTURED, EAGER])
def test_programs_that_processes_enqueue_in_different_orders_fail_on_all(
    tmp_path, flags, processes
):
    script = tmp_path / "two_orders.py"
    script.write_text(TWO_ORDERS)
    launch = ("-m", "jax_ub", "launch", "-n", processes, "--linger", 60)
    printed = run(*launch, script, gpus=processes, flags=flags)
    said = [
        json.loads(line.split("said ", 1)[1])
        for line in printed.splitlines()
        if "said {" in line
    ]
    assert len(said) == processes, printed
    for one in said:
        assert one["nan"]
        assert one["seconds"] < TIMEOUT_S
        for part in ("make different calls", "jit_first", "jit_second"):
            assert part in one["error"], one["error"]


# The ranks behave as two processes. Closing waits for the other rank.
DROPS_ONE = """
import threading, time
from jax_ub import _cuda

ends = [_cuda.endpoint([rank], 65536, "here") for rank in range(2)]
held = {}

def connect(rank):
    peer = 1 - rank
    held[rank] = _cuda.connect(
        ends[rank], name="tp", devices=[2 * rank, 2 * rank + 1], processes=[0, 1],
        process=rank, addresses={peer: ends[peer].address},
        tokens={peer: ends[peer].token}, timeout_s=20,
        capabilities={peer: ends[peer].capabilities})

def drop():
    begins.set()
    del held[0]
    events.append("dropped")

def at_once(*functions):
    threads = [threading.Thread(target=one) for one in functions]
    for thread in threads: thread.start()
    for thread in threads: thread.join()

def close():
    begins.wait()
    time.sleep(0.5)  # until the other one is in its destructor: no event can tell
    events.append("closes")
    held[1].close()

begins, events = threading.Event(), []
at_once(lambda: connect(0), lambda: connect(1))
at_once(drop, close)
print(events)
"""


def test_a_dropped_communicator_does_not_block_other_threads():
    assert run("-c", DROPS_ONE, gpus=2, flags="") == "['closes', 'dropped']\n"
