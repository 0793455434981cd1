"""Random calls of the public functions, as parts of a program for every device.

All values are small integers, and become small again after each call, so that every sum
is exact, forward and backward.
"""

import dataclasses
import math
import random
from collections.abc import Callable

import jax
import jax.numpy as jnp
from plain_functions import vary

METHODS = (None, "direct", "ring_exchange", "pipeline", "external", "xla")
MOST_ROWS = 40


@jax.custom_vjp
def small(x):
    """Reduces integers and their cotangents to -1, 0 and 1."""
    return (x + 1) % 3 - 1


small.defvjp(lambda x: (small(x), None), lambda _, dy: (small(dy),))


@dataclasses.dataclass(frozen=True)
class Parameter:
    """An operand: its shard shape, and the mesh axes over which it varies."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]

    def stacked(self, size, place=0):
        """Returns a copy with an additional axis."""
        shape = (*self.shape[:place], size, *self.shape[place:])
        return dataclasses.replace(self, shape=shape)


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a program: `run(functions, parameter values, x)` returns y."""

    name: str
    parameters: tuple[Parameter, ...]
    run: Callable[..., jax.Array]
    shape: tuple[int, ...]


class Calls:
    """Draws calls and their operands."""

    def __init__(self, draw: random.Random, sizes: dict[str, int], runs_once: bool):
        """Takes the sizes of the mesh axes, and whether nothing repeats the program."""
        self.draw, self.sizes = draw, sizes
        self.check_vma = self.chance(0.6)
        self.dtype = draw.choice(["float32", "float32", "bfloat16", "float16"])
        self.axis_name = draw.choice(["tp", "tp", "tp", ("tp",)])
        if "pp" in sizes and draw.random() < 0.3:
            self.axis_name = draw.choice([("tp", "pp"), ("pp", "tp")])
        self.own = (
            (self.axis_name,) if isinstance(self.axis_name, str) else self.axis_name
        )
        self.num_ranks = math.prod(sizes[axis] for axis in self.own)
        # If a part runs several times, its main_grads accumulate over the runs.
        self.may_accumulate = runs_once

    def chance(self, probability):
        """Draws a bool."""
        return self.draw.random() < probability

    def size(self):
        """Draws a size that may have any value, such as the number of features."""
        return self.draw.randint(1, 9)

    def parameter(self, *shape, dtype=None, without=(), everywhere=False):
        """Returns a new operand, which varies over some or all mesh axes."""
        axes = tuple(
            axis
            for axis in self.sizes
            if axis not in without and (everywhere or self.chance(0.6))
        )
        return Parameter(shape, dtype or self.dtype, axes)

    def everywhere(self, x):
        """Casts x to vary over all mesh axes."""
        return vary(x, self.sizes) if self.check_vma else x

    def call(self, shape):
        """Draws a public function, and reduces its result to small integers."""
        options: dict = {}
        kinds = [self.add, self.accumulate, self.local, self.replicated]
        if len(shape) > 1:
            kinds += [self.reduce] * 2
            if shape[-2] * self.num_ranks <= MOST_ROWS:
                kinds += [self.gather] * 4
            if shape[-2] % self.num_ranks == 0:
                kinds += [self.scatter] * 4
        kind = self.draw.choice(kinds)
        part = kind(shape, options)

        def run(functions, values, x):
            return small(part.run(functions, values, small(x.astype(self.dtype))))

        return dataclasses.replace(part, run=run)

    def method(self, options):
        """Draws the method."""
        # XLA:CPU cannot multiply bf16 where jax.vmap maps both operands of some dots.
        num_methods = len(METHODS) - (self.dtype == "bfloat16")
        options["method"] = self.draw.choice(METHODS[:num_methods])

    def out_dtype(self, options):
        if self.chance(0.3):
            options["out_dtype"] = self.draw.choice(["float32", "bfloat16", "float16"])

    def addend(self, options, name, *shape, without=()):
        """Returns an optional parameter of a call, in any dtype."""
        if self.chance(0.5):
            dtype = self.draw.choice([None, None, "float32", "bfloat16"])
            options[name] = self.parameter(*shape, dtype=dtype, without=without)

    def main_grad(self, options, w):
        if self.may_accumulate and self.chance(0.2):
            options["main_grad"] = self.parameter(
                *w.shape, dtype="float32", everywhere=True
            )

    def calling(self, name, op, w, options, shape, pick=None):
        """Returns the part that calls `op(x, w, **options)`, with parameters in it.

        `w` is None if the op takes none.
        """
        leaves, tree = jax.tree.flatten(
            (w, options), is_leaf=lambda leaf: isinstance(leaf, Parameter)
        )
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Parameter)]

        def run(functions, values, x):
            filled = list(leaves)
            for place, value in zip(places, values, strict=True):
                filled[place] = value
            w, options = jax.tree.unflatten(tree, filled)
            operands = (x,) if w is None else (x, w)
            y = getattr(functions, op)(*operands, **options)
            return y if pick is None else pick(y)

        shown = {
            key: "..." if isinstance(value, Parameter | tuple) else value
            for key, value in options.items()
            if key != "axis_name"
        }
        return Part(f"{name}{shown}", tuple(leaves[i] for i in places), run, shape)

    def kernel(self, k, n, is_transposed=False):
        return self.parameter(*((n, k) if is_transposed else (k, n)))

    def gather(self, shape, options):
        *batch, rows, k = shape
        rows *= self.num_ranks
        self.method(options)
        self.out_dtype(options)
        options["axis_name"] = self.axis_name
        options["rhs_transposed"] = transposed = self.chance(0.2)
        options["return_gathered"] = gathers = self.chance(0.3)
        columns = [self.size() for _ in range(self.draw.choice([0, 0, 1, 2, 3]))]
        has_bias = self.chance(0.5)
        if columns:
            w = tuple(self.kernel(k, n, transposed) for n in columns)
            if has_bias:
                options["bias"] = tuple(self.parameter(n) for n in columns)
        else:
            columns = [self.size()]
            w = self.kernel(k, columns[0], transposed)
            if has_bias:
                self.addend(options, "bias", columns[0])
            self.main_grad(options, w)
        widths = columns + [k] * gathers
        kept = self.draw.sample(range(len(widths)), self.draw.randint(1, len(widths)))
        if "main_grad" in options:
            kept = [0]  # without a main_grad, nothing is accumulated

        def pick(y):
            results = jax.tree.leaves(y)
            return jnp.concatenate(
                [results[i].astype(self.dtype) for i in kept], axis=-1
            )

        shape = (*batch, rows, sum(widths[i] for i in kept))
        name = f"gather({len(columns)}, kept {kept})"
        return self.calling(name, "all_gather_matmul", w, options, shape, pick)

    def scatter(self, shape, options):
        *batch, rows, k = shape
        options["rhs_transposed"] = transposed = self.chance(0.2)
        n = self.size()
        w = self.kernel(k, n, transposed)
        shape = (*batch, rows // self.num_ranks, n)
        self.method(options)
        self.out_dtype(options)
        options["axis_name"] = self.axis_name
        self.addend(options, "bias", shape[-1])
        self.addend(options, "residual", *shape)
        self.main_grad(options, w)
        return self.calling("scatter", "matmul_reduce_scatter", w, options, shape)

    def reduce(self, shape, options):
        options["rhs_transposed"] = transposed = self.chance(0.2)
        n = self.size()
        w = self.kernel(shape[-1], n, transposed)
        shape = (*shape[:-1], n)
        self.method(options)
        self.out_dtype(options)
        options["axis_name"] = self.axis_name
        self.addend(options, "bias", shape[-1], without=self.own)
        self.addend(options, "residual", *shape, without=self.own)
        self.main_grad(options, w)
        return self.calling("reduce", "matmul_all_reduce", w, options, shape)

    def local(self, shape, options):
        """Draws a call of `linear`, with one of the five modes that accept this x."""
        ways = [(None, True), ("column", False), ("row", False)]
        if len(shape) > 1:
            if shape[-2] * self.num_ranks <= MOST_ROWS:
                ways.append(("column", True))
            if shape[-2] % self.num_ranks == 0:
                ways.append(("row", True))
        parallel, sequence_parallel = self.draw.choice(ways)
        transposed = self.chance(0.2)
        n = self.size()
        w = self.kernel(shape[-1], n, transposed)
        if parallel and sequence_parallel:
            *batch, rows, _ = shape
            gathers = parallel == "column"
            rows = rows * self.num_ranks if gathers else rows // self.num_ranks
            shape = (*batch, rows, n)
        else:
            shape = (*shape[:-1], n)
        replicated = self.own if (parallel, sequence_parallel) == ("row", False) else ()
        self.addend(options, "b", n, without=replicated)
        self.main_grad(options, w)
        self.method(options)
        if parallel:
            options["axis_name"] = self.axis_name
        options |= {
            "parallel": parallel,
            "sequence_parallel": sequence_parallel,
            "rhs_transposed": transposed,
        }
        return self.calling("linear", "linear", w, options, shape)

    def replicated(self, shape, options):
        options["axis_name"] = self.axis_name
        self.addend(options, "bias", shape[-1], without=self.own)
        self.addend(options, "residual", *shape, without=self.own)
        return self.calling("all_reduce", "all_reduce", None, options, shape)

    def add(self, shape, options):
        w = self.parameter(self.size(), shape[-1])
        shape = (*shape[:-1], w.shape[0])
        dtype = self.draw.choice(["float32", "bfloat16", None])
        options["residual"] = self.parameter(*shape, dtype=dtype)
        return self.calling("dgrad_add", "dgrad_add", w, options, shape)

    def accumulate(self, shape, options):
        dy = self.parameter(*shape[:-1], self.size())
        shape = (shape[-1], dy.shape[-1])
        dtype = self.draw.choice(["float32", "float32", None])
        options["main_grad"] = self.parameter(*shape, dtype=dtype)
        name = "wgrad_accumulate"
        return self.calling(name, name, dy, options, shape)
