"""How an op may run, and the record of where it could not run overlapped."""

import collections
import contextlib
import dataclasses
import enum
import re
from collections.abc import Iterator
from typing import NoReturn

import jax

from jax_ub.errors import UnknownNameError, UnsupportedOverlapError, nearest, shown


class Method(enum.Enum):
    """How GEMM and communication are combined.

    `AUTO` chooses, and falls back to `XLA` where the engine cannot run. `DIRECT` reads
    the peers in place. `RING_EXCHANGE` and `PIPELINE` move chunks through slots while
    others are multiplied, `BULK` communicates beside an independent GEMM, `EXTERNAL`
    before or after its own. `XLA` is plain `jax.lax`, the reference.

    Transformer Engine: `ring_exchange`, `pipeline`, `bulk` and `external` of `ub_cfgs`.
    """

    AUTO = "auto"
    DIRECT = "direct"
    RING_EXCHANGE = "ring_exchange"
    PIPELINE = "pipeline"
    BULK = "bulk"
    EXTERNAL = "external"
    XLA = "xla"

    @property
    def copies_operands(self) -> bool:
        """Whether a gathered operand is laid out in memory, so that it can be reused.

        The others read the peers in place, as often as it is needed.
        """
        return self not in (Method.AUTO, Method.DIRECT)

    @property
    def forward(self) -> "Method":
        """The method of a fused GEMM: bulk overlaps independent work only."""
        return Method.RING_EXCHANGE if self is Method.BULK else self

    @property
    def code(self) -> int:
        """The number that the engine knows the method by."""
        return _CODES[self]


class Variant(enum.Enum):
    """What a method's schedule does in another way; the engine knows them by name.

    `AGGREGATE` multiplies the chunks of two ranks together, in a ring that gathers.
    `OVERLAP_FIRST_GEMM` sends a piece of a pipeline that scatters behind the product
    of the next one. `ONE_SHOT` is an all-reduce in one exchange, in which every rank
    adds everything.
    """

    PLAIN = "plain"
    AGGREGATE = "aggregate"
    OVERLAP_FIRST_GEMM = "overlap_first_gemm"
    ONE_SHOT = "one_shot"

    @property
    def code(self) -> int:
        """The number that the engine knows the variant by."""
        return list(Variant).index(self)


def has_pairs(num_ranks: int) -> bool:
    """Whether `AGGREGATE` joins anything: two ranks have nothing to join."""
    return num_ranks > 2 and num_ranks % 2 == 0


# Pinned with csrc/engine: pieces of a shard, where a pipeline is not told.
DEFAULT_SPLITS = 4

# Pinned with csrc/ffi. Where the engine runs an automatic call, it reads in place.
_CODES = {
    Method.AUTO: 0,
    Method.DIRECT: 0,
    Method.RING_EXCHANGE: 1,
    Method.PIPELINE: 2,
    Method.BULK: 3,
    Method.EXTERNAL: 4,
}


def resolve(op: str, method: "Method | str | None", default: str | None) -> Method:
    """Finds the method that `method` names.

    Args:
        op: the op's name, for errors.
        method: what the call asks for; None takes `default`.
        default: what the process asks for (`JAX_UB_METHOD`); None is "auto".

    Raises:
        UnknownNameError: if there is no method of that name.
    """
    if isinstance(method, Method):
        return method
    source = "method" if method is not None else "JAX_UB_METHOD"
    name = method if method is not None else default
    if name is None:
        return Method.AUTO
    names = [known.value for known in Method]
    if not isinstance(name, str):
        raise UnknownNameError(
            f"{op}: {source} = {shown(name)} is of type {type(name).__name__}, not the "
            f"name of a method. {nearest('', names)}"
        )
    if name not in names:
        raise UnknownNameError(
            f"{op}: {source} = {shown(name)} is not a method. {nearest(name, names)}"
        )
    return Method(name)


def refuse_bulk(op: str, source: str) -> NoReturn:
    """Refuses "bulk" for a call that multiplies what it communicates.

    Args:
        op: the op's name, for errors.
        source: what asks for it: an argument or `JAX_UB_METHOD`.

    Raises:
        UnsupportedOverlapError: says which method to use, or how to configure a pass.
    """
    raise UnsupportedOverlapError(
        f'{op}: {source} = "bulk" communicates beside a GEMM that does not depend on '
        "the communication. Only the backward pass of a column-parallel layer has such "
        'a GEMM. Use "ring_exchange", "pipeline", "external" or "auto", or configure '
        "the backward pass of a named layer: "
        'initialize_ub(ub_cfgs={"qkv_dgrad": {"method": "bulk"}, '
        '"qkv_wgrad": {"method": "bulk"}}) and ub_name="qkv".'
    )


@dataclasses.dataclass(frozen=True)
class Fallback:
    """One call that was lowered to plain `jax.lax`, and why."""

    label: str
    reason: str


# The latest calls only: a process that lowers for weeks keeps a bounded record.
_FALLBACKS: collections.deque[Fallback] = collections.deque(maxlen=1024)


def record_fallback(label: str, reason: str) -> None:
    """Notes that the automatic choice for `label` was plain `jax.lax`."""
    _FALLBACKS.append(Fallback(label, reason))


@contextlib.contextmanager
def falling_back(label: str, reason: str) -> Iterator[None]:
    """Notes a call that becomes plain JAX while it is traced, in the block.

    What is traced there lies in a name scope, by which `called_instead` knows it.
    """
    record_fallback(label, reason)
    with jax.named_scope(f"fallback[{label}]"):
        yield


def called_instead(scope: str) -> str | None:
    """The label of the call for which JAX's own, in this scope, stands; or None."""
    found = re.search(r"fallback\[([^\]]*)\]", scope.replace("\\", ""))
    return None if found is None else found[1]


def fallbacks() -> tuple[Fallback, ...]:
    """Returns the latest 1024 automatic calls that were not overlapped, oldest first.

    Transformer Engine: none.

    Returns:
        One for each time that such a call was lowered: `.label` names it, `.reason`
        says why it became plain `jax.lax`.
    """
    return tuple(_FALLBACKS)
