"""How an op may run, and the record of where it could not run overlapped."""

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
    def materializes_gather(self) -> bool:
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
    """A call that was lowered to plain `jax.lax` or repeats work, and why."""

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

    What is traced there is in a name scope, which `called_instead` reads: a jaxpr or a
    compiled text says by itself what fell back, whatever else the process has traced.
    """
    record_fallback(label, reason)
    with jax.named_scope(_encode("fallback", label, reason)):
        yield


def called_instead(scope: str) -> Fallback | None:
    """Returns the call that fell back to what is in this name scope, or None."""
    return _decode("fallback", scope)


# Why ranks compute alike what is traced now.
_REPLICATED: contextvars.ContextVar[str] = contextvars.ContextVar(
    "replicated", default=""
)


@contextlib.contextmanager
def replicating(label: str, reason: str) -> Iterator[None]:
    """Marks what is traced in the block as computed alike by several ranks.

    Calls of jax_ub take the mark from `replicated`, and plain JAX from a name scope,
    which `replicated_in` reads.
    """
    token = _REPLICATED.set(reason)
    try:
        with jax.named_scope(_encode("replicated", label, reason)):
            yield
    finally:
        _REPLICATED.reset(token)


def replicated() -> str:
    """Returns why ranks compute alike what is traced now; empty where they do not."""
    return _REPLICATED.get()


def replicated_in(scope: str) -> Fallback | None:
    """Returns the layer in this name scope that ranks compute alike, or None."""
    return _decode("replicated", scope)


def is_mark(scope: str) -> bool:
    """Whether a part of a name stack is a mark of this module, not a user's scope."""
    return any(f"{kind}[" in scope for kind in ("fallback", "replicated"))


def _encode(kind, label, reason):
    # Name scopes are joined by "/", and printed inside quotes.
    texts = (urllib.parse.quote(text, safe="()=,:; ") for text in (label, reason))
    return f"{kind}[{'|'.join(texts)}]"


def _decode(kind, scope):
    found = re.search(rf"{kind}\[([^\]|]*)\|([^\]|]*)\]", scope)
    return found and Fallback(*map(urllib.parse.unquote, found.groups()))


def fallbacks(*, clear: bool = False) -> tuple[Fallback, ...]:
    """Returns the latest 1024 calls that do not run as they could, oldest first.

    These are automatic calls that became plain `jax.lax`, and layers that several ranks
    compute alike, because no mesh axis that the layer knows shards their work. Calls
    are added when they are traced or lowered. `ub.explain` says the same of one
    program. Transformer Engine: none.

    Args:
        clear: whether the record is empty afterwards.

    Returns:
        One for each time that such a call was lowered: `.label` names it, `.reason`
        says why.
    """
    found = tuple(_FALLBACKS)
    if clear:
        _FALLBACKS.clear()
    return found
