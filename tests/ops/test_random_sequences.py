"""Random sequences of operations, forward and backward, against plain JAX."""

import random

import jax
import pytest
from jax.sharding import PartitionSpec as P
from operands import small_integers
from ops_on_ranks import FEATURES, TOKENS, assert_are_plain

from jax_ub import ops

pytestmark = pytest.mark.slow

RANKS, ROWS, WIDTH = 4, 8, 8
# How an activation is distributed over the ranks: the same on all of them, or sharded
# by tokens or features.
SPECS = {"whole": P(), "tokens": TOKENS, "features": FEATURES}
# Parallel mode, sequence parallel, and the sharding of the result.
LINEARS = {
    "whole": [("column", False, "features"), (None, False, "whole")],
    "tokens": [("column", True, "features"), (None, False, "tokens")],
    "features": [("row", True, "tokens"), ("row", False, "whole")],
}


class Walk:
    """A random sequence of operations that accept each other's results.

    Each operation has a reference: a function of its parameters, the global x, and the
    channels by name.
    """

    def __init__(self, seed: int, check_vma: bool):
        self.draw = random.Random(seed)
        self.check_vma = check_vma
        self.begins = self.layout = self.draw.choice(list(SPECS))
        self.channels: dict[str, str] = {}
        self.ops: list[ops.BasicOperation | ops.Linear] = []
        self.plain: list = []
        steps = (self.linear, self.local, self.collective, self.leave, self.rejoin)
        for step in self.draw.choices(steps, (5, 3, 2, 3, 4), k=8):
            step()

    def add(self, op, plain, layout=None):
        self.ops.append(op)
        self.plain.append(plain)
        self.layout = layout or self.layout

    def linear(self):
        mode, sequence_parallel, layout = self.draw.choice(LINEARS[self.layout])
        overlap = None
        if sequence_parallel and self.draw.random() < 0.7:
            methods = ["direct", "ring_exchange", "pipeline", "xla"]
            overlap = {"comm_name": {"column": "fc1", "row": "fc2"}[mode]}
            overlap["method"] = self.draw.choice(methods)
        op = ops.Linear(
            WIDTH,
            WIDTH,
            use_bias=self.draw.random() < 0.5,
            tensor_parallel_mode=mode,
            sequence_parallel=sequence_parallel,
            userbuffers_options=overlap,
        )
        self.add(op, lambda p, x, _: x @ p["kernel"] + p.get("bias", 0), layout)

    def local(self):
        scale = self.draw.choice((-1, 0.5, 2))
        op, plain = self.draw.choice(
            [
                (ops.ReLU(), lambda p, x, _: jax.nn.relu(x)),
                (ops.ConstantScale(scale), lambda p, x, _: scale * x),
                (
                    ops.Bias(WIDTH, tensor_parallel=self.layout == "features"),
                    lambda p, x, _: x + p["bias"],
                ),
            ]
        )
        self.add(op, plain)

    def collective(self):
        if self.layout == "whole":
            # Without check_vma, JAX does not know that the summand is replicated.
            reduces = self.check_vma and self.draw.random() < 0.5
            op = ops.AllReduce() if reduces else ops.ReduceScatter()
            layout = "whole" if reduces else "tokens"
            self.add(op, lambda p, x, _: RANKS * x, layout)
        elif self.layout == "tokens" and not self.check_vma:
            # With check_vma=True, a gathered array has a type that varies over the
            # ranks, so it does not count as one replicated x.
            self.add(ops.AllGather(), lambda p, x, _: x, "whole")

    def leave(self):
        name = f"channel{len(self.channels)}"
        op = ops.MakeExtraOutput(in_place=self.draw.random() < 0.5)

        def plain(p, x, channels):
            channels[name] = x
            return x

        self.channels[name] = self.layout
        self.add(op.with_extra_output_channel(0, name, output_to_caller=False), plain)

    def rejoin(self):
        fitting = [c for c, layout in self.channels.items() if layout == self.layout]
        if fitting:
            name = self.draw.choice(fitting)
            op = ops.AddExtraInput(in_place=self.draw.random() < 0.5)
            self.add(
                op.with_extra_input_channel(0, name),
                lambda p, x, channels: x + channels[name],
            )


def check(seed, check_vma):
    walk = Walk(seed, check_vma)

    def plain(params, x):
        channels = {}
        for function, own in zip(walk.plain, params, strict=True):
            x = function(own, x, channels)
        return x

    case = (ops.Sequential(*walk.ops), SPECS[walk.begins], SPECS[walk.layout])
    x = small_integers(seed, (ROWS, WIDTH))
    assert_are_plain([case], plain, RANKS, x, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_random_sequences_equal_plain_jax_bitwise(seed, check_vma):
    check(seed, check_vma)


@pytest.mark.matrix
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("seed", range(8, 200))
def test_more_random_sequences_equal_plain_jax_bitwise(seed, check_vma):
    check(seed, check_vma)
