import copy
import importlib

import pytest

import jax_ub as ub
from jax_ub._src.config.ub_cfgs import NAMES, read_entries, resolve
from jax_ub._src.methods import Method
from jax_ub.overlap_config import (
    CommOverlapType,
    UserBufferQuantizationMode,
    from_te,
)

AG, RS = CommOverlapType.AG, CommOverlapType.RS
NONE, FP8 = UserBufferQuantizationMode.NONE, UserBufferQuantizationMode.FP8


def resolved(ub_cfgs=None, num_ranks=8, mode=NONE):
    return resolve(read_entries(ub_cfgs), num_ranks, mode)


# Transformer Engine's table: names, method, type, num_sm, cga_size, margin, splits.
DEFAULTS = [
    (("qkv_fprop", "fc1_fprop"), "ring_exchange", AG, 1, 1, False, 8),
    (("proj_dgrad", "fc2_dgrad"), "ring_exchange", AG, 1, 1, False, 8),
    (("proj_fprop", "fc2_fprop"), "pipeline", RS, 16, 2, True, 4),
    (("qkv_dgrad", "fc1_dgrad"), "bulk", AG, 16, 2, True, 4),
    (("qkv_wgrad", "fc1_wgrad"), "bulk", RS, 16, 2, True, 4),
    (("proj_wgrad", "fc2_wgrad"), "external", AG, 16, 2, True, 4),
]


@pytest.mark.parametrize(
    ("name", "row"), [(name, row) for row in DEFAULTS for name in row[0]]
)
def test_defaults_are_transformer_engines(name, row):
    config = resolved()[name]
    assert (config.method, config.comm_type) == row[1:3]
    assert (config.num_sm, config.cga_size) == row[3:5]
    assert (config.set_sm_margin, config.num_splits) == row[5:]
    assert config.fp8_buf is (config.comm_type is AG)
    assert config.use_ce
    assert not config.aggregate
    assert (config.comm_priority, config.gemm_priority) == (-5, 0)


def test_there_are_twelve_names():
    assert len(resolved()) == len(NAMES) == 12


def test_another_method_has_its_own_defaults():
    config = resolved({"proj_fprop": {"method": "ring_exchange"}})["proj_fprop"]
    assert (config.num_sm, config.cga_size, config.num_splits) == (1, 1, 8)
    assert not config.set_sm_margin
    config = resolved({"qkv_fprop": {"method": "pipeline", "num_sm": 4}})["qkv_fprop"]
    assert (config.num_sm, config.cga_size, config.num_splits) == (4, 2, 4)
    assert config.set_sm_margin


@pytest.mark.parametrize("method", ["ring_exchange", "pipeline", "direct", None])
@pytest.mark.parametrize("layer", ["qkv", "fc1"])
def test_a_dgrad_that_is_not_bulk_reduce_scatters_and_removes_its_wgrad(layer, method):
    found = resolved({f"{layer}_dgrad": {"method": method}})
    assert found[f"{layer}_dgrad"].comm_type is RS
    assert found[f"{layer}_dgrad"].fp8_buf is False
    assert f"{layer}_wgrad" not in found
    assert len(found) == 11


def test_a_removed_wgrad_cannot_be_configured():
    with pytest.raises(ub.errors.ConfigurationError, match="nothing to communicate"):
        resolved({"qkv_dgrad": {"method": "pipeline"}, "qkv_wgrad": {"num_sm": 4}})


def test_a_bulk_dgrad_keeps_its_wgrad():
    found = resolved({"qkv_dgrad": {"method": "bulk"}, "qkv_wgrad": {"num_sm": 4}})
    assert found["qkv_wgrad"].num_sm == 4


def test_overrides_of_one_mode_do_not_affect_the_next():
    given = {"qkv_dgrad": {"method": "ring_exchange"}}
    before = copy.deepcopy(given), copy.deepcopy(NAMES)
    first, second = (resolved(given, mode=mode) for mode in (NONE, FP8))
    third = resolved(None, mode=FP8)
    assert first == second
    assert "qkv_wgrad" in third
    assert third["qkv_dgrad"].method == "bulk"
    assert (given, NAMES) == before


def test_other_names_must_configure_comm_type():
    found = resolved({"mla_fprop": {"comm_type": "AG"}, "head": {"comm_type": "RS"}})
    assert found["mla_fprop"].method == "ring_exchange"
    assert found["head"].method == "pipeline"
    assert len(found) == 14


@pytest.mark.parametrize("entries", [("qkv",), ("mla", "mla_fprop")])
def test_a_layer_has_one_forward_pass(entries):
    text = rf"\['{entries[0]}'\] configures the forward .* as '{entries[0]}_fprop' does"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        resolved({name: {"comm_type": "AG"} for name in entries})


def test_bulk_of_other_names_needs_dgrad_and_wgrad():
    dgrad = {"comm_type": "AG", "method": "bulk"}
    wgrad = {"comm_type": "RS"}
    assert resolved({"a_dgrad": dgrad, "a_wgrad": wgrad})["a_wgrad"].method == "bulk"
    for alone in ({"a_dgrad": dgrad}, {"a_wgrad": wgrad}):
        with pytest.raises(ub.errors.ConfigurationError, match="Configure both"):
            resolved(alone)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("qkv_fprop", "bulk"),
        ("proj_fprop", "bulk"),
        ("qkv_wgrad", "pipeline"),
        ("proj_wgrad", "ring_exchange"),
        ("proj_wgrad", "bulk"),
    ],
)
def test_a_method_that_the_pass_cannot_run_is_rejected(name, method):
    with pytest.raises(
        ub.errors.ConfigurationError, match=f'cannot use method "{method}"'
    ):
        resolved({name: {"method": method}})


def test_the_comm_type_of_a_known_name_cannot_change():
    with pytest.raises(
        ub.errors.ConfigurationError, match='comm_type is "AG", not "RS"'
    ):
        resolved({"qkv_fprop": {"comm_type": "RS"}})
    assert resolved({"qkv_fprop": {"is_reduce_scatter": 0}})


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("qkv_fprop", {"num_splits": 2}),
        ("qkv_dgrad", {"num_splits": 8}),
        ("proj_fprop", {"aggregate": True}),
        ("proj_fprop", {"method": "ring_exchange", "aggregate": True}),
        ("proj_fprop", {"method": "direct", "use_ce": False}),
        ("proj_fprop", {"method": "auto", "use_ce": False}),
        ("qkv_fprop", {"pipeline_rs_overlap_first_gemm": True}),
        ("qkv_fprop", {"method": "pipeline", "pipeline_rs_overlap_first_gemm": True}),
    ],
)
def test_a_key_without_effect_is_rejected(name, entry):
    with pytest.raises(ub.errors.ConfigurationError, match="has no effect with method"):
        resolved({name: entry})


def test_a_key_at_its_default_is_accepted():
    found = resolved({"proj_fprop": {"aggregate": 0, "use_ce": 1, "num_splits": 2}})
    assert found["proj_fprop"].num_splits == 2
    assert resolved({"qkv_fprop": {"aggregate": 1}})["qkv_fprop"].aggregate


def test_aggregate_needs_an_even_number_of_ranks():
    with pytest.raises(ub.errors.ConfigurationError, match="pairs the ranks"):
        resolved({"qkv_fprop": {"aggregate": True}}, num_ranks=3)


def test_gathered_operands_of_fp8_gemms_are_fp8():
    given = {"qkv_fprop": {"fp8_buf": False}}
    assert resolved(given)["qkv_fprop"].fp8_buf is False
    with pytest.raises(
        ub.errors.ConfigurationError, match="operand of an FP8 GEMM is FP8"
    ):
        resolved(given, mode=FP8)


def test_partial_sums_may_be_sent_but_not_summed_in_fp8():
    given = {"proj_fprop": {"fp8_buf": True}}
    assert resolved(given, mode=FP8)["proj_fprop"].fp8_buf
    with pytest.raises(ub.errors.ConfigurationError, match="never computed in FP8"):
        resolved({"qkv_wgrad": {"fp8_buf": True}}, mode=FP8)


@pytest.mark.parametrize("given", [7, "qkv_fprop", [{}]])
def test_configurations_that_are_no_dictionary_are_rejected(given):
    with pytest.raises(ub.errors.ConfigurationTypeError, match="not a dictionary"):
        read_entries(given)


@pytest.mark.parametrize("name", [7, ""])
def test_names_are_strings(name):
    with pytest.raises(
        ub.errors.ConfigurationTypeError, match="names are non-empty strings"
    ):
        read_entries({name: {}})


def test_every_method_can_be_configured():
    for method in Method:
        name = "qkv_dgrad" if method is Method.BULK else "qkv_fprop"
        assert resolved({name: {"method": method}})[name].method == method.value


# A file in the format of Megatron and NeMo, with keys that they set and keys that
# Transformer Engine ignores.
FILE = """
# Bulk overlap with AllGather / ReduceScatter
qkv_dgrad:
  method: bulk
  num_sm: 4
  cga_size: 2
  set_sm_margin: 0
qkv_wgrad:
  method: bulk
  num_sm: 8
  cga_size: 2
  set_sm_margin: 0
fc1_dgrad: {method: ring_exchange, aggregate: 0, fp8_buf: 0}

# Ring-exchange overlap with AllGather
qkv_fprop:
  method: ring_exchange
  aggregate: 1
  num_splits: 4
  fp8_buf: false
  atomic_gemm: 0
proj_dgrad: {method: ring_exchange, aggregate: 0}

# Chunked-collective overlap with ReduceScatter
proj_fprop:
  method: pipeline
  num_sm: 24
  cga_size: 2
  num_splits: 4
  set_sm_margin: 1
  fp8_buf: 1
fc2_fprop: {method: ring_exchange, num_splits: 4, aggregate: 0}
"""


def check_file(found):
    assert found["qkv_dgrad"]["set_sm_margin"] is False
    assert found["qkv_fprop"] == {"method": "ring_exchange", "aggregate": True}
    assert found["proj_fprop"]["fp8_buf"] is True
    assert found["fc2_fprop"] == {"method": "ring_exchange"}
    assert found["fc1_dgrad"] == {"method": "ring_exchange", "fp8_buf": False}
    for mode in UserBufferQuantizationMode:
        configs = resolve(read_entries(found), 8, mode)
        assert "fc1_wgrad" not in configs
        assert configs["qkv_wgrad"].num_sm == 8
        assert configs["proj_fprop"].num_splits == 4


def test_megatrons_file_is_read_unchanged(tmp_path):
    path = tmp_path / "tp_comm_overlap.yaml"
    path.write_text(FILE)
    check_file(from_te(path))
    check_file(from_te(str(path)))


def test_text_and_dictionaries_are_read_too():
    check_file(from_te(FILE))
    check_file(from_te(importlib.import_module("yaml").safe_load(FILE)))


@pytest.mark.parametrize("text", ["{}", "\n", "# nothing: here\n"])
def test_an_empty_file_configures_nothing(text):
    source = {} if text == "{}" else text
    assert from_te(source) == {}


def test_names_without_a_value_are_left_out():
    text = "fc1_dgrad: {method: ring_exchange}\nfc1_wgrad:\n"
    assert from_te(text) == {"fc1_dgrad": {"method": "ring_exchange"}}
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'fc1_wgrad'?"):
        from_te({"fc1_wgard": None})


def test_keys_that_the_default_method_of_another_name_reads_are_kept():
    gather = {"comm_type": CommOverlapType.AG, "aggregate": True}
    scatter = {"comm_type": CommOverlapType.RS, "num_splits": 8}
    given = {"mla_fprop": gather, "head": scatter}
    assert from_te(given) == given
    assert from_te({"head": {**scatter, "method": "direct"}}) == {
        "head": {"comm_type": CommOverlapType.RS, "method": "direct"}
    }


def test_a_misspelt_name_in_a_file_is_rejected():
    with pytest.raises(ub.errors.UnknownNameError, match="Did you mean 'qkv_fprop'?"):
        from_te("qkv_fprob: {method: bulk}")


def test_an_atomic_gemm_in_a_file_is_rejected():
    with pytest.raises(ub.errors.ConfigurationError, match="cuBLAS 13"):
        from_te("qkv_fprop: {method: ring_exchange, atomic_gemm: 1}")


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ub.errors.ConfigurationError, match="cannot read .*none.yaml"):
        from_te(tmp_path / "none.yaml")


def test_a_path_may_have_a_colon(tmp_path):
    path = tmp_path / "llama:70b.yaml"
    path.write_text(FILE)
    check_file(from_te(str(path)))
    with pytest.raises(ub.errors.ConfigurationError, match="cannot read .*8b.yaml"):
        from_te(str(tmp_path / "llama:8b.yaml"))


def test_a_file_in_another_encoding_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes("# für H100\nqkv_fprop: {}\n".encode("latin-1"))
    with pytest.raises(ub.errors.ConfigurationError, match="latin.yaml.*utf-8"):
        from_te(path)


def test_invalid_yaml_is_rejected():
    with pytest.raises(ub.errors.ConfigurationError, match="the source is not YAML"):
        from_te("qkv_fprop: {method: [}")


def test_a_repeated_key_is_rejected_with_its_lines(tmp_path):
    twice = "qkv_fprop:\n  num_sm: 2\n  method: external\n  num_sm: 4\n"
    text = "line 4 repeats 'num_sm' of line 2"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        from_te(twice)
    with pytest.raises(ub.errors.ConfigurationError, match="line 1 repeats 'use_ce'"):
        from_te("qkv_fprop: {use_ce: 1, use_ce: 0}")
    path = tmp_path / "twice.yaml"
    path.write_text("qkv_fprop: {}\n\nproj_fprop: {}\nqkv_fprop: {method: external}\n")
    text = "line 4 repeats 'qkv_fprop' of line 1"
    with pytest.raises(ub.errors.ConfigurationError, match=text):
        from_te(path)


def test_a_merged_mapping_may_be_overridden():
    text = """
qkv_dgrad: &shared {method: bulk, num_sm: 4}
fc1_dgrad: {<<: *shared, num_sm: 8}
"""
    assert from_te(text)["fc1_dgrad"] == {"method": "bulk", "num_sm": 8}


def test_a_source_of_another_type_is_rejected():
    with pytest.raises(
        ub.errors.ConfigurationTypeError, match="source = 7 is not supported"
    ):
        from_te(7)


def test_a_missing_pyyaml_is_an_error_that_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        from_te(FILE)
    check_file(from_te(YAML_FREE))


YAML_FREE = importlib.import_module("yaml").safe_load(FILE)
