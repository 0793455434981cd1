"""Runs functions on the ranks of a mesh, and reads their compiled programs."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from layouts import connect, devices

import jax_ub as ub
from jax_ub._src.methods import Method, MethodChoice
from jax_ub._src.primitives.call import Execution

_TARGET = re.compile(r'custom_call_target="jax_ub\$(\w+)"')
_SCALE_SCOPE = "all_reduce_max"


def tp_mesh(num_ranks: int) -> Mesh:
    """Returns a mesh of the first devices with one axis, "tp"."""
    return connect(Mesh(np.array(devices(num_ranks)), ("tp",)))


def dp_tp_mesh(num_groups: int, num_ranks: int) -> Mesh:
    """Returns a mesh with the axes "dp" and "tp"."""
    ranks = np.array(devices(num_groups * num_ranks))
    return connect(Mesh(ranks.reshape(num_groups, num_ranks), ("dp", "tp")))


def on_ranks(function, mesh: Mesh, in_specs, out_specs, *, check_vma: bool = True):
    """Compiles `function` to run on every device of the mesh, which is connected."""
    connect(mesh)
    return jax.jit(
        jax.shard_map(
            function,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )


def by_method(method: str, mesh: Mesh) -> dict[str, str]:
    """Returns the keyword arguments with which a column layer runs by `method`.

    "bulk" is a method of the backward pass only, configured by a name.
    `conftest.py` removes the configuration after the test.
    """
    if method != "bulk":
        return {"method": method}
    if not ub.is_ub_initialized("tp"):
        ub.initialize_ub((1024, 64), mesh.shape["tp"], mesh=mesh)
    return {"ub_name": "qkv"}


def own_copy(tree, mesh: Mesh, spec):
    """Copies arrays onto the mesh, to be donated.

    No other object refers to the result of a program. `jax.device_put` may use its
    operand's buffer for a shard, and its comparison between processes releases the
    operand later. Until then XLA silently copies donated buffers.
    """
    return jax.jit(
        lambda tree: jax.tree.map(jnp.copy, tree),
        out_shardings=NamedSharding(mesh, spec),
    )(tree)


def cache_options(folder) -> dict[str, str | int]:
    """Returns the options with which JAX keeps all compiled programs in a folder."""
    return {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def compiled_text(function, *operands) -> str:
    """Returns the optimized HLO of a jitted function."""
    return function.lower(*operands).compile().as_text()


def loop_text(text: str) -> str:
    """Returns the computations of a compiled program that its loops run."""
    computations = {}
    for each in text.split("\n\n"):
        if name := re.match(r"\s*(?:ENTRY )?%?([\w.\-]+) ", each):
            computations[name[1]] = each
    called = re.findall(r"body=%?([\w.\-]+)", text)
    for name in called:  # which grows
        callees = re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", computations[name])
        called += [callee for callee in callees if callee not in called]
    return "\n\n".join(map(computations.get, called))


def equations(function, *operands):
    """Yields all equations of the jaxpr of a function, inner ones after their outer."""
    jaxprs = [jax.make_jaxpr(function)(*operands).jaxpr]
    for jaxpr in jaxprs:
        for equation in jaxpr.eqns:
            yield equation
            inner = jax.tree.leaves(equation.params, is_leaf=_is_jaxpr)
            jaxprs += [getattr(x, "jaxpr", x) for x in inner if _is_jaxpr(x)]


def _is_jaxpr(value):
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def calls(text: str) -> collections.Counter:
    """Counts the custom calls of each target, named without "jax_ub$".

    The calls by which ranks agree on FP8 scales are left out; see `scale_calls`.
    """
    return collections.Counter(_TARGET.search(line)[1] for line in call_lines(text))


def call_lines(text: str) -> list[str]:
    """Returns the lines of the custom calls that `calls` counts."""
    lines = filter(_TARGET.search, text.splitlines())
    return [line for line in lines if _SCALE_SCOPE not in line]


def scale_calls(text: str) -> int:
    """Counts the custom calls by which ranks agree on FP8 scales per tensor."""
    lines = filter(_TARGET.search, text.splitlines())
    return sum(_SCALE_SCOPE in line for line in lines)


def collectives(text: str) -> collections.Counter:
    """Counts XLA's collectives."""
    names = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    return collections.Counter(re.findall(rf" ({names})(?:-start)?\(", text))


def copies(text: str, shape: str) -> int:
    """Counts XLA's copies of arrays of `shape`, for example "f32[8,16]"."""
    return len(re.findall(rf"= \(?{re.escape(shape)}.* copy(?:-start)?\(", text))


def execution(method: Method, num_ranks: int | None = None) -> Execution:
    """Returns the execution of a primitive by `method`, over axis "tp" or locally."""
    ranks = {"axis_name": ("tp",), "num_ranks": num_ranks} if num_ranks else {}
    return Execution(label="test", choice=MethodChoice(method), **ranks)


def with_methods(function, methods):
    """Runs `function` by its reference and by each method, in one program.

    Args:
        function: takes operands and `method`.
        methods: the methods to compare with `Method.XLA`.

    Returns:
        A function of the operands that returns the reference's results, and a dict of
        the methods' results by name.
    """

    def run(*operands):
        expected = function(*operands, method=Method.XLA)
        return expected, {m.value: function(*operands, method=m) for m in methods}

    return run
