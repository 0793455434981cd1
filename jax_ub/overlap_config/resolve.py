"""From what a user configures to the overlaps of one quantization mode.

Nothing here changes what it is given, nor any table: every mode starts from the same
defaults (in Transformer Engine the first mode's overrides leak into the second).
"""

from collections.abc import Mapping

from jax_ub.errors import (
    ConfigurationError,
    ConfigurationTypeError,
    UnknownNameError,
    nearest,
    shown,
)
from jax_ub.methods import Method
from jax_ub.overlap_config.config import (
    CommOverlapType,
    OverlapConfig,
    UserBufferQuantizationMode,
    read_entry,
)
from jax_ub.overlap_config.names import (
    DGRAD,
    FPROP,
    NAMES,
    WGRAD,
    method_defaults,
    split_name,
)

_AG, _RS = CommOverlapType.AG, CommOverlapType.RS
_FUSED = frozenset(
    (
        Method.AUTO,
        Method.DIRECT,
        Method.RING_EXCHANGE,
        Method.PIPELINE,
        Method.EXTERNAL,
        Method.XLA,
    )
)
# What a pass can run. A dgrad that gathers x beside itself is bulk, one that gathers dy
# fused; a wgrad that reduce-scatters does that beside itself, one that gathers reads
# the peers in place or gathers first.
_POSSIBLE = {
    (FPROP, _AG): _FUSED,
    (FPROP, _RS): _FUSED,
    (DGRAD, _AG): _FUSED | {Method.BULK},
    (DGRAD, _RS): _FUSED,
    (WGRAD, _AG): frozenset((Method.AUTO, Method.DIRECT, Method.EXTERNAL, Method.XLA)),
    (WGRAD, _RS): frozenset((Method.BULK,)),
}
# Keys that some methods have, for any communication (None), reduce-scatter (True) or
# gathering (False); elsewhere they may not differ from the default.
_ONLY = {
    "num_splits": ((Method.PIPELINE,), None),
    "aggregate": ((Method.RING_EXCHANGE,), False),
    "use_ce": (
        (Method.RING_EXCHANGE, Method.PIPELINE, Method.BULK, Method.EXTERNAL),
        None,
    ),
    "pipeline_rs_overlap_first_gemm": ((Method.PIPELINE,), True),
}
# The entries that leave all to "auto". A wgrad that would scatter what its dgrad has
# left is displaced by that.
AUTOMATIC = {
    name: {"method": Method.AUTO.value}
    for name in NAMES
    if split_name(name)[1] != WGRAD
}
_IGNORED = (
    "ub.overlap_config.from_te leaves out what Transformer Engine accepts and ignores."
)


def read_entries(ub_cfgs: object) -> dict[str, dict[str, object]]:
    """Checks a user's dictionary, name by name, apart from how names depend on others.

    Raises:
        ConfigurationTypeError: if it is no dictionary of dictionaries, or a value is of
            another type.
        UnknownNameError: if a name, a key or a method is unknown.
        ConfigurationError: if a value is out of range.
    """
    if ub_cfgs is None:
        return {}
    if not isinstance(ub_cfgs, Mapping):
        raise ConfigurationTypeError(
            f"ub_cfgs = {shown(ub_cfgs)} is a {type(ub_cfgs).__name__}, not a "
            "dictionary of "
            'names, such as {"proj_fprop": {"method": "ring_exchange"}}.'
        )
    entries = {}
    for name, entry in ub_cfgs.items():
        if not isinstance(name, str) or not name:
            raise ConfigurationTypeError(
                f"ub_cfgs has the key {shown(name)}, which is no name: names are "
                "strings."
            )
        entries[name] = read_entry(name, entry)
        _check_name(name, entries[name])
    _check_forwards(entries)
    return entries


def _check_forwards(entries):
    """A name without a pass is a forward's: there is one for a layer."""
    for name in entries:
        full = f"{name}_{FPROP}"
        if split_name(name) == (name, FPROP) and full in {*NAMES, *entries}:
            raise ConfigurationError(
                f"ub_cfgs[{shown(name)}] is the forward of the layer {shown(name)}, "
                f"and so is {shown(full)}, which its calls run as. Leave {shown(name)} "
                "out: the passes of a layer are configured one by one."
            )


def _check_name(name, entry):
    if name not in NAMES:
        if "comm_type" in entry:
            return
        raise UnknownNameError(
            f"ub_cfgs has no overlap {shown(name)}. {nearest(name, NAMES)} A name of "
            "your "
            'own says what it communicates: "comm_type": "AG" or "RS".'
        )


def resolve(
    entries: Mapping[str, Mapping[str, object]],
    num_ranks: int,
    mode: UserBufferQuantizationMode,
) -> dict[str, OverlapConfig]:
    """Merges a user's entries over the defaults of the methods that they choose.

    A dgrad of "qkv" or "fc1" that is not bulk becomes a reduce-scatter, and its wgrad,
    which would have done that, has nothing left to communicate.

    Args:
        entries: by name, as `read_entries` returns them.
        num_ranks: P.
        mode: for which buffers.

    Returns:
        The configurations by name, the twelve in Transformer Engine's order first.

    Raises:
        ConfigurationError: if the entries contradict each other or their names.
    """
    resolved = {}
    for name in [*NAMES, *(name for name in entries if name not in NAMES)]:
        if _is_displaced(name, entries):
            continue
        entry = entries.get(name, {})
        method, comm_type = _method_and_type(name, entry)
        defaults = method_defaults(method, comm_type, num_ranks)
        _check_keys(name, method, comm_type, entry, defaults)
        _check_fp8(name, method, comm_type, entry, mode)
        merged = {
            **defaults,
            **entry,
            "method": method.value,
            "comm_type": comm_type,
        }
        _check_aggregate(name, merged, num_ranks)
        resolved[name] = OverlapConfig(**merged)
    _check_pairs(resolved)
    return resolved


def _is_displaced(name, entries):
    layer, direction = split_name(name)
    dgrad = f"{layer}_{DGRAD}"
    if direction != WGRAD or NAMES.get(name, (None, None))[1] is not _RS:
        return False
    method = entries.get(dgrad, {}).get("method", Method.BULK.value)
    if method == Method.BULK.value:
        return False
    if name in entries:
        raise ConfigurationError(
            f'ub_cfgs has {shown(name)}, but {shown(dgrad)} with method "{method}" '
            f"reduce-scatters dx itself, so that the wgrad has nothing to "
            f"communicate. Leave {shown(name)} out, or give {shown(dgrad)} the "
            'method "bulk".'
        )
    return True


def _method_and_type(name, entry):
    direction = split_name(name)[1]
    default, comm_type = NAMES.get(name, (None, entry.get("comm_type")))
    if default is None:
        default = _free_method(direction, comm_type)
    method = Method(entry.get("method", default.value))
    if name in NAMES and default is Method.BULK and method is not Method.BULK:
        comm_type = _RS if direction == DGRAD else comm_type
    if entry.get("comm_type", comm_type) is not comm_type:
        raise ConfigurationError(
            f'ub_cfgs[{shown(name)}]: with method "{method.value}" it is '
            f'"{comm_type.value}", not "{entry["comm_type"].value}". Leave comm_type '
            "and is_reduce_scatter out."
        )
    possible = _POSSIBLE[direction, comm_type]
    if method not in possible:
        known = ", ".join(f'"{one.value}"' for one in Method if one in possible)
        raise ConfigurationError(
            f"ub_cfgs[{shown(name)}]: a {direction} with {comm_type.value} has no "
            "method "
            f'"{method.value}". Possible here: {known}.'
        )
    return method, comm_type


def _free_method(direction, comm_type):
    if direction == WGRAD:
        return Method.BULK if comm_type is _RS else Method.EXTERNAL
    return Method.RING_EXCHANGE if comm_type is _AG else Method.PIPELINE


def _check_keys(name, method, comm_type, entry, defaults):
    for key, (only, scatters) in _ONLY.items():
        fits = method in only and scatters in (None, comm_type is _RS)
        if fits or entry.get(key, defaults[key]) == defaults[key]:
            continue
        where = {None: "", True: " that reduce-scatters", False: " that gathers"}
        methods = ", ".join(f'"{one.value}"' for one in only)
        raise ConfigurationError(
            f"ub_cfgs[{shown(name)}][{shown(key)}] = {shown(entry[key])} does nothing "
            "with method "
            f'"{method.value}" ({comm_type.value}): only {methods}'
            f"{where[scatters]} has it. Leave it out; {_IGNORED}"
        )


def _check_fp8(name, method, comm_type, entry, mode):
    if mode is not UserBufferQuantizationMode.FP8 or "fp8_buf" not in entry:
        return
    found = f"ub_cfgs[{shown(name)}]['fp8_buf'] = {entry['fp8_buf']}"
    if comm_type is _AG and not entry["fp8_buf"]:
        raise ConfigurationError(
            f"{found}, but what an FP8 GEMM gathers is FP8. Leave it out; {_IGNORED}"
        )
    if comm_type is _RS and entry["fp8_buf"] and method is Method.BULK:
        raise ConfigurationError(
            f"{found}, but bulk sums what a GEMM has left in the buffer, and sums are "
            'never made in FP8. Leave it out, or choose "pipeline" for the dgrad.'
        )


def _check_aggregate(name, merged, num_ranks):
    if merged["aggregate"] and num_ranks % 2:
        raise ConfigurationError(
            f"ub_cfgs[{shown(name)}]['aggregate'] = True joins pairs of ranks, but "
            f"there are {num_ranks}. Leave it out, or use an even tp_size."
        )


def _check_pairs(resolved):
    """A bulk dgrad gathers x, and its wgrad scatters dx: neither goes alone."""
    for name, config in resolved.items():
        layer, direction = split_name(name)
        partner = {DGRAD: f"{layer}_{WGRAD}", WGRAD: f"{layer}_{DGRAD}"}.get(direction)
        if partner is None or config.method != Method.BULK.value:
            continue
        other = resolved.get(partner)
        if other is None or other.method != Method.BULK.value:
            raise ConfigurationError(
                f'ub_cfgs[{shown(name)}] is "bulk", but {shown(partner)} is not: the '
                "dgrad gathers x, and the wgrad scatters dx. Configure both, with "
                'comm_type "AG" for the dgrad and "RS" for the wgrad, or neither.'
            )
