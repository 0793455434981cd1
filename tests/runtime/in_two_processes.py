"""Run by test_communicators.py: two processes of two devices, and all they agree on."""

import functools
import os
import pathlib
import re
import sys
import time
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.sharding import Mesh

import jax_ub as ub
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.runtime import (
    communicators,
    cpu_engine,
    registry,
    transports,
    tuned_file,
)
from jax_ub._src.runtime.bootstrap import JaxStore
from jax_ub._src.runtime.tuned_file import TunedKey, environment
from jax_ub._src.tools import doctor

jax.distributed.initialize()
ME = jax.process_index()
DEVICES = np.array(jax.devices())
MESH = Mesh(DEVICES, ("tp",))
DATA = np.random.default_rng(0)
X, W = (
    DATA.integers(-1, 2, shape).astype(np.float32) for shape in ((64, 32), (32, 16))
)
SHAPE = X.shape
DIRECT = {"method": "direct"}
SOON_S = 30  # far below JAX_UB_TIMEOUT_S


def raises(kind, text, function, *arguments, **options):
    try:
        function(*arguments, **options)
    except kind as error:
        assert re.search(text, str(error)), error
        return
    raise AssertionError(f"no {kind.__name__}: {text}")


def initialize(shape=SHAPE, size=4, **options):
    ub.initialize_ub(shape, size, dtype=jnp.float32, **{"mesh": MESH, **options})


def put(array, mesh, spec):
    sharding = jax.NamedSharding(mesh, spec)
    return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])


def product(mesh, axis="tp", x=X, w=W, **options):
    """Computes AG+GEMM on every group of the mesh, and compares it with numpy."""

    def call(x, w):
        return ub.all_gather_matmul(x, w, axis_name=axis, **options)

    specs = (P(axis), P(None, axis))
    run = jax.jit(
        jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(None, axis))
    )
    y = run(put(x, mesh, specs[0]), put(w, mesh, specs[1]))
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), (x @ w)[shard.index])


def unconnected_groups_say_what_to_do():
    with warnings.catch_warnings(record=True) as found:
        product(MESH)
    assert "call ub.initialize_ub" in ub.fallbacks()[-1].reason
    assert [ub.fallbacks()[-1].reason in str(each.message) for each in found] == [True]
    raises(
        NotImplementedError, "which are not connected", product, MESH, method="direct"
    )


def groups_inside_a_process_need_nothing():
    mesh = Mesh(DEVICES.reshape(2, 2), ("dp", "tp"))
    before = len(ub.fallbacks())
    product(mesh, method="ring_exchange")
    initialize(size=2, mesh=mesh)
    product(mesh, ub_name="qkv")
    assert not communicators.connections()
    assert len(ub.fallbacks()) == before
    assert ub.memory_report().axes[0].shared_bytes == 0
    ub.destroy_ub()


def connected_groups_run_every_method():
    before = len(ub.fallbacks())
    initialize(ub_cfgs={"fc1_fprop": {"method": "pipeline", "num_splits": 3}})
    for method in (None, "direct", "ring_exchange", "pipeline", "external"):
        product(MESH, method=method)
    for name in ("qkv", "fc1"):
        product(MESH, ub_name=name)
    (connection,) = communicators.connections()
    assert connection.group == tuple(device.id for device in DEVICES)
    # A call that was compiled before `initialize_ub` is compiled again, not taken from
    # a cache.
    assert len(ub.fallbacks()) == before
    assert connection.communicator.calls >= 7
    held = ub.memory_report()
    assert held.axes[0].shared_bytes == connection.communicator.size_bytes
    assert held.axes[0].num_ranks == 2
    ub.destroy_ub()
    assert not communicators.connections()


def groups_across_processes_keep_their_order():
    mesh = Mesh(DEVICES.reshape(2, 2).T[::-1], ("dp", "tp"))
    initialize(size=2, mesh=mesh)
    assert len(communicators.connections()) == 2
    product(mesh, method="direct")
    # Other groups of the same devices are not connected.
    other = Mesh(DEVICES[[0, 2, 1, 3]].reshape(2, 2)[:, ::-1], ("dp", "tp"))
    raises(
        NotImplementedError, "which are not connected", product, other, method="direct"
    )
    ub.destroy_ub()


def several_axes_are_connected_at_once():
    mesh = Mesh(DEVICES.reshape(2, 2), ("outer", "inner"))
    initialize(size=2, mesh=mesh, axis_name="outer")
    initialize(size=2, mesh=mesh, axis_name="inner")
    initialize(size=4, mesh=mesh, axis_name=("outer", "inner"))
    for axis in ("outer", "inner", ("outer", "inner")):
        product(mesh, axis, ub_name="qkv", method="direct")
    ub.destroy_ub("outer")
    product(mesh, "inner", method="direct")
    ub.destroy_ub()


def an_axis_connects_more_groups_than_an_earlier_axis():
    whole = Mesh(DEVICES.reshape(2, 2).T, ("dp", "tp"))
    part = Mesh(whole.devices[0], ("part",))
    initialize(size=2, mesh=part, axis_name="part")
    initialize(size=2, mesh=whole)
    earlier, later = communicators.connections()
    assert earlier.generation < later.generation
    product(part, "part", method="direct")
    product(whole, ub_name="qkv", method="direct")
    ub.destroy_ub()


def axes_of_the_same_devices_share_their_memory():
    mesh = Mesh(DEVICES.reshape(2, 2), ("outer", "inner"))
    both = ("outer", "inner")
    initialize(mesh=mesh, axis_name=both)
    (connection,) = communicators.connections()
    text = "with .* bytes per rank, but this shape needs"
    raises(ValueError, text, initialize, (2 * SHAPE[0], SHAPE[1]))
    half = (SHAPE[0] // 2, SHAPE[1])
    initialize(half)
    assert communicators.connections() == (connection,)
    product(mesh, both, ub_name="qkv")
    product(MESH, x=X[: half[0]], ub_name="qkv")
    raises(ValueError, r"shape=\(64, 32\)", product, MESH, ub_name="qkv")
    first, second = ub.memory_report().axes
    assert first.shared_bytes == connection.communicator.size_bytes
    assert (second.shared_bytes, second.shares_with) == (0, both)
    assert "in addition to those of axis ('outer', 'inner')" in str(second)
    ub.destroy_ub(both)
    (rest,) = ub.memory_report().axes
    assert (rest.shared_bytes, rest.shares_with) == (first.shared_bytes, None)
    product(MESH, x=X[: half[0]], method="ring_exchange")
    # A process with another initialized axis is detected.
    if ME == 1:
        ub.destroy_ub()
    text = "differ in the groups that are connected already"
    initialize_again = functools.partial(initialize, half, mesh=mesh, axis_name=both)
    raises(ub.errors.CommunicatorError, text, initialize_again)
    ub.destroy_ub()
    assert not communicators.connections()


def the_capacity_is_the_same_on_all_processes():
    initialize((16, 32))
    product(MESH)
    assert "64 tokens of 32 features" in ub.fallbacks()[-1].reason
    raises(ValueError, r"shape=\(64, 32\)", product, MESH, method="direct")
    ub.destroy_ub()
    # One row per rank in four splits needs four slots per rank.
    initialize((16, 32))
    x = np.ones((4, 128), np.float32)
    w = np.ones((128, 16), np.float32)
    product(MESH, x=x, w=w, method="ring_exchange")
    raises(ValueError, "hold", product, MESH, x=x, w=w, method="pipeline")
    ub.destroy_ub()


def an_invalid_argument_is_reported_by_all():
    kind, text = ub.errors.CommunicatorError, "process 1 failed: .*num_sm.* = 99"
    if ME == 1:
        kind, text = ub.errors.ConfigurationError, "num_sm.* = 99"
    cfgs = {"qkv_fprop": {"num_sm": 99}} if ME == 1 else {}
    raises(kind, text, initialize, ub_cfgs=cfgs)
    kind, text = ub.errors.CommunicatorError, "process 0 failed: .*not 'model'"
    if ME == 0:
        kind = ub.errors.ConfigurationError
        text = "not 'model'"
    mesh = Mesh(DEVICES, ("tp" if ME == 0 else "model",))
    raises(kind, text, initialize, mesh=mesh, axis_name="model")
    kind = ub.errors.CommunicatorError
    text = "process 1 failed: bootstrap_backend = 'nccl'"
    if ME == 1:
        kind, text = ub.errors.UnknownNameError, "backend = 'nccl' is unknown"
    raises(kind, text, initialize, bootstrap_backend="nccl" if ME == 1 else None)


def different_arguments_are_reported_at_once():
    begin, error = time.monotonic(), ub.errors.CommunicatorError
    text = "differ in bootstrap_backend: process 0 has jax, process 1 has mpi"
    backend = "mpi" if ME == 1 else None
    raises(error, text, initialize, bootstrap_backend=backend)
    text = r"in axis_name: process 0 has \('tp',\), process 1 has \('model',\)"
    mesh = Mesh(DEVICES.reshape(1, 4), ("model", "tp") if ME == 0 else ("tp", "model"))
    name = "tp" if ME == 0 else "model"
    raises(error, text, initialize, mesh=mesh, axis_name=name)
    assert time.monotonic() - begin < SOON_S


def an_invalid_environment_variable_is_reported_by_all():
    wrong = {
        "JAX_UB_ALLOW_TF32": "yes",
        "JAX_UB_NUM_THREADS": "many",
        "JAX_UB_TIMEOUT_S": "soon",
    }
    for name, value in wrong.items():
        kind, text = ub.errors.CommunicatorError, f"process 1 failed: {name} = "
        before = os.environ.get(name)
        if ME == 1:
            kind, text = ub.errors.ConfigurationError, f"{name} = '{value}'"
            os.environ[name] = value
        begin = time.monotonic()
        raises(kind, text, initialize)
        assert time.monotonic() - begin < SOON_S
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
    assert not communicators.connections()


def differences_are_reported_with_both_values():
    error = ub.errors.CommunicatorError
    text = r"differ in shape: process 0 has \(64, 32\), process 1 has \(65, 32\)"
    raises(error, text, initialize, (64 + ME, 32))
    text = (
        r"in ub_cfgs\['proj_fprop'\]\['num_splits'\].*process 0 has 2, process 1 has 3"
    )
    raises(error, text, initialize, ub_cfgs={"proj_fprop": {"num_splits": 2 + ME}})
    text = "differ in ub_cfgs.*'method'.* process 0 has None, process 1 has"
    cfgs = {"own_fprop": {"comm_type": "AG"}} if ME == 1 else {}
    raises(error, text, initialize, ub_cfgs=cfgs)
    mesh = Mesh(DEVICES[::-1] if ME else DEVICES, ("tp",))
    raises(error, "differ in the devices of the ranks", initialize, mesh=mesh)
    assert not ub.is_ub_initialized()


def tuned_choices_are_the_same_on_all_processes():
    def tuned_to(num_splits, name):
        folder = pathlib.Path(os.environ["UB_TEST_FOLDER"])
        case = TunedKey("all_gather_matmul", 4, *X.shape, W.shape[1], "float32")
        path = folder / f"{name}.{ME}.json"
        tuned_file.write(
            path,
            {environment(): {case: (MethodChoice(Method.PIPELINE, num_splits), {})}},
        )
        return str(path)

    error, text = ub.errors.CommunicatorError, "differ in the tuned choices"
    others = tuned_to(2 + ME, "others")
    raises(error, text, initialize, ub_cfgs=others)
    os.environ["JAX_UB_TUNED"] = others
    raises(error, text, initialize)
    del os.environ["JAX_UB_TUNED"]
    # Each process has a separate file with the same choices.
    initialize(ub_cfgs=tuned_to(2, "same"))
    product(MESH)
    ub.destroy_ub()


def a_failed_connection_is_reported_by_all():
    class Broken:
        """A fake engine whose second group cannot connect in process 1."""

        def __getattr__(self, name):
            return getattr(cpu_engine.load(), name)

        def connect(self, *arguments, **options):
            if ME == 1 and options["devices"][0] == DEVICES[1].id:
                raise RuntimeError("CommunicatorError: no memory is left")
            return cpu_engine.load().connect(*arguments, **options)

    transports.cpu_engine = types.SimpleNamespace(load=Broken, why_not=lambda: None)
    text = "no memory is left" if ME == 1 else "process 1"
    mesh = Mesh(DEVICES.reshape(2, 2).T, ("dp", "tp"))
    begin = time.monotonic()
    raises(ub.errors.CommunicatorError, text, initialize, size=2, mesh=mesh)
    assert time.monotonic() - begin < SOON_S
    transports.cpu_engine = cpu_engine
    assert not communicators.connections()
    initialize(size=2, mesh=mesh)
    product(mesh, method="direct")
    ub.destroy_ub()


def rounds_do_not_grow():
    def held():
        return len(os.listdir("/proc/self/fd")), len(
            open("/proc/self/maps").readlines()
        )

    initialize()
    ub.destroy_ub()
    before = held()
    for _ in range(50):
        initialize()
        ub.destroy_ub()
    after = held()
    assert after[0] <= before[0], (before, after)
    assert after[1] <= before[1] + 8, (before, after)
    store = JaxStore("any")
    left = dict(store._client.key_value_dir_get("jax_ub/"))
    # The PIDs of the processes are kept in the store.
    left = {k: v for k, v in left.items() if not k.startswith("jax_ub/processes/")}
    # The other process may have begun the next call already, and written its messages.
    assert len(left) <= 2, left


def the_doctor_shows_what_is_connected():
    initialize()
    found = {finding.name: finding for finding in doctor.examine()}
    group = f"devices {[device.id for device in DEVICES]}"
    assert found[group].text == "processes [0, 1]: connected"
    assert found["pipeline (NONE)"].text == "proj_fprop, fc2_fprop"
    assert found['method "direct"'].text == "runs on 2 devices"
    ub.destroy_ub()


def threads_are_shared():
    own = cpu_engine.load().num_threads()
    initialize()
    assert cpu_engine.load().num_threads() == max(1, own // 2)
    ub.destroy_ub()
    assert cpu_engine.load().num_threads() == own


def a_missing_process_is_named_and_may_come_later():
    store = JaxStore("test")
    if ME == 0:
        before = os.environ["JAX_UB_TIMEOUT_S"]
        os.environ["JAX_UB_TIMEOUT_S"] = "1"
        text = "process 1 did not take part within 1 s"
        raises(ub.errors.TimeoutError, text, initialize)
        os.environ["JAX_UB_TIMEOUT_S"] = before
        store.write("missed", "")
    else:
        while store.read("missed") is None:
            time.sleep(0.01)  # for ever, if it is not missed: the test gives up
    initialize()
    product(MESH, **DIRECT)
    ub.destroy_ub()


for scenario in (
    unconnected_groups_say_what_to_do,
    groups_inside_a_process_need_nothing,
    connected_groups_run_every_method,
    groups_across_processes_keep_their_order,
    several_axes_are_connected_at_once,
    an_axis_connects_more_groups_than_an_earlier_axis,
    axes_of_the_same_devices_share_their_memory,
    the_capacity_is_the_same_on_all_processes,
    an_invalid_argument_is_reported_by_all,
    different_arguments_are_reported_at_once,
    an_invalid_environment_variable_is_reported_by_all,
    differences_are_reported_with_both_values,
    tuned_choices_are_the_same_on_all_processes,
    a_failed_connection_is_reported_by_all,
    rounds_do_not_grow,
    the_doctor_shows_what_is_connected,
    threads_are_shared,
    a_missing_process_is_named_and_may_come_later,
):
    scenario()
    assert not registry.axes()
    sys.stdout.write(f"passed {scenario.__name__}\n")
