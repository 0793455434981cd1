import contextlib
import gc
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from programs import dp_tp_mesh, on_ranks, tp_mesh

import jax_ub as ub
from jax_ub._src.runtime import initialize, registry
from jax_ub.errors import ShapeContractError

NONE, FP8 = ub.UserBufferQuantizationMode.NONE, ub.UserBufferQuantizationMode.FP8
SHAPE = (64, 32)


def test_ring_exchange_overlaps_have_their_own_type():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    assert type(ub.get_ub("qkv_fprop")) is ub.CommOverlapP2P
    for name in ("proj_fprop", "qkv_dgrad", "proj_wgrad"):
        assert type(ub.get_ub(name)) is ub.CommOverlap


def test_an_overlap_is_immutable():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    found = ub.get_ub("proj_fprop")
    assert (found.name, found.method) == ("proj_fprop", "pipeline")
    assert found.comm_type is ub.CommOverlapType.RS
    assert found.config["num_sm"] == 16
    assert found.buffer_shape == SHAPE
    assert found.buffer_dtype == jnp.bfloat16
    assert found.size_bytes == 64 * 32 * 2
    with pytest.raises(AttributeError):
        found.method = "bulk"


def test_a_reduce_scatter_ring_has_buffers_for_received_sums():
    cfgs = {"proj_fprop": {"method": "ring_exchange"}}
    ub.initialize_ub(SHAPE, 4, ub_cfgs=cfgs, mesh=tp_mesh(4))
    assert ub.get_ub("proj_fprop").buffer_shape == (64 * 7 // 4, 32)
    assert ub.get_ub("qkv_fprop").buffer_shape == SHAPE


def test_fp8_buffers_have_one_byte_per_element():
    cfgs = {"proj_fprop": {"fp8_buf": True}}
    ub.initialize_ub(
        SHAPE, 4, quantization_modes=[NONE, FP8], ub_cfgs=cfgs, mesh=tp_mesh(4)
    )
    for name in ("qkv_fprop", "proj_fprop", "qkv_dgrad", "proj_wgrad"):
        assert ub.get_ub(name, use_fp8=True).buffer_dtype == np.uint8
        assert ub.get_ub(name).buffer_dtype == jnp.bfloat16
    for name in ("fc2_fprop", "qkv_wgrad"):
        assert ub.get_ub(name, use_fp8=True).buffer_dtype == jnp.bfloat16


def test_use_fp8_selects_the_fp8_mode_only():
    ub.initialize_ub(SHAPE, 4, use_fp8=True, mesh=tp_mesh(4))
    assert ub.get_ub("qkv_fprop", True).mode is FP8
    with pytest.raises(KeyError, match=r"\['FP8'\] only. Pass use_fp8=True"):
        ub.get_ub("qkv_fprop")


def test_every_mode_has_its_own_configuration():
    cfgs = [{"qkv_dgrad": {"method": "pipeline"}}, {}]
    ub.initialize_ub(
        SHAPE, 4, quantization_modes=[NONE, FP8], ub_cfgs=cfgs, mesh=tp_mesh(4)
    )
    assert ub.get_ub("qkv_dgrad").method == "pipeline"
    assert ub.get_ub("qkv_dgrad", use_fp8=True).method == "bulk"
    assert ub.get_ub("qkv_wgrad", use_fp8=True).method == "bulk"
    with pytest.raises(KeyError, match="qkv_wgrad"):
        ub.get_ub("qkv_wgrad")


def test_a_dgrad_override_applies_to_every_mode():
    cfgs = {"fc1_dgrad": {"method": "ring_exchange"}}
    ub.initialize_ub(
        SHAPE, 4, quantization_modes=[NONE, FP8], ub_cfgs=cfgs, mesh=tp_mesh(4)
    )
    for use_fp8 in (False, True):
        assert ub.get_ub("fc1_dgrad", use_fp8).comm_type is ub.CommOverlapType.RS
        with pytest.raises(ub.errors.UnknownOverlapError):
            ub.get_ub("fc1_wgrad", use_fp8)


def test_a_second_call_is_an_error_until_destroy_ub():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    with pytest.raises(RuntimeError, match="already initialized. Call ub.destroy_ub"):
        ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    ub.destroy_ub()
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))


def test_a_call_that_fails_leaves_nothing_behind():
    wrong = {"qkv_fprop": {"num_sm": 99}}
    with pytest.raises(ub.errors.ConfigurationError, match="is out of range"):
        ub.initialize_ub(SHAPE, 4, ub_cfgs=wrong, mesh=tp_mesh(4))
    assert not ub.is_ub_initialized()
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))


@pytest.mark.parametrize(
    "name",
    ["TIMEOUT_S", "FIRST_CALL_TIMEOUT_S", "NUM_THREADS", "ALLOW_TF32", "NVLS"],
    ids=str.lower,
)
def test_an_invalid_environment_variable_leaves_nothing_behind(name, monkeypatch):
    monkeypatch.setenv(f"JAX_UB_{name}", "many")
    with pytest.raises(ub.errors.ConfigurationError, match=f"JAX_UB_{name} = 'many'"):
        ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    assert not ub.is_ub_initialized()
    monkeypatch.delenv(f"JAX_UB_{name}")
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))


@pytest.mark.parametrize("name", ["TIMEOUT_S", "FIRST_CALL_TIMEOUT_S"], ids=str.lower)
@pytest.mark.parametrize("seconds", ["1e-320", "0.001", "0.0999"])
def test_a_timeout_too_short_for_any_call_is_rejected(name, seconds, monkeypatch):
    monkeypatch.setenv(f"JAX_UB_{name}", seconds)
    text = f"JAX_UB_{name} = '{seconds}' is too short .* Set at least 0.1 seconds"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    monkeypatch.setenv(f"JAX_UB_{name}", "0.1")
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))


def test_an_unknown_method_in_the_environment_is_rejected(monkeypatch):
    monkeypatch.setenv("JAX_UB_METHOD", "pipelines")
    with pytest.raises(ub.errors.UnknownNameError, match="JAX_UB_METHOD.*'pipeline'"):
        ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    assert not ub.is_ub_initialized()


def test_several_axes_can_be_initialized():
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = Mesh(devices, ("outer", "inner"))
    ub.initialize_ub(SHAPE, 4, mesh=mesh, axis_name="inner")
    ub.initialize_ub((128, 16), 2, mesh=mesh, axis_name="outer")
    ub.initialize_ub(SHAPE, 8, mesh=mesh, axis_name=("outer", "inner"))
    assert ub.get_ub("qkv_fprop", axis_name="outer").buffer_shape == (128, 16)
    assert ub.get_ub("qkv_fprop", axis_name=("outer", "inner")).tp_size == 8
    with pytest.raises(ub.errors.UnknownOverlapError, match="several axes have it"):
        ub.get_ub("qkv_fprop")
    text = r"axis_name = \('tp',\) is not initialized. Pass one of \[\('inner',\), "
    with pytest.raises(ub.errors.UnknownOverlapError, match=text):
        ub.get_ub("qkv_fprop", axis_name="tp")
    ub.destroy_ub("inner")
    assert ub.is_ub_initialized("outer")
    assert not ub.is_ub_initialized("inner")
    ub.destroy_ub()
    assert not ub.is_ub_initialized()


def test_destroy_ub_without_initialize_ub_does_nothing():
    ub.destroy_ub()
    ub.destroy_ub("tp")


def test_get_ub_before_initialize_ub_is_an_error():
    with pytest.raises(RuntimeError, match="no axis is initialized"):
        ub.get_ub("qkv_fprop")


@pytest.mark.parametrize("use_fp8", [NONE, 2, "fp8", None])
def test_only_a_bool_is_a_valid_use_fp8(use_fp8):
    ub.initialize_ub(SHAPE, 4, quantization_modes=[NONE, FP8], mesh=tp_mesh(4))
    with pytest.raises(TypeError, match="get_ub.*use_fp8 = .*True or False"):
        ub.get_ub("qkv_fprop", use_fp8)


@pytest.mark.parametrize("name", [None, 3, ["qkv_fprop"]])
def test_a_name_is_a_string(name):
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    with pytest.raises(ub.errors.ConfigurationTypeError, match="name is of type"):
        ub.get_ub(name)


def test_names_of_several_axes_are_listed_once():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    ub.initialize_ub(SHAPE, 2, axis_name="other")
    with pytest.raises(KeyError) as caught:
        ub.get_ub("no such")
    assert str(caught.value).count("'qkv_fprop'") == 1


def test_an_unknown_name_names_the_nearest():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))
    with pytest.raises(KeyError, match="Did you mean 'qkv_fprop'?") as caught:
        ub.get_ub("qkv_fprob")
    assert not str(caught.value).startswith('"')


def test_without_a_mesh_groups_are_consecutive_devices():
    ub.initialize_ub(SHAPE, 4)
    groups = registry.axes()[0].device_groups.groups
    ids = [device.id for device in jax.devices()]
    assert groups == tuple(tuple(ids[i : i + 4]) for i in range(0, len(ids), 4))


def test_the_mesh_of_set_mesh_is_the_default():
    with jax.set_mesh(dp_tp_mesh(2, 3)):
        ub.initialize_ub(SHAPE, 3)
    assert registry.axes()[0].device_groups.groups == ((0, 1, 2), (3, 4, 5))


def test_groups_follow_the_order_of_the_mesh():
    devices = np.array(jax.devices()[:4])[[2, 0, 3, 1]].reshape(2, 2).T
    ub.initialize_ub(SHAPE, 2, mesh=Mesh(devices, ("tp", "dp")))
    assert registry.axes()[0].device_groups.groups == ((2, 0), (3, 1))


@pytest.mark.parametrize("second", [ub.initialize_ub, ub.destroy_ub])
def test_a_thread_waits_while_another_one_changes_the_registry(monkeypatch, second):
    lock, steps, may_leave = registry.CHANGING, queue.Queue(), threading.Event()

    def tell(step):
        steps.put((threading.current_thread().name, step))

    class WatchedLock:
        def __enter__(self):
            tell("asks")
            return lock.__enter__()

        def __exit__(self, *error):
            lock.__exit__(*error)

    def change(*_):
        tell("begins")
        may_leave.wait(60)
        tell("ends")

    monkeypatch.setattr(registry, "CHANGING", WatchedLock())
    monkeypatch.setattr(initialize.connection_attempt, "connect", change)
    monkeypatch.setattr(registry, "add", lambda axis: None)
    monkeypatch.setattr(initialize.communicators, "finish_launches", change)
    arguments = (SHAPE, 4) if second is ub.initialize_ub else ()
    threads = [
        threading.Thread(target=ub.initialize_ub, args=(SHAPE, 4), name="first"),
        threading.Thread(target=second, args=arguments, name="second"),
    ]
    threads[0].start()
    found = []
    while ("first", "begins") not in found:
        found.append(steps.get(timeout=60))
    threads[1].start()
    found = [steps.get(timeout=60)]  # without the lock, the second thread begins
    with contextlib.suppress(queue.Empty):
        found.append(steps.get(timeout=0.2))
    may_leave.set()
    for thread in threads:
        thread.join()
    assert found == [("second", "asks")]
    order = [steps.get() for _ in range(3)]
    assert order == [("first", "ends"), ("second", "begins"), ("second", "ends")]


def test_init_and_destroy_do_not_grow():
    mesh = tp_mesh(4)

    def rounds(count):
        for _ in range(count):
            ub.initialize_ub(SHAPE, 4, quantization_modes=[NONE], mesh=mesh)
            ub.destroy_ub()
        gc.collect()
        return len(gc.get_objects())

    before = rounds(20)
    assert rounds(1000) <= before + 20


REFUSALS = {
    "a shape of one number": (dict(shape=(64,)), ValueError, "is not two sizes"),
    "no shape": (dict(shape=64), ValueError, "is not two sizes"),
    "a shape of a scalar array": (
        dict(shape=np.array(64)),
        ValueError,
        "is not two sizes",
    ),
    "a shape of bytes": (dict(shape=b"ab"), ValueError, "is not two sizes"),
    "a set of sizes": (dict(shape={64, 32}), ValueError, "is not two sizes"),
    "a shape of another world": (
        dict(shape=(1 << 62, 1 << 62)),
        ValueError,
        r"more than 2\*\*48 elements",
    ),
    "no tokens": (dict(shape=(0, 32)), ValueError, "is not positive"),
    "half a token": (dict(shape=(64.5, 32)), TypeError, "not an integer"),
    "no rank": (dict(tp_size=0), ValueError, "tp_size = 0 is not positive. Pass 1"),
    "a rank for every atom": (dict(tp_size=10**80), ValueError, "0 is too large. Pass"),
    "fewer than no tokens": (dict(shape=(-(10**30), 1)), ValueError, "is not positive"),
    "a true rank": (dict(tp_size=True), TypeError, "not an integer"),
    "another tp_size": (
        dict(tp_size=2),
        ValueError,
        r"tp_size = 2, but axis \('tp',\) of the mesh has 4 devices. Pass tp_size=4",
    ),
    "an axis twice": (
        dict(axis_name=("tp", "tp")),
        ShapeContractError,
        r"initialize_ub: axis_name = \('tp', 'tp'\) names a mesh axis twice",
    ),
    "another axis": (dict(axis_name="model"), ValueError, "not 'model'"),
    "no axis": (
        dict(axis_name=None),
        ShapeContractError,
        "initialize_ub: axis_name = None is not the name of a mesh axis",
    ),
    "a number as axis": (dict(axis_name=3), ShapeContractError, "axis_name = 3 is not"),
    "a mode as use_fp8": (dict(use_fp8=NONE), TypeError, "modes go in .*modes="),
    "an abstract mesh": (
        dict(mesh=jax.sharding.AbstractMesh((4,), ("tp",))),
        TypeError,
        "Pass a jax.sharding.Mesh",
    ),
    "a mode by name": (dict(quantization_modes=["FP8"]), TypeError, "which is no"),
    "a mode alone": (dict(quantization_modes=FP8), TypeError, "is not a list"),
    "modes in an array": (
        dict(quantization_modes=np.array([NONE, FP8])),
        TypeError,
        "is not a list",
    ),
    "a mode twice": (dict(quantization_modes=[FP8, FP8]), ValueError, "each mode"),
    "fp8 without its mode": (
        dict(use_fp8=True, quantization_modes=[NONE]),
        ValueError,
        "leave use_fp8 out",
    ),
    "an integer dtype": (dict(dtype=jnp.int8), ValueError, "not one of float32"),
    "no dtype": (dict(dtype="bytes!"), ValueError, "not one of float32"),
    "too few configurations": (dict(ub_cfgs=[{}, {}]), ValueError, "2 dictionaries"),
    "no configurations": (dict(ub_cfgs=7), TypeError, "Pass one of names"),
    "a layer in addition to its passes": (
        dict(ub_cfgs={"qkv": {"comm_type": "AG"}}),
        ValueError,
        r"\['qkv'\] configures the forward .* as 'qkv_fprop' does",
    ),
    "a misspelt name": (
        dict(ub_cfgs={"qvk_fprop": {}}),
        ValueError,
        "Did you mean 'qkv_fprop'",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_invalid_arguments_are_rejected(case):
    changes, kind, text = REFUSALS[case]
    given = {"shape": SHAPE, "tp_size": 4, "mesh": tp_mesh(4), **changes}
    with pytest.raises(kind, match=text) as caught:
        ub.initialize_ub(**given)
    assert isinstance(caught.value, ub.errors.UbError)
    assert not ub.is_ub_initialized()


def test_more_ranks_than_devices_are_rejected():
    here = len(jax.devices())
    text = rf"tp_size = {here + 1}, but jax has {here} devices. Pass at most {here}, or"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        ub.initialize_ub(SHAPE, here + 1)


@pytest.mark.parametrize("mesh", [None, tp_mesh(4)])
def test_a_launched_program_that_has_not_joined_its_job_gets_the_fix(mesh, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    text = r"devices\. JAX_COORDINATOR_ADDRESS is set.* Call jax.distributed.initialize"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        ub.initialize_ub(SHAPE, 2 * len(jax.devices()), mesh=mesh)


def test_devices_that_cannot_be_grouped_are_rejected():
    with pytest.raises(
        ub.errors.ConfigurationError, match="cannot be divided into groups"
    ):
        ub.initialize_ub(SHAPE, 5)


def test_a_named_call_is_exported_for_any_batch():
    ub.initialize_ub(SHAPE, 4, mesh=tp_mesh(4))

    def call(x, w):
        return ub.matmul_all_reduce(x, w, axis_name="tp", ub_name="proj")

    run = on_ranks(call, tp_mesh(4), (P(None, None, "tp"), P("tp")), P())
    shape = jax.export.symbolic_shape("batch, 8, 8")
    exported = jax.export.export(run)(
        jax.ShapeDtypeStruct(shape, jnp.float32), jnp.ones((8, 4))
    )
    assert "@jax_ub$" not in exported.mlir_module()
    assert "symbolic sizes, and inside" in ub.fallbacks()[-1].reason
