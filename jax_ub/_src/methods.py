"""`Method`: the ways to overlap GEMM and communication. Also records fallbacks."""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import re
import urllib.parse
from collections.abc import Iterator
from typing import NoReturn

import jax

from jax_ub._src.errors import UnknownNameError, UnsupportedOverlapError, nearest, shown


class Method(enum.Enum):
    """How an op combines its GEMM and its communication.

    `AUTO` lets jax_ub choose, and falls back to `XLA` where the engine cannot run.
    `DIRECT` reads operands directly from the peers' memory. `RING_EXCHANGE` and
    `PIPELINE` move chunks through slots while other chunks are multiplied. `BULK`
    overlaps communication with a GEMM that does not depend on it. `EXTERNAL`
    communicates before or after the GEMM. `XLA` is plain `jax.lax`, the reference.

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
    def materializes_gather(self) -> bool:
        """Whether the method stores all-gathered rows, so that they can be reused.

        The other methods read it directly from the peers' memory at each use.
        """
        return self not in (Method.AUTO, Method.DIRECT)

    @property
    def forward(self) -> "Method":
        """Returns the method for a GEMM whose operand or result is communicated.

        `BULK` cannot overlap such a GEMM and is replaced by `RING_EXCHANGE`.
        """
        return Method.RING_EXCHANGE if self is Method.BULK else self

    @property
    def code(self) -> int:
        """Returns the number by which the C++ engine knows the method."""
        return _CODES[self]


class Variant(enum.Enum):
    """A variant of the order in which a method sends chunks and runs GEMMs.

    `AGGREGATE` multiplies the chunks of two ranks in one GEMM, in a ring all-gather.
    `OVERLAP_FIRST_GEMM` sends a split of a pipelined reduce-scatter after the GEMM of
    the next split. `ONE_SHOT` is an all-reduce in one exchange, in which each rank sums
    all elements.
    """

    PLAIN = "plain"
    AGGREGATE = "aggregate"
    OVERLAP_FIRST_GEMM = "overlap_first_gemm"
    ONE_SHOT = "one_shot"

    @property
    def code(self) -> int:
        """Returns the number by which the C++ engine knows the variant."""
        return list(Variant).index(self)


def has_pairs(num_ranks: int) -> bool:
    """Returns whether ranks can be paired for `Variant.AGGREGATE`: P even and > 2."""
    return num_ranks > 2 and num_ranks % 2 == 0


# Number of parts into which method "pipeline" splits a rank's chunk by default. Must
# equal the default in csrc/engine.
DEFAULT_SPLITS = 4

# Must equal the enum values in csrc/ffi. The CPU engine runs "auto" as DIRECT.
_CODES = {
    Method.AUTO: 0,
    Method.DIRECT: 0,
    Method.RING_EXCHANGE: 1,
    Method.PIPELINE: 2,
    Method.BULK: 3,
    Method.EXTERNAL: 4,
}


def resolve(op: str, method: "Method | str | None", default: str | None) -> Method:
    """Returns the method that the user has chosen, by argument or environment.

    Args:
        op: the op's name, for errors.
        method: the call's argument; None takes `default`.
        default: the value of `JAX_UB_METHOD`; None is "auto".

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
    """Raises the error for method "bulk" in a call whose GEMM needs the communication.

    Args:
        op: the op's name, for errors.
        source: where "bulk" was set: the argument's name or `JAX_UB_METHOD`.

    Raises:
        UnsupportedOverlapError: always. It says which methods to use, and how to
            configure "bulk" for the backward pass.
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
    """A call that ran as plain `jax.lax`, or that several ranks compute redundantly.

    Attributes:
        label: the call's name.
        reason: why.
    """

    label: str
    reason: str


# Bounded, so that a process that lowers programs for weeks does not run out of memory.
_FALLBACKS: collections.deque[Fallback] = collections.deque(maxlen=1024)


def record_fallback(label: str, reason: str) -> None:
    """Adds a call, and why it fell back, to the list that `fallbacks` returns."""
    _FALLBACKS.append(Fallback(label, reason))


@contextlib.contextmanager
def falling_back(label: str, reason: str) -> Iterator[None]:
    """Records that plain JAX replaces an op that is traced in the `with` block.

    The block is in a name scope that contains label and reason, so that a jaxpr or
    compiled text shows its fallbacks. `called_instead` reads the scope.
    """
    record_fallback(label, reason)
    with jax.named_scope(_encode("fallback", label, reason)):
        yield


def called_instead(scope: str) -> Fallback | None:
    """Returns the fallback that a name scope from `falling_back` records, or None."""
    return _decode("fallback", scope)


# Why several ranks repeat the work that is being traced; empty if they do not.
_REPLICATED: contextvars.ContextVar[str] = contextvars.ContextVar(
    "replicated", default=""
)


@contextlib.contextmanager
def replicating(label: str, reason: str) -> Iterator[None]:
    """Marks operations traced in the `with` block as repeated by several ranks.

    Calls of jax_ub read the mark by `replicated`. Plain JAX operations are marked by a
    name scope, which `replicated_in` reads.
    """
    token = _REPLICATED.set(reason)
    try:
        with jax.named_scope(_encode("replicated", label, reason)):
            yield
    finally:
        _REPLICATED.reset(token)


def replicated() -> str:
    """Returns why several ranks repeat the operations being traced, or ""."""
    return _REPLICATED.get()


def replicated_in(scope: str) -> Fallback | None:
    """Returns the layer and reason that a name scope of `replicating` has, or None."""
    return _decode("replicated", scope)


def is_mark(scope: str) -> bool:
    """Returns whether a name scope comes from this module rather than from the user."""
    return any(f"{kind}[" in scope for kind in ("fallback", "replicated"))


def _encode(kind, label, reason):
    # Quoted, because name stacks join scopes by "/" and HLO prints them in quotes.
    texts = (urllib.parse.quote(text, safe="()=,:; ") for text in (label, reason))
    return f"{kind}[{'|'.join(texts)}]"


def _decode(kind, scope):
    found = re.search(rf"{kind}\[([^\]|]*)\|([^\]|]*)\]", scope)
    return found and Fallback(*map(urllib.parse.unquote, found.groups()))


def fallbacks(*, clear: bool = False) -> tuple[Fallback, ...]:
    """Returns the latest 1024 calls that fell back or repeat work, oldest first.

    These are automatic calls that became plain `jax.lax`, and layers whose work several
    ranks repeat, because no mesh axis known to the layer shards it. Calls are added
    when they are traced or lowered. `ub.explain` reports the same for one program.
    Transformer Engine: none.

    Args:
        clear: whether to empty the record.

    Returns:
        One entry for each time such a call was traced or lowered. `.label` is the
        call's name, and `.reason` says why it fell back or which work is repeated.
    """
    found = tuple(_FALLBACKS)
    if clear:
        _FALLBACKS.clear()
    return found
