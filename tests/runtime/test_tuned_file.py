import dataclasses
import json

import pytest

import jax_ub as ub
from jax_ub._src.errors import see
from jax_ub._src.methods import (
    PALLAS_TILES,
    KernelOptions,
    Method,
    MethodChoice,
    Variant,
)
from jax_ub._src.runtime import tuned_file
from jax_ub._src.runtime.tuned_file import COLUMN_GRADIENTS, Environment, TunedKey
from jax_ub.errors import ConfigurationError, OutputError, UnknownNameError

HERE = Environment("cpu avx2, 2 cores", (("jax", "0.10.2"),))
CASE = TunedKey("all_gather_matmul", 2, 512, 1024, 2816, "bfloat16")
CHOICE = MethodChoice(Method.PIPELINE, 4, KernelOptions(num_lanes=3, sm_margin=2))


@pytest.fixture
def path(tmp_path):
    tuned_file.write(tmp_path / "tuned.json", {HERE: {CASE: (CHOICE, {"xla": 12.5})}})
    return tmp_path / "tuned.json"


def test_a_written_file_is_read_back(path):
    assert tuned_file.read(path) == {HERE: {CASE: (CHOICE, {"xla": 12.5})}}
    assert tuned_file.choices(path, HERE).by_case == {CASE: CHOICE}


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OutputError, match="cannot write '.*folder': Is a directory"):
        tuned_file.write(tmp_path / "folder", {HERE: {CASE: (CHOICE, {})}})
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_variant_is_written_and_read_by_its_name(tmp_path):
    path = tmp_path / "tuned.json"
    once = MethodChoice(
        Method.RING_EXCHANGE, kernel_options=KernelOptions(variant=Variant.ONE_SHOT)
    )
    assert str(once) == "ring_exchange, variant one_shot"
    tuned_file.write(path, {HERE: {CASE: (once, {})}})
    (entry,) = json.loads(path.read_text())["tunings"][0]["entries"]
    assert entry["tuning"] == {"variant": "one_shot"}
    assert tuned_file.read(path) == {HERE: {CASE: (once, {})}}


def test_tiles_of_the_pallas_kernel_are_written_and_read(tmp_path):
    path = tmp_path / "tuned.json"
    choice = dataclasses.replace(CHOICE, pallas=PALLAS_TILES[2])
    tuned_file.write(path, {HERE: {CASE: (choice, {})}})
    (entry,) = json.loads(path.read_text())["tunings"][0]["entries"]
    tiles = {"rows": 128, "columns": 128, "doubled": "M", "minor": "M"}
    assert entry["pallas"] == tiles
    assert (entry["method"], entry["num_splits"]) == ("pipeline", 4)
    assert tuned_file.read(path) == {HERE: {CASE: (choice, {})}}
    assert tuned_file.choices(path, HERE).find(CASE).pallas == PALLAS_TILES[2]
    without = tuned_file.TunedTable("", {CASE: CHOICE})
    assert without.find(CASE).pallas is None


def test_only_an_all_gather_with_a_gemm_may_have_tiles(tmp_path):
    path = tmp_path / "tuned.json"
    case = dataclasses.replace(CASE, op="matmul_all_reduce")
    choice = dataclasses.replace(CHOICE, pallas=PALLAS_TILES[0])
    tuned_file.write(path, {HERE: {case: (choice, {})}})
    with pytest.raises(ConfigurationError, match="matmul_all_reduce: pallas = {'rows'"):
        tuned_file.read(path)


def test_gradients_of_column_layers_can_be_bulk(tmp_path):
    bulk = MethodChoice(Method.BULK, kernel_options=KernelOptions(gemm_algorithm=2))
    case = dataclasses.replace(CASE, op=COLUMN_GRADIENTS)
    written = {HERE: {case: (bulk, {str(bulk): 3.5})}}
    tuned_file.write(tmp_path / "tuned.json", written)
    assert tuned_file.read(tmp_path / "tuned.json") == written


def test_the_digest_depends_on_the_choices(path):
    found = tuned_file.choices(path, HERE)
    tuned_file.write(path, {HERE: {CASE: (CHOICE, {"xla": 99.0})}})
    again = tuned_file.choices(path, HERE)
    tuned_file.write(path, {HERE: {CASE: (MethodChoice(Method.XLA), {"xla": 99.0})}})
    assert found == again != tuned_file.choices(path, HERE)


def test_choices_of_another_machine_are_rejected(path):
    there = Environment("NVIDIA H200", (("jax", "0.11.2"),))
    with pytest.raises(ConfigurationError, match="is for cpu avx2, 2 cores with"):
        tuned_file.choices(path, there)


def test_a_missing_file_is_rejected(tmp_path):
    with pytest.raises(ConfigurationError, match=r"none.json.*jax_ub tune --output"):
        tuned_file.read(tmp_path / "none.json")


@pytest.mark.parametrize(
    "text, reason",
    [
        (None, "No such file or directory. Write it"),
        ("", "Expecting value: line 1 column 1 (char 0). Write it"),
        ('{"schema": 1', "Expecting ',' delimiter: line 1 column 13 (char 12). Write"),
        ('{"schema": 2}', "it does not have schema 1. Write it"),
        ('{"schema": 1}', "KeyError 'tunings'. Write it"),
        ('{"schema": 1, "tunings": []}', " is for nothing, but this is cpu "),
    ],
)
def test_an_unusable_file_is_an_error_that_names_its_argument(
    tmp_path, monkeypatch, text, reason
):
    path = tmp_path / "tuned.json"
    if text is not None:
        path.write_text(text)
    check_unusable(path, reason, monkeypatch)


def test_what_cannot_be_read_is_an_error_that_names_its_argument(tmp_path, monkeypatch):
    check_unusable(tmp_path, "Is a directory. Write it", monkeypatch)
    check_unusable("/proc/self/mem", "Input/output error. Write it", monkeypatch)


def check_unusable(path, reason, monkeypatch):
    with pytest.raises(ConfigurationError) as caught:
        ub.initialize_ub((8, 8), 1, ub_cfgs=path)
    text = str(caught.value)
    assert text.startswith(f"initialize_ub: ub_cfgs: tuned file '{path}'"), text
    assert reason in text and "python -m jax_ub tune --output FILE" in text
    assert caught.value.__notes__ == [see("docs/tune.md")]
    monkeypatch.setenv("JAX_UB_TUNED", str(path))
    with pytest.raises(ConfigurationError) as caught:
        tuned_file.process_table()
    assert str(caught.value) == text.replace("initialize_ub: ub_cfgs", "JAX_UB_TUNED")
    assert caught.value.__notes__ == [see("docs/functions.md#environment-variables")]


def test_a_file_in_ub_cfgs_replaces_the_file_of_the_environment(path, monkeypatch):
    monkeypatch.setattr(tuned_file, "environment", lambda: HERE)
    monkeypatch.setenv("JAX_UB_TUNED", str(path.with_name("missing.json")))
    ub.initialize_ub((8, 8), 1, ub_cfgs=path)
    ub.destroy_ub()


def test_a_megatron_file_is_an_error_that_names_from_te(tmp_path):
    path = tmp_path / "tp_comm_overlap.yaml"
    path.write_text("qkv_fprop: {method: ring_exchange}\n")
    with pytest.raises(ConfigurationError, match=r"overlap.yaml.*from_te"):
        ub.initialize_ub((8, 8), 1, ub_cfgs=path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"schema": 2}'])
def test_another_schema_is_rejected(tmp_path, text):
    (tmp_path / "tuned.json").write_text(text)
    with pytest.raises(
        ConfigurationError, match="does not have schema 1.*from_te reads"
    ):
        tuned_file.read(tmp_path / "tuned.json")


@pytest.mark.parametrize(
    "change, error, words",
    [
        ({"op": "all_gather"}, UnknownNameError, "unknown op 'all_gather'"),
        ({"method": "bulk"}, UnknownNameError, "unknown method 'bulk'"),
        ({"method": "pipelin"}, UnknownNameError, "unknown method 'pipelin'"),
        ({"tuning": {"lanes": 2}}, ConfigurationError, "lanes"),
        ({"tuning": {"variant": "two_shot"}}, ConfigurationError, "two_shot"),
        ({"tuning": {"num_lanes": -1}}, ConfigurationError, "num_lanes = -1"),
        ({"pallas": {"rows": 64}}, ConfigurationError, "pallas = {'rows': 64} is not"),
        ({"pallas": None}, ConfigurationError, "pallas = None is not known"),
        ({"num_splits": -4}, ConfigurationError, "num_splits = -4"),
    ],
)
def test_an_entry_with_an_invalid_field_is_rejected(path, change, error, words):
    found = json.loads(path.read_text())
    found["tunings"][0]["entries"][0].update(change)
    path.write_text(json.dumps(found))
    with pytest.raises(error, match=words):
        tuned_file.read(path)


def test_an_entry_without_a_size_is_rejected(path):
    found = json.loads(path.read_text())
    del found["tunings"][0]["entries"][0]["K"]
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigurationError, match="KeyError 'K'"):
        tuned_file.read(path)
