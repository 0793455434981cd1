import importlib

import pytest

import jax_ub as ub
from jax_ub._src.config import te_yaml
from jax_ub._src.config.resolve import read_entries, resolve
from jax_ub.overlap_config import (
    CommOverlapType,
    UserBufferQuantizationMode,
    from_te,
)

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


def check(found):
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
    check(from_te(path))
    check(from_te(str(path)))


def test_text_and_dictionaries_are_read_too():
    check(from_te(FILE))
    check(from_te(importlib.import_module("yaml").safe_load(FILE)))


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
    check(from_te(str(path)))
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

    monkeypatch.setattr(te_yaml.importlib, "import_module", missing)
    with pytest.raises(ImportError, match="pip install pyyaml"):
        from_te(FILE)
    check(from_te(YAML_FREE))


YAML_FREE = importlib.import_module("yaml").safe_load(FILE)
