"""Tuned files: the methods measured fastest for each op and size, by device.

`python -m jax_ub tune` writes them. A file has one *tuning* for each combination of
device and library versions. A tuning has one method choice for each op and size. A
process uses the tuning of its devices.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from jax_ub._src.errors import ConfigurationError, UnknownNameError, nearest, shown
from jax_ub._src.methods import (
    PALLAS_TILES,
    KernelOptions,
    Method,
    MethodChoice,
    PallasTiles,
    Variant,
)
from jax_ub._src.output import version_of, write_json, writing
from jax_ub._src.parallel import OVERLAPPED
from jax_ub._src.runtime import cpu_engine, cuda_engine, hosts, settings

# Version of the format of tuned files, which store measured times and the fastest
# methods. The version must be incremented when a key changes its meaning.
SCHEMA = 1
# The methods that a tuned file may select for an op with communication.
METHODS = tuple(each for each in Method if each not in (Method.AUTO, Method.BULK))
# The name that tuned files use for the gradients of a column-parallel layer as one op.
# Its dgrad and wgrad are timed together with their all-gather and reduce-scatter,
# because with "bulk" each collective runs during a GEMM that does not depend on it. The
# sizes M, K, N are those of the forward pass.
COLUMN_GRADIENTS = "column_gradients"
# The ops in tuned files that are GEMMs of one rank, without communication. M, K and N
# are the sizes of the product, [M, K] times [K, N]. In a wgrad, K is the number of
# tokens. The ops differ in the layout of the operands and in what is added to the
# product.
LOCAL_OPS = ("matmul", "dgrad", "dgrad_add", "wgrad", "wgrad_accumulate")
# All ops that a tuned file may contain.
OPS = (*OVERLAPPED, COLUMN_GRADIENTS, *LOCAL_OPS)
# The libraries whose versions an `Environment` contains, because the fastest methods
# may differ between versions.
_PACKAGES = ("jax", "jaxlib", "jax_ub")


def methods_of(op: str) -> tuple[Method, ...]:
    """Returns the methods that an entry of a tuned file may name for an op."""
    if op in LOCAL_OPS:
        return (Method.DIRECT, Method.XLA)
    return (*METHODS, Method.BULK) if op == COLUMN_GRADIENTS else METHODS


@dataclasses.dataclass(frozen=True)
class TunedKey:
    """Key of a measurement in a tuned file: op, number of ranks, sizes and dtype."""

    op: str
    num_ranks: int
    M: int
    K: int
    N: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Environment:
    """The device kind and library versions with which methods were measured.

    Methods are used only in an equal environment, since the fastest ones differ in
    others.
    """

    device: str
    versions: tuple[tuple[str, str], ...]  # (library, version), sorted by library

    def __str__(self) -> str:
        """Returns the text "<device kind> with <library> <version>, ..."."""
        libraries = ", ".join(f"{name} {version}" for name, version in self.versions)
        return f"{self.device} with {libraries}"


@dataclasses.dataclass(frozen=True)
class TunedTable:
    """The fastest measured method for each op and size, on this kind of device."""

    digest: str  # hash of all choices
    by_case: Mapping[TunedKey, MethodChoice] = dataclasses.field(
        compare=False, repr=False
    )

    def find(self, case: TunedKey) -> MethodChoice | None:
        """Returns the fastest method for an op and sizes, or None if not measured.

        The choice is not explicit, so the call may fall back.
        """
        found = self.by_case.get(case)
        return None if found is None else dataclasses.replace(found, is_explicit=False)


TunedFile = dict[Environment, dict[TunedKey, tuple[MethodChoice, dict[str, float]]]]


def read(
    path: str | os.PathLike[str],
    fix: str = "Write it again with: python -m jax_ub tune --output FILE",
) -> TunedFile:
    """Reads a tuned file as {environment: {key: (method choice, times in us)}}.

    Errors end with `fix`, the advice of what to do with a file that cannot be read.
    """
    where = f"tuned file {shown(str(path))}"
    other = f"{fix}. ub.overlap_config.from_te reads YAML and JSON files of Megatron"
    try:
        found = json.loads(pathlib.Path(path).read_text())
    except OSError as error:  # the text omits the error's path, which may be long
        raise ConfigurationError(f"{where}: {error.strerror}. {fix}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: {error}. {other}.") from error
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ConfigurationError(f"{where}: it does not have schema {SCHEMA}. {other}.")
    try:
        return {
            _read_environment(tuning): dict(map(_read_entry, tuning["entries"]))
            for tuning in found["tunings"]
        }
    except UnknownNameError as error:
        raise UnknownNameError(f"{where}: {error}") from error
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{where}: {type(error).__name__} {error}. {fix}"
        ) from error


def as_json(tunings: TunedFile) -> dict[str, Any]:
    """Returns the JSON document of a tuned file with these measurements."""
    return {
        "schema": SCHEMA,
        "tunings": [
            {
                "device": environment.device,
                "versions": dict(environment.versions),
                "entries": [_entry(case, *found) for case, found in cases.items()],
            }
            for environment, cases in tunings.items()
        ],
    }


def write(path: str | os.PathLike[str], tunings: TunedFile) -> None:
    """Writes a tuned file atomically: readers see either the old or the new file."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        write_json(temporary, as_json(tunings))
        with writing(path):
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # if the disk is full, for example


def choices(path: str | os.PathLike[str], here: Environment) -> TunedTable:
    """Returns the methods that a tuned file has for `here`, a device and versions."""
    tunings = read(path)
    if here not in tunings:
        known = "; ".join(map(str, tunings)) or "nothing"
        raise ConfigurationError(
            f"tuned file {shown(str(path))} is for {known}, but this is {here}. Add a "
            "tuning for it: python -m jax_ub tune --output FILE"
        )
    by_case = {case: choice for case, (choice, _) in tunings[here].items()}
    text = "\n".join(sorted(map(str, by_case.items())))
    return TunedTable(hashlib.sha256(text.encode()).hexdigest()[:16], by_case)


def process_table() -> TunedTable | None:
    """Returns the table of fastest methods in the file `JAX_UB_TUNED`, or None."""
    path = settings.tuned()
    return None if path is None else read_table("JAX_UB_TUNED", path)


def read_table(source: str, path: str) -> TunedTable:
    """Reads the fastest methods for this process's kind of device from a tuned file.

    The result is cached until the file changes. Errors begin with `source`, which names
    the argument or the environment variable that has the path.
    """
    try:
        return _read_table(path, settings.version_of_file(path))
    except (ConfigurationError, UnknownNameError) as error:
        raise type(error)(f"{source}: {error}") from error


@functools.lru_cache(maxsize=8)
def _read_table(path, version):
    return choices(path, environment())


@functools.cache
def environment() -> Environment:
    """Returns the device kind and the library versions of this process."""
    device = jax.local_devices()[0]
    versions = {name: version_of(name) for name in _PACKAGES}
    if cuda_engine.is_cuda(device):
        versions["CUDA"] = device.client.platform_version.splitlines()[-1]
        name = device.device_kind
    else:
        isa = "without an engine"
        if cpu_engine.why_not() is None:
            cpu_engine.configure()
            isa = cpu_engine.load().isa()
        name = f"{device.device_kind} {isa}, {len(hosts.cores())} cores"
    return Environment(name, tuple(sorted(versions.items())))


def _read_environment(tuning):
    given = tuning["versions"]
    versions = sorted((name, _typed(given, name, str)) for name in given)
    return Environment(_typed(tuning, "device", str), tuple(versions))


def _read_entry(entry: dict[str, Any]):
    fields = dataclasses.fields(TunedKey)
    case = TunedKey(**{f.name: _typed(entry, f.name, f.type) for f in fields})
    if case.op not in OPS:
        raise UnknownNameError(f"unknown op {shown(case.op)}. {nearest(case.op, OPS)}")
    methods = [method.value for method in methods_of(case.op)]
    if entry["method"] not in methods:
        raise UnknownNameError(
            f"unknown method {shown(entry['method'])}. "
            f"{nearest(entry['method'], methods)}"
        )
    options = dict(entry["tuning"])
    options["variant"] = Variant(options.get("variant", Variant.PLAIN))
    for name in options.keys() - {"variant"}:
        _typed(options, name, int, least=None if name.endswith("priority") else 0)
    choice = MethodChoice(
        Method(entry["method"]),
        _typed(entry, "num_splits", int, least=0),
        KernelOptions(**options),
        pallas=_read_tiles(case, entry["pallas"]) if "pallas" in entry else None,
    )
    given = dict(entry["times_us"])
    times_us = {name: float(_typed(given, name, int | float)) for name in given}
    return case, (choice, times_us)


def _read_tiles(case: TunedKey, given: Any) -> PallasTiles:
    for tiles in PALLAS_TILES:
        if case.op == "all_gather_matmul" and given == dataclasses.asdict(tiles):
            return tiles
    raise ValueError(f"{case.op}: pallas = {shown(given)} is not known")


def _typed(entry, name, kind, least=None):
    value = entry[name]
    is_valid = isinstance(value, kind) and (least is None or value >= least)
    if not is_valid or (kind is int and abs(value) >= 1 << 62):
        raise TypeError(f"{name} = {shown(value)} has a wrong type or is out of range")
    return value


def _entry(case, choice, times_us):
    tiles = choice.pallas
    return {
        **dataclasses.asdict(case),
        **({} if tiles is None else {"pallas": dataclasses.asdict(tiles)}),
        "method": choice.method.value,
        "num_splits": choice.num_splits,
        "tuning": choice.kernel_options.differences(),
        "times_us": {name: round(us, 3) for name, us in times_us.items()},
    }
