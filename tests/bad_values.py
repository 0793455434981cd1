"""Invalid argument values, and checks of how a call rejects them."""

import collections
import dataclasses
import random
import re
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jax_ub._src.methods import Method
from jax_ub.errors import UbError

# A longer error text means that a value was printed without a limit.
LONGEST_TEXT = 4000


class RaisesInRepr:
    def __repr__(self):
        raise RuntimeError("no repr")


class RecursesInRepr:
    def __repr__(self):
        return repr(self)


class NoTextInRepr:
    def __repr__(self):
        return 1


class LongRepr:
    def __repr__(self):
        return "long" * 100_000


class StringWithoutRepr(str):
    def __repr__(self):
        raise RuntimeError("no repr")


class RaisesInEquality:
    __hash__ = None

    def __eq__(self, other):
        raise RuntimeError("no equality")


class RaisesInBool:
    def __bool__(self):
        raise RuntimeError("no truth")


class UnhashableFunction:
    __hash__ = None

    def __call__(self, *args, **kwargs):
        return None


class LooksLikeAnArray:
    shape, dtype, ndim = None, "float32", 2


def nested_list(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


def nested_dict(depth):
    found = {}
    for _ in range(depth):
        found = {"a": found}
    return found


def list_in_itself():
    found = []
    found.append(found)
    return found


def deleted():
    array = jnp.zeros((2, 2)) + 0
    if isinstance(array, jax.core.Tracer):
        return array
    array.delete()
    return array


def tracer(*shape, dtype="float32"):
    """Returns a computed array: a tracer if the call is traced."""
    return jnp.cos(jnp.zeros(shape, "float32")).astype(dtype)


# By name; created inside the trace for each call.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "object()": object,
    "raises in repr": RaisesInRepr,
    "recurses in repr": RecursesInRepr,
    "no text in repr": NoTextInRepr,
    "long repr": LongRepr,
    "raises in ==": RaisesInEquality,
    "raises in bool": RaisesInBool,
    "a class": lambda: int,
    "a module": lambda: np,
    "a function of anything": lambda: lambda *args, **kwargs: None,
    "a function that returns a string": lambda: lambda *args, **kwargs: "text",
    "an unhashable function": UnhashableFunction,
    "0": lambda: 0,
    "-1": lambda: -1,
    "3": lambda: 3,
    "7": lambda: 7,
    "2**63": lambda: 2**63,
    "10**20": lambda: 10**20,
    "10**5000": lambda: 10**5000,
    "1.5": lambda: 1.5,
    "-0.5": lambda: -0.5,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "1e-320": lambda: 1e-320,
    "1j": lambda: 1j,
    "empty string": lambda: "",
    "'tp'": lambda: "tp",
    "'xla'": lambda: "xla",
    "'column'": lambda: "column",
    "null byte": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "long string": lambda: "x" * 100_000,
    "a string without a repr": lambda: StringWithoutRepr("tp"),
    "bytes": lambda: b"tp",
    "bytearray": lambda: bytearray(b"tp"),
    "[]": list,
    "()": tuple,
    "[1]": lambda: [1],
    "(None,)": lambda: (None,),
    "(raises in repr,)": lambda: (RaisesInRepr(),),
    "(1, 2, 3)": lambda: (1, 2, 3),
    "(10**20, 8)": lambda: (10**20, 8),
    "('tp', 'tp')": lambda: ("tp", "tp"),
    "([],)": lambda: ([],),
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{1: {}}": lambda: {1: {}},
    "{raises in repr: 1}": lambda: {RaisesInRepr(): 1},
    "{'qkv_fprop': object()}": lambda: {"qkv_fprop": object()},
    "set()": set,
    "a generator": lambda: iter([1, 2]),
    "nested list": lambda: nested_list(5000),
    "nested dict": lambda: nested_dict(5000),
    "a list in itself": list_in_itself,
    "an exception": lambda: ValueError("text"),
    "np [4, 8]": lambda: np.zeros((4, 8), np.float32),
    "np f64": lambda: np.zeros((4, 8)),
    "np bool": lambda: np.zeros((8, 8), bool),
    "np object": lambda: np.array([object(), None]),
    "np strings": lambda: np.array(["a", "b"]),
    "np structured": lambda: np.zeros(4, [("a", "f4"), ("b", "i4")]),
    "np date": lambda: np.datetime64("2020-01-01"),
    "np.float32(1)": lambda: np.float32(1),
    "np.int64(8)": lambda: np.int64(8),
    "np void": lambda: np.void(b"abc"),
    "array []": lambda: jnp.float32(1),
    "array [8]": lambda: jnp.zeros(8),
    "array [0, 8]": lambda: jnp.zeros((0, 8)),
    "array [8, 8]": lambda: jnp.zeros((8, 8)),
    "array [2, 2, 8, 8]": lambda: jnp.zeros((2, 2, 8, 8)),
    "array i32": lambda: jnp.zeros((8, 8), jnp.int32),
    "array bf16": lambda: jnp.zeros((8, 8), jnp.bfloat16),
    "array c64": lambda: jnp.zeros((8, 8), jnp.complex64),
    "array f8": lambda: jnp.zeros((8, 8), jnp.float8_e4m3fn),
    "array i4": lambda: jnp.zeros((8, 8), jnp.int4),
    "deleted array": deleted,
    "key": lambda: jax.random.key(0),
    "keys": lambda: jax.random.split(jax.random.key(0), (8, 8)),
    "old key": lambda: jax.random.PRNGKey(0),
    "tracer [8, 8]": lambda: tracer(8, 8),
    "tracer []": lambda: tracer(),
    "tracer bool []": lambda: tracer(dtype=bool),
    "tracer i32": lambda: tracer(8, 8, dtype="int32"),
    "ShapeDtypeStruct": lambda: jax.ShapeDtypeStruct((8, 8), jnp.float32),
    "aval": lambda: jax.core.ShapedArray((8, 8), jnp.dtype("float32")),
    "looks like an array": LooksLikeAnArray,
    "(array, array)": lambda: (jnp.zeros((8, 8)), jnp.zeros((8, 8))),
    "(array, None)": lambda: (jnp.zeros((8, 8)), None),
    "[array]": lambda: [jnp.zeros((8, 8))],
    "jnp.float32": lambda: jnp.float32,
    "np.dtype": lambda: np.dtype("float32"),
    "'float32'": lambda: "float32",
    "'float64'": lambda: "float64",
    "int32": lambda: jnp.int32,
    "key dtype": lambda: jax.random.key(0).dtype,
    "float0": lambda: jax.dtypes.float0,
    "Method.PIPELINE": lambda: Method.PIPELINE,
    "a mesh": lambda: Mesh(np.array(jax.devices()[:4]), ("tp",)),
    "an empty mesh": lambda: Mesh(np.empty((), object), ()),
    "another mesh": lambda: Mesh(np.array(jax.devices()[:2]), ("x",)),
    "an abstract mesh": lambda: (
        Mesh(np.array(jax.devices()[:4]), ("tp",)).abstract_mesh
    ),
    "PartitionSpec": lambda: PartitionSpec("tp"),
    "a device": lambda: jax.devices()[0],
    "a named tuple": lambda: collections.namedtuple("Pair", "a b")(1, 2),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """A function of the library, valid arguments, and how to call it.

    Attributes:
        valid: returns valid arguments by name.
        run: calls the function. Its argument returns the arguments, and is called at
            the same place as the function, such as inside `jax.shard_map`.
        names: further arguments that the function accepts.
        values: the bad values to try.
        fixed: valid arguments that are not changed.
    """

    valid: Callable[[], dict[str, Any]]
    run: Callable[[Callable[[], dict[str, Any]]], Any]
    names: Sequence[str] = ()
    values: Mapping[str, Callable[[], Any]] = dataclasses.field(
        default_factory=lambda: VALUES
    )
    fixed: Sequence[str] = ()

    @property
    def arguments(self) -> list[str]:
        """Returns the names of the arguments that can be changed."""
        return sorted({*self.valid(), *self.names} - {*self.fixed})


def random_changes(target: Target, seed: str) -> list[tuple[str, str]]:
    """Draws one or two arguments, or parts of them, and bad values for them."""
    draw = random.Random(seed)
    arguments = target.arguments
    chosen = draw.sample(arguments, min(len(arguments), draw.choice((1, 1, 2))))
    return [(name, draw.choice(list(target.values))) for name in chosen]


def run(target: Target, changes: Sequence[tuple[str, str]], seed: str) -> None:
    """Calls a target with changed arguments.

    Raises:
        AssertionError: if the call raises an exception that is not the library's.
    """

    def make():
        draw = random.Random(seed)
        arguments = target.valid()
        for name, value in changes:
            arguments[name] = _changed(draw, arguments.get(name), target.values[value])
        return arguments

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            target.run(make)
    except UbError as error:
        text = str(error)
        assert text and len(text) < LONGEST_TEXT, f"a text of {len(text)} characters"
    except Exception as error:
        functions = [name for _, name in changes if callable(target.values[name]())]
        if not _is_allowed(error, has_functions=bool(functions)):
            last = traceback.extract_tb(error.__traceback__)
            ours = [frame for frame in last if "/jax_ub/" in frame.filename]
            where = f"{ours[-1].filename}:{ours[-1].lineno}" if ours else "-"
            text = str(error).splitlines()[:1]
            raise AssertionError(f"{type(error).__name__} {text} at {where}") from error


def _changed(draw, before, make):
    """Replaces an argument, or a part of it, by a bad value."""
    if isinstance(before, dict) and before and draw.random() < 0.8:
        key = draw.choice(list(before))
        return {**before, key: _changed(draw, before[key], make)}
    if type(before) in (list, tuple) and before and draw.random() < 0.5:
        place = draw.randrange(len(before))
        part = _changed(draw, before[place], make)
        return type(before)([*before[:place], part, *before[place + 1 :]])
    return make()


# Python's error texts for a call that does not match a signature.
_SIGNATURE = re.compile(
    r"\(\) (got an unexpected keyword argument|missing \d+ required|takes )"
)
# Error texts of calls of `int`, and of a function whose result is not an array.
_OF_FUNCTION = re.compile(
    r"for int\(\)$|^Only scalar arrays can be converted|is not a valid JAX type$"
)


def _is_allowed(error, has_functions) -> bool:
    """Returns whether an exception that is not the library's is correct.

    Python raises one if the arguments do not match the signature of the public function
    or of a function that the caller passed. Flax raises one if it rejects an attribute
    of a linen module before jax_ub runs.
    """
    frames = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    is_ours = any("/jax_ub/" in filename for filename in frames)
    if isinstance(error, TypeError) and _SIGNATURE.search(str(error)):
        return not is_ours or has_functions
    if isinstance(error, TypeError) and _OF_FUNCTION.search(str(error)):
        return has_functions
    return not is_ours and any("/flax/" in filename for filename in frames)
