import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm.checkpoint import Checkpoints
from lm.model import Sizes
from lm.text import batch, read_standard_library
from lm.train import Trainer, make_mesh, make_optimizer
from programs import calls, collectives

import jax_ub as ub

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
SEED, STEPS, RESUMED_AT = 0, 12, 6

SIZES = Sizes(d_model=32, d_ff=64, num_layers=1, num_heads=4)


@pytest.fixture(scope="module")
def text():
    return read_standard_library()


def trainer(*, tp=2, dp=1, method="auto", dtype="float32", sizes=SIZES, fp8=None):
    return Trainer(
        sizes,
        mesh=make_mesh(dp, tp),
        method=method,
        dtype=jnp.dtype(dtype),
        optimizer=make_optimizer(3e-2),
        fp8=fp8,
    )


def first_state(trainer):
    return trainer.init(jax.random.key(SEED))


def losses(trainer, state, text, steps=range(STEPS), microbatches=2):
    found = []
    for step in steps:
        inputs, targets = batch(text.train, (4, 32), (SEED, step))
        data = [a.reshape(microbatches, -1, 32) for a in (inputs, targets)]
        state, loss = trainer.step(state, *data)
        found.append(float(loss))
    return np.array(found), state


@pytest.fixture(scope="module")
def reference(text):
    twin = trainer(method="xla", tp=1)
    return losses(twin, first_state(twin), text, microbatches=1)[0]


@pytest.mark.parametrize(
    ("method", "tp", "dp", "microbatches"),
    [
        ("auto", 2, 1, 2),
        ("auto", 2, 2, 1),
        ("ring_exchange", 4, 1, 1),
        ("xla", 2, 1, 2),
    ],
)
def test_losses_do_not_depend_on_method_or_mesh(
    method, tp, dp, microbatches, text, reference
):
    run = trainer(method=method, tp=tp, dp=dp)
    found, _ = losses(run, first_state(run), text, microbatches=microbatches)
    # Sums in a different order differ by a few roundings, which Adam magnifies.
    rounding = np.finfo(np.float32).eps * np.sqrt(SIZES.d_model)
    np.testing.assert_allclose(found, reference, rtol=2**STEPS * rounding)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision_follows_f32(dtype, text, reference):
    run = trainer(dtype=dtype)
    found, _ = losses(run, first_state(run), text)
    tolerance = float(jnp.finfo(dtype).eps) * np.sqrt(SIZES.d_model)
    np.testing.assert_allclose(found, reference, rtol=tolerance)


def test_a_resumed_run_continues_with_another_tp(tmp_path, text, reference):
    before, after = trainer(tp=2), trainer(tp=4)
    saved = Checkpoints(str(tmp_path), SIZES)
    first, state = losses(before, first_state(before), text, range(RESUMED_AT))
    saved.save(RESUMED_AT, state)
    saved.close()
    step, state = Checkpoints(str(tmp_path), SIZES).restore(-1, after.shapes)
    assert step == RESUMED_AT
    second, _ = losses(after, state, text, range(RESUMED_AT, STEPS))
    rounding = np.finfo(np.float32).eps * np.sqrt(SIZES.d_model)
    np.testing.assert_allclose(
        np.concatenate([first, second]), reference, rtol=2**STEPS * rounding
    )


def test_a_checkpoint_of_another_model_is_rejected(tmp_path, text):
    run = trainer()
    saved = Checkpoints(str(tmp_path), SIZES)
    saved.save(1, first_state(run))
    saved.close()
    other = Checkpoints(str(tmp_path), Sizes(64, 64, 1, 4))
    with pytest.raises(SystemExit, match="'d_model': 32.*Give the checkpoint's sizes"):
        other.restore(-1, run.shapes)
    with pytest.raises(
        SystemExit, match=r"no checkpoint of step 7 in .* There are: \[1\]"
    ):
        other.restore(7, run.shapes)
    empty = Checkpoints(str(tmp_path / "empty"), SIZES)
    with pytest.raises(SystemExit, match="no checkpoint in .* There are: none"):
        empty.restore(-1, run.shapes)


def test_every_linear_layer_is_one_call_and_nothing_else_gathers(text):
    run = trainer()
    data = [np.zeros((1, 4, 32), np.int32)] * 2
    program = run.step.lower(first_state(run), *data).compile().as_text()
    linear_layers = 4 * SIZES.num_layers + 1  # q, k, v are one, gate and up are one
    assert sum(calls(program).values()) == 3 * linear_layers  # fprop, dgrad, wgrad
    assert not {"all-gather", "reduce-scatter"} & set(collectives(program))


def test_the_script_compares_with_xla_and_plots(tmp_path):
    plot = tmp_path / "plot.png"
    sizes = "--tp 2 --d-model 64 --d-ff 128 --layers 1 --heads 2 --seq-len 64"
    flags = f"{sizes} --steps 40 --learning-rate 0.02 --plot {plot}"
    # The script sets these variables itself, before it imports JAX.
    names = set(os.environ) - {"NPROC", "JAX_NUM_CPU_DEVICES"}
    environment = {name: os.environ[name] for name in names}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *sys.path])
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples/train_lm.py"), *flags.split()],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "times as fast as xla" in done.stdout
    assert plot.stat().st_size > 10_000
    numbers = json.loads(plot.with_suffix(".json").read_text())
    ours, xla = (run["losses"] for run in numbers["runs"])
    assert np.mean(ours[-5:]) < numbers["entropy"] < ours[0]
    np.testing.assert_allclose(ours, xla, rtol=float(jnp.finfo(jnp.bfloat16).eps) * 8)


def test_the_script_resumes_from_the_middle_for_longer_at_another_tp(
    tmp_path, run_train_lm
):
    sizes = "--d-model 32 --d-ff 64 --layers 1 --heads 4 --seq-len 32 --dtype f32"
    flags = f"{sizes} --no-compare --checkpoint-dir {tmp_path} --checkpoint-every 3"

    def losses_of(name, more):
        run_train_lm(f"{flags} --plot {tmp_path / name}.png {more}".split())
        numbers = json.loads((tmp_path / f"{name}.json").read_text())
        return numbers["runs"][0]["losses"]

    # The second run replaces the checkpoint of step 6.
    first = losses_of("first", "--tp 2 --steps 6")
    second = losses_of("second", "--tp 4 --steps 7 --resume 3")
    assert len(second) == 4
    np.testing.assert_allclose(second[:3], first[3:], rtol=1e-5)


CURRENT, ROWWISE = ub.fp8.Float8CurrentScaling(), ub.fp8.RowwiseScaling()
DELAYED = ub.fp8.DelayedScaling(amax_history_len=16)


@pytest.mark.parametrize(
    ("recipe", "tp"),
    # MXFP8 needs at least 32 features per device.
    [
        (CURRENT, 1),
        (CURRENT, 4),
        (DELAYED, 1),
        (DELAYED, 4),
        (ROWWISE, 4),
        (ub.fp8.MXFP8BlockScaling(), 1),
        pytest.param(ROWWISE, 1, marks=pytest.mark.matrix),
    ],
)
def test_fp8_recipes_train_as_well(text, reference, recipe, tp):
    twin = trainer(tp=tp, fp8=recipe)
    found, _ = losses(twin, first_state(twin), text)
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, reference, rtol=0.02)


@pytest.mark.matrix
def test_mxfp8_trains_as_well_on_four_ranks(text):
    sizes = Sizes(d_model=128, d_ff=128, num_layers=1, num_heads=4)
    wide = trainer(method="xla", tp=1, sizes=sizes)
    mxfp8 = trainer(tp=4, sizes=sizes, fp8=ub.fp8.MXFP8BlockScaling())
    wanted, found = (losses(run, first_state(run), text)[0] for run in (wide, mxfp8))
    assert found[-1] < found[0]
    np.testing.assert_allclose(found, wanted, rtol=0.02)


def test_each_microbatch_updates_the_state_of_all_layers(text):
    run = trainer(tp=2, dp=2, fp8=DELAYED)
    _, state = losses(run, first_state(run), text, range(3), microbatches=2)
    leaves = jax.tree_util.tree_leaves_with_path(state.fp8)
    histories = [
        leaf for path, leaf in leaves if "amax_history" in jax.tree_util.keystr(path)
    ]
    # Query, key and value share a state, as gate and up do. The head is not FP8.
    assert len(histories) == 3 * 4 * SIZES.num_layers
    assert all(np.count_nonzero(history) == 3 * 2 for history in histories)
    assert len(leaves) == 2 * len(histories)


def test_a_resumed_run_has_the_state_of_delayed_scaling(tmp_path, text):
    run = trainer(fp8=DELAYED)
    whole, _ = losses(run, first_state(run), text)
    saved = Checkpoints(str(tmp_path), SIZES)
    _, state = losses(run, first_state(run), text, range(RESUMED_AT))
    saved.save(RESUMED_AT, state)
    saved.close()
    _, state = Checkpoints(str(tmp_path), SIZES).restore(-1, run.shapes)
    rest, _ = losses(run, state, text, range(RESUMED_AT, STEPS))
    np.testing.assert_array_equal(rest, whole[RESUMED_AT:])


def test_the_script_compares_fp8_recipes(tmp_path, run_train_lm):
    plot = tmp_path / "plot.png"
    sizes = "--tp 2 --d-model 64 --d-ff 128 --layers 1 --heads 2 --seq-len 64"
    flags = f"{sizes} --steps 12 --plot {plot} --fp8 delayed mxfp8"
    printed = run_train_lm(flags.split())
    runs = json.loads(plot.with_suffix(".json").read_text())["runs"]
    delayed, mxfp8, xla = runs
    assert [run["name"] for run in runs] == [
        "jax_ub (auto, FP8 delayed)",
        "jax_ub (auto, FP8 mxfp8)",
        "xla",
    ]
    for run in (delayed, mxfp8):
        assert f"{run['name']} is " in printed
        np.testing.assert_allclose(run["losses"], xla["losses"], rtol=0.02)
        assert run["losses"] != xla["losses"]
