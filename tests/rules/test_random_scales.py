"""Random calls with FP8 operands of any kinds of scales, compared with f64."""

import random

import fp8_formulas as formulas
import jax
import numpy as np
import pytest
from covering import nightly
from jax.sharding import PartitionSpec as P
from layouts import visible
from programs import by_method, on_ranks, tp_mesh
from scaled_operands import METHODS

import jax_ub as ub

# The scales per tensor are no powers of two.
CURRENT, ROW = ub.fp8.Float8CurrentScaling(), ub.fp8.RowwiseScaling()
BLOCK = ub.fp8.MXFP8BlockScaling()
# The sharded axes of x, kernels and results; None if the result is replicated.
AXES = {
    ub.all_gather_matmul: (-2, -1, -1),
    ub.matmul_reduce_scatter: (-1, -2, -2),
    ub.matmul_all_reduce: (-1, -2, None),
}


class Call:
    """A call: its operands, and how they are quantized and sharded."""

    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        self.random = np.random.default_rng(seed)
        self.op = draw.choice(list(AXES))
        self.gathers = self.op is ub.all_gather_matmul
        self.num_ranks = draw.randint(1, 4)
        self.x_axis, self.w_axis, self.y_axis = AXES[self.op]
        kernels = draw.choice([[BLOCK], [CURRENT, ROW]])
        # What quantizes x, each kernel and each gradient; None leaves it in f32.
        num_kernels = draw.randint(1, 3) if self.gathers else 1
        self.of_ws = [draw.choice(kernels) for _ in range(num_kernels)]
        self.of_x = self.recipe = draw.choice([CURRENT, ROW, BLOCK])
        self.quantizes_kernels = draw.random() < 0.3
        if self.quantizes_kernels:
            self.of_ws = [self.recipe] * num_kernels
        elif draw.random() < 0.5:
            self.recipe = None
        x_ranks, w_ranks = (
            self.num_ranks if axis == contracted else 1
            for axis, contracted in ((self.x_axis, -1), (self.w_axis, -2))
        )
        batch = draw.choice([(), (2,)])
        rows, k = draw.choice([1, 2, 5]) * self.num_ranks, draw.choice([32, 96])
        widths = [32, 64] if self.recipe is BLOCK else [1, 7, 33]
        n = self.num_ranks if self.gathers else 1
        self.x = self.array(*batch, rows, k * x_ranks)
        self.ws, self.dys = [], []
        for _ in self.of_ws:
            width = draw.choice(widths) * n
            self.ws.append(self.array(k * w_ranks, width))
            self.dys.append(self.array(*batch, rows, width))
        self.main_grads = None
        if draw.random() < 0.3:
            self.main_grads = [self.array(*w.shape) for w in self.ws]
        self.returns_gathered = self.gathers and draw.random() < 0.3
        methods = [*METHODS, "bulk"] if self.gathers else METHODS
        self.method = draw.choice(methods)
        # Without vma types, JAX divides the gradient of a replicated result by the
        # number of ranks. This is exact for powers of two.
        self.check_vma = draw.random() < 0.7 or self.num_ranks == 3

    def array(self, *shape):
        """Returns an array whose columns differ up to 100-fold, and so do arrays."""
        exponents = self.random.uniform(-1, 1) + self.random.uniform(-1, 1, shape[-1])
        array = self.random.standard_normal(shape) * 10.0**exponents
        return array.astype("float32")

    def run(self):
        """Returns the results, and the gradients of x, kernels and main_grads."""
        mesh = tp_mesh(self.num_ranks)
        options = {"axis_name": "tp", **by_method(self.method, mesh)}
        if self.recipe is not None:
            options["fp8"] = self.recipe
        if self.returns_gathered:
            options["return_gathered"] = True

        def layer(x, ws, main_grads):
            if self.recipe is None:
                x = ub.quantize(x, self.of_x, axis_name="tp")
            if not self.quantizes_kernels:
                axis_name = None if self.gathers else "tp"
                ws = tuple(
                    ub.quantize(w, recipe, role="kernel", axis_name=axis_name)
                    for w, recipe in zip(ws, self.of_ws, strict=True)
                )
            given = options | ({} if main_grads is None else {"main_grad": main_grads})
            if self.gathers:
                y = self.op(x, ws, **given)
                return y[0] if self.returns_gathered else y
            if main_grads is not None:
                (given["main_grad"],) = main_grads
            return (self.op(x, *ws, **given),)

        in_x, out = self.spec(self.x_axis), self.spec(self.y_axis)
        in_w = P(None, "tp") if self.w_axis == -1 else P("tp")
        specs = in_x, in_w, in_w
        function = on_ranks(layer, mesh, specs, out, check_vma=self.check_vma)

        @jax.jit
        def step(x, ws, main_grads, dys):
            ys, backward = jax.vjp(function, x, ws, main_grads)
            return ys, *backward(dys)

        main_grads = None if self.main_grads is None else tuple(self.main_grads)
        return step(self.x, tuple(self.ws), main_grads, tuple(self.dys))

    def spec(self, axis):
        """Returns the spec of an activation that is sharded along `axis`."""
        sharded = {axis: "tp"}
        return P(*(sharded.get(i - self.x.ndim) for i in range(self.x.ndim)))

    def check(self):
        """Compares results and gradients with f64 on the dequantized operands."""
        x, ws, dys = self.dequantized()
        ys, dx, dws, d_main_grads = self.run()
        for y, w in zip(ys, ws, strict=True):
            assert_is_product(y, x, w)
        assert_is_product(dx, np.concatenate(dys, -1), np.concatenate(ws, -1).T)
        rows = x.reshape(-1, x.shape[-1])
        for i, dy in enumerate(dys):
            main_grad = None if self.main_grads is None else self.main_grads[i]
            found = dws[i] if main_grad is None else d_main_grads[i]
            dy = dy.reshape(-1, dy.shape[-1])
            assert_is_product(found, rows.T, dy, main_grad)

    def dequantized(self):
        """Returns x, kernels and gradients as the call multiplies them, in f64."""
        (x,) = self.wide([self.x], self.of_x, "input", self.x_axis)
        if self.quantizes_kernels:
            ws = self.wide(self.ws, self.recipe, "kernel", self.w_axis)
        else:
            ws = [
                self.wide([w], recipe, "kernel", self.w_axis, not self.gathers)[0]
                for w, recipe in zip(self.ws, self.of_ws, strict=True)
            ]
        return x, ws, self.wide(self.dys, self.recipe, "output_grad", self.y_axis)

    def wide(self, arrays, recipe, role, axis, is_agreed=True):
        """Quantizes arrays like the ranks, which have shards along `axis`.

        With a scale per tensor that the ranks agree on, all arrays have the same.
        """
        if recipe is None:
            return [array.astype(np.float64) for array in arrays]
        bounds = np.cumsum([array.shape[-1] for array in arrays])[:-1]
        if recipe is CURRENT and is_agreed:
            array = dequantized(np.concatenate(arrays, -1), recipe, role)
            return np.split(array, bounds, -1)
        if axis is None:
            return [dequantized(array, recipe, role) for array in arrays]
        shards = (np.split(array, self.num_ranks, axis) for array in arrays)
        return [
            np.concatenate([dequantized(each, recipe, role) for each in parts], axis)
            for parts in shards
        ]


def dequantized(array, recipe, role):
    quantized = ub.quantize(array, recipe, role=role)
    return formulas.dequantize(quantized.values, quantized.scales)


def assert_is_product(found, x, w, addend=None):
    """Asserts that an f32 result differs from `x @ w + addend` by the order of sums."""
    wanted, bound = x @ w, np.abs(x) @ np.abs(w)
    if addend is not None:
        wanted, bound = wanted + addend, bound + np.abs(addend)
    for place, part in visible(found):
        assert np.all(np.abs(wanted[place] - np.asarray(part)) <= 1e-5 * bound[place])


@pytest.mark.parametrize("seed", [*range(8), *nightly(*range(8, 200))])
def test_a_random_call_multiplies_the_dequantized_operands(seed):
    Call(seed).check()
