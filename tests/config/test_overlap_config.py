import dataclasses
import pathlib
import re

import numpy as np
import pytest

import jax_ub as ub
from jax_ub._src.config.overlap_config import (
    KEYS,
    OverlapConfig,
    read_entry,
)
from jax_ub._src.config.ub_cfgs import NAMES, method_defaults, read_entries
from jax_ub._src.methods import Method
from jax_ub.overlap_config import CommOverlapType

BAD_VALUES = {
    "method": [7, "rings"],
    "comm_type": ["AR", 3],
    "is_reduce_scatter": [2, "yes"],
    "num_splits": [0, -1, 1.0, True, "4"],
    "aggregate": [None, 3],
    "num_sm": [0, 33, 2.5, True],
    "cga_size": [0, 3, 16, "2"],
    "set_sm_margin": ["on", 2],
    "use_ce": [None, 2],
    "fp8_buf": ["no", -1],
    "wire_dtype": ["int8", "FP8", 1],
    "comm_priority": [1, -6, "high"],
    "gemm_priority": [1, -6, 0.0],
    "pipeline_rs_overlap_first_gemm": ["", 5],
    "atomic_gemm": ["no", 2],
}


def config(**changes):
    fields = {
        "method": "ring_exchange",
        "comm_type": CommOverlapType.AG,
        **method_defaults(Method.RING_EXCHANGE, CommOverlapType.AG, 4),
        **changes,
    }
    return OverlapConfig(**fields)


def test_every_key_rejects_some_value():
    assert set(BAD_VALUES) == set(KEYS)


@pytest.mark.parametrize(
    ("key", "value"),
    [(key, value) for key, values in BAD_VALUES.items() for value in values],
)
def test_an_invalid_value_is_an_error_with_the_valid_ones(key, value):
    with pytest.raises(
        ValueError, match=rf"\['{key}'\] = .* is (not|out of)"
    ) as caught:
        read_entry("qkv_fprop", {key: value})
    assert "qkv_fprop" in str(caught.value)


def test_a_value_of_another_type_is_a_type_error_too():
    with pytest.raises(TypeError, match="is not an integer, 1 to 32"):
        read_entry("qkv_fprop", {"num_sm": "many"})


def test_an_integer_out_of_range_is_not_called_another_type():
    text = r"= 64 is out of range: it must be an integer, 1 to 32\."
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        read_entry("qkv_fprop", {"num_sm": 64})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fc1_forward", "fc1_fprop"),
        ("qkv_fwd", "qkv_fprop"),
        ("fc2_backward", "fc2_dgrad"),
        ("proj_wgad", "proj_wgrad"),
    ],
)
def test_the_nearest_overlap_has_the_pass_that_was_meant(name, meant):
    text = rf"\['{name}'\] is an unknown overlap. Did you mean '{meant}'\?"
    with pytest.raises(ub.errors.UnknownNameError, match=text):
        read_entries({name: {"method": "pipeline"}})


def test_a_misspelt_key_names_the_nearest():
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'num_sm'?"):
        read_entry("qkv_fprop", {"num_smm": 1})


def test_a_misspelt_method_names_the_nearest():
    with pytest.raises(
        ub.errors.UnknownNameError, match="'pipelin' is not a method.*'pipeline'?"
    ):
        read_entry("qkv_fprop", {"method": "pipelin"})


def test_an_entry_that_is_no_dictionary_is_rejected():
    with pytest.raises(TypeError, match="'bulk' is not a dictionary"):
        read_entry("qkv_fprop", "bulk")


@pytest.mark.parametrize("value", [True, 1])
def test_an_atomic_gemm_is_rejected_with_the_reason(value):
    with pytest.raises(ub.errors.ConfigurationError, match="cuBLAS 13 has no atomic"):
        read_entry("qkv_fprop", {"atomic_gemm": value})


@pytest.mark.parametrize("value", [False, 0])
def test_atomic_gemm_false_is_accepted(value):
    assert read_entry("qkv_fprop", {"atomic_gemm": value}) == {}


def test_megatrons_zeros_and_ones_are_flags():
    read = read_entry("qkv_fprop", {"aggregate": 1, "set_sm_margin": 0})
    assert read == {"aggregate": True, "set_sm_margin": False}
    assert all(isinstance(value, bool) for value in read.values())


def test_numpy_scalars_are_accepted():
    given = {"num_sm": np.int64(4), "cga_size": np.int8(2), "use_ce": np.bool_(False)}
    read = read_entry("proj_fprop", given)
    assert read == {"num_sm": 4, "cga_size": 2, "use_ce": False}
    assert [type(value) for value in read.values()] == [int, int, bool]


def test_method_none_is_auto():
    assert read_entry("qkv_fprop", {"method": None}) == {"method": "auto"}
    assert read_entry("qkv_fprop", {"method": Method.DIRECT}) == {"method": "direct"}


def test_is_reduce_scatter_selects_the_comm_type():
    rs = {"comm_type": CommOverlapType.RS}
    assert read_entry("own", {"is_reduce_scatter": 1}) == rs
    assert read_entry("own", {"comm_type": "rs", "is_reduce_scatter": True}) == rs
    with pytest.raises(ub.errors.ConfigurationError, match="Leave one of them out"):
        read_entry("own", {"comm_type": "AG", "is_reduce_scatter": True})


def test_a_configuration_is_a_mapping_and_hashable_over_every_field():
    one = config()
    assert dict(one)["num_splits"] == one.num_splits == 4
    assert one["is_reduce_scatter"] is False
    assert set(one) == set(KEYS)
    assert len(one) == len(KEYS)
    assert one == config()
    assert hash(one) == hash(config())
    for field in dataclasses.fields(one):
        if field.type is int or field.type is bool:
            changed = config(**{field.name: getattr(one, field.name) + 1})
            assert hash(changed) != hash(one), field.name
            assert changed != one, field.name


def test_a_configuration_has_no_other_keys():
    with pytest.raises(KeyError):
        config()["keys"]


def test_the_guide_has_every_key_every_name_and_its_defaults():
    guide = pathlib.Path(__file__).parents[2] / "docs/initialize_ub.md"
    text = guide.read_text()
    assert all(f"`{key}`" in text for key in KEYS)
    for names in DEFAULT_ROWS.findall(text):
        for name in re.findall(r"`(\w+)`", names[0]):
            method, comm_type = NAMES[name]
            defaults = method_defaults(method, comm_type, 0)
            assert names[1] == method.value
            assert names[2] == comm_type.value
            assert names[3:6] == tuple(
                str(defaults[key]) for key in ("num_sm", "cga_size", "set_sm_margin")
            )
    assert len(DEFAULT_ROWS.findall(text)) == len(NAMES) // 2
    comm, gemm = (defaults[f"{kind}_priority"] for kind in ("comm", "gemm"))
    assert f"by default {comm} (the highest) for communication and {gemm}" in text


DEFAULT_ROWS = re.compile(
    r"^\| (`\w+_\w+`, `\w+`) \| (\w+) \| (\w+) of [^|]* \| (\d+) \| (\d+) \| (\w+) \|",
    re.MULTILINE,
)
