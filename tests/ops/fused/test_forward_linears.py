"""Linears that add a bias or a residual, or scale the product, in one call."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from covering import covering
from jax.sharding import PartitionSpec as P
from linears import arrays, wide
from operands import assert_close, assert_equal, normal, small_integers
from programs import calls, compiled_text, copies, own_copy, tp_mesh
from sequences import FEATURES, ROWS, names, overlapped

import jax_ub as ub
from jax_ub import ops

IN_PLACE = ops.AddExtraInput(in_place=True)
SCALE = ops.ConstantScale(0.5)
RANKS = 4


def basic(mode, a, name=None, **options):
    k, n = a.w.shape
    return ops.BasicLinear(
        k if mode != "scattered" else k // RANKS,
        n,
        tensor_parallel_mode=None if mode == "scattered" else mode,
        **overlapped(name, **options),
    )


# By name: mode, name of the overlap, following operations, fused list.
WINDOWS = {
    "bias": (None, None, ["bias"], ["ForwardLinearBiasActivation"]),
    "bias, activation": (
        None,
        None,
        ["bias", ops.ReLU()],
        ["ForwardLinearBiasActivation"],
    ),
    "column bias": ("column", None, ["bias"], ["ForwardLinearBiasActivation"]),
    "add": (None, None, [IN_PLACE], ["ForwardLinearBiasAdd"]),
    "bias, add": (None, None, ["bias", IN_PLACE], ["ForwardLinearBiasAdd"]),
    "column bias, add": ("column", None, ["bias", IN_PLACE], ["ForwardLinearBiasAdd"]),
    "row add": ("row", "proj", [IN_PLACE], ["ForwardLinearBiasAdd"]),
    "row bias, add": ("row", "proj", ["bias", IN_PLACE], ["ForwardLinearBiasAdd"]),
    "scattered bias, add": (
        "scattered",
        "proj",
        ["bias", ops.ReduceScatter(), IN_PLACE],
        ["ForwardLinearBiasAdd"],
    ),
    "scale, add": (None, None, [SCALE, IN_PLACE], ["ForwardLinearScaleAdd"]),
    "column scale, add": (
        "column",
        None,
        [SCALE, IN_PLACE],
        ["ForwardLinearScaleAdd"],
    ),
}


class Window:
    """Consecutive operations to fuse, with their operands and expected result."""

    def __init__(self, name, dtype="float32", make=small_integers, bias_dtype=None):
        mode, overlap, behind, self.fused = WINDOWS[name]
        self.mode = mode
        self.a = a = arrays(RANKS, dtype, make)
        n = a.w.shape[1]
        kernel = {None: P(), "column": P(None, "tp")}.get(mode, P("tp"))
        self.bias = make(5, (n * RANKS if mode == "scattered" else n,), "float32")
        found = [basic(mode, a, overlap)]
        self.params, self.specs = [{"kernel": a.w}], [{"kernel": kernel}]
        for op in behind:
            if op == "bias":
                is_column = mode == "column"
                found.append(ops.Bias(n, tensor_parallel=is_column, dtype=bias_dtype))
                self.params.append({"bias": self.bias})
                spec = P("tp") if mode in ("column", "scattered") else P()
                self.specs.append({"bias": spec})
            else:
                found.append(op)
                self.params.append({})
                self.specs.append({})
        self.seq = ops.Sequential(*found)
        self.adds = IN_PLACE in behind
        self.scale = 0.5 if SCALE in behind else 1.0
        self.is_activated = len(behind) > 1 and isinstance(behind[1], ops.ReLU)
        self.x, self.y = {None: (P(), P()), "column": (ROWS, FEATURES)}.get(
            mode, (FEATURES, ROWS)
        )
        self.extra = (a.dy,) if self.adds else ()

    def program(self, donate=()):
        """Returns a function of global arrays: (params, x, *extra inputs) -> y."""
        extra = (self.y,) * len(self.extra)
        mapped = jax.shard_map(
            lambda params, x, *extra: self.seq(params, x, *extra),
            mesh=tp_mesh(RANKS),
            in_specs=(tuple(self.specs), self.x, *extra),
            out_specs=self.y,
        )
        return jax.jit(mapped, donate_argnums=donate)

    def operands(self):
        return (tuple(self.params), self.a.x, *self.extra)

    def expected(self):
        a = self.a
        y = self.scale * (wide(a.x) @ wide(a.w))
        if any("bias" in own for own in self.params):
            y = y + wide(self.bias).reshape(-1, a.w.shape[1]).sum(0)
        if self.adds:
            y = y + wide(a.dy)
        return np.maximum(y, 0) if self.is_activated else y


@pytest.mark.parametrize("name", WINDOWS)
def test_result_is_exact(name):
    window = Window(name)
    assert names(ops.OperationFuser([window.seq]).forward_ops) == window.fused
    assert_equal(window.program()(*window.operands()), window.expected())


@covering(
    name=["bias, activation", "row bias, add", "scale, add"],
    dtype=["bfloat16", "float16"],
)
def test_sum_is_rounded_once(name, dtype):
    window = Window(name, dtype)
    y = window.program()(*window.operands())
    assert_equal(y, window.expected().astype(dtype))
    window = Window(name, dtype, normal)
    y = window.program()(*window.operands())
    assert_close(y, window.expected(), window.a.w.shape[0])


@pytest.mark.parametrize("name", WINDOWS)
def test_gradients_equal_those_of_unfused_operations(name):
    window = Window(name)

    def gradients():
        program = window.program()
        weights = small_integers(9, window.a.dy.shape)

        def loss(*operands):
            return jnp.sum(program(*operands) * weights)

        wanted = tuple(range(len(window.operands())))
        return jax.jit(jax.grad(loss, wanted))(*window.operands())

    found = gradients()
    with ops.without_fusions():
        expected = gradients()
    assert_equal(found, expected)


def num_passes(text):
    """Counts the additions and multiplications outside of GEMMs in HLO text."""
    return len(re.findall(r"= f32\[\d+,\d+,\d+\]\S* (?:add|multiply)\(", text))


@pytest.mark.parametrize("name", [n for n in WINDOWS if n != "bias, activation"])
def test_the_program_is_a_single_call(name):
    window = Window(name)
    text = compiled_text(window.program(), *window.operands())
    assert num_passes(text) == 0
    found = calls(text)
    gathers = found.pop("all_gather", 0) + found.pop("all_reduce", 0)
    assert gathers == (window.mode in ("column", "scattered"))
    assert sum(found.values()) == 1
    with ops.without_fusions():
        text = compiled_text(window.program(), *window.operands())
    assert num_passes(text) >= 1


@pytest.mark.parametrize("name", ["bias, add", "scale, add"])
def test_the_sum_reuses_the_buffer_of_the_extra_input(name):
    window = Window(name)
    extra = own_copy(window.a.dy, tp_mesh(RANKS), window.y)
    run = window.program(donate=2)
    params, x, _ = window.operands()
    shape = ",".join(map(str, extra.addressable_shards[0].data.shape))
    assert copies(compiled_text(run, params, x, extra), f"f32[{shape}]") == 0
    pointers = [s.data.unsafe_buffer_pointer() for s in extra.addressable_shards]
    y = run(params, x, extra)
    assert_equal(y, window.expected())
    assert pointers == [s.data.unsafe_buffer_pointer() for s in y.addressable_shards]


@pytest.mark.parametrize("name", ["bias, add", "row bias, add", "scale, add"])
def test_the_extra_input_of_the_caller_does_not_change(name):
    window = Window(name)
    before = wide(window.a.dy).copy()
    assert_equal(window.program()(*window.operands()), window.expected())
    assert_equal(window.a.dy, before)


@pytest.mark.parametrize("name", ["bias, add", "row bias, add", "scale, add"])
def test_extra_input_with_a_wrong_shape_is_rejected(name):
    window = Window(name)
    params, x, extra = window.operands()
    message = "AddExtraInput: the extra input has shape .*, but here it is the shape"
    with pytest.raises(ub.errors.ShapeContractError, match=message):
        jax.eval_shape(window.program(), params, x, extra[..., :4])


@pytest.mark.parametrize("following", [[IN_PLACE], [SCALE, IN_PLACE]], ids=len)
@pytest.mark.parametrize(
    ("x", "kernel", "text"),
    [((), (4, 4), "x has shape (), but"), ((2, 4), (4,), "kernel has shape (4,), but")],
)
def test_wrong_operands_of_the_linear_are_rejected(following, x, kernel, text):
    seq = ops.Sequential(ops.BasicLinear(4, 4), *following)
    params = ({"kernel": jnp.ones(kernel)}, *({} for _ in following))
    with pytest.raises(ub.errors.ShapeContractError, match=re.escape(text)):
        jax.eval_shape(seq, params, jnp.ones(x), jnp.ones(x))


def test_a_vector_residual_is_added():
    a = arrays(1)
    k, n = a.w.shape
    seq = ops.Sequential(ops.Linear(k, n), IN_PLACE)
    x, bias, extra = a.x[0, 0], a.w[0], a.dy[0, 0]
    found = seq(({"kernel": a.w, "bias": bias}, {}), x, extra)
    assert_equal(found, wide(x) @ wide(a.w) + wide(bias) + wide(extra))


def test_the_result_has_the_dtype_of_the_bias():
    a = arrays(1, "bfloat16")
    k, n = a.w.shape
    seq = ops.Sequential(ops.BasicLinear(k, n), ops.Bias(n, dtype="float32"))
    y = seq(({"kernel": a.w}, {"bias": a.w[0]}), a.x)
    assert_equal(y, wide(a.x) @ wide(a.w) + wide(a.w[0]))


@pytest.mark.parametrize("name", ["bias, add", "row bias, add", "scattered bias, add"])
def test_the_sum_with_an_extra_input_has_the_dtype_of_the_bias(name):
    window = Window(name, "bfloat16", bias_dtype="float32")
    y = window.program()(*window.operands())
    assert_equal(y, window.expected())


def test_biases_of_several_ranks_are_summed_in_f32():
    window = Window("scattered bias, add")
    rows = jnp.zeros((RANKS, window.a.w.shape[1])).at[:2].set([[256], [1]])
    window.bias = rows.reshape(-1).astype(jnp.bfloat16)  # the sum, 257, is not bf16
    window.params[1] = {"bias": window.bias}
    assert_equal(window.program()(*window.operands()), window.expected())
