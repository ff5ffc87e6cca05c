"""The GPU program, kernels included, run by the emulator: it trains as the CPU program does, under every strategy, and
whatever order of streams CUDA allows."""
import json
import subprocess

import pytest

from conftest import ROOT, Run, environment, run_program

full = pytest.mark.full
EMULATED = ROOT / "build/emulator/train_gpt"
# Small, with sizes that no vector divides evenly here and there, and dropout.
SHAPE = dict(n_layer=2, n_head=2, n_embd=48, context_length=40, vocab_size=256, sequence_length=33, micro_batch=2,
             steps=10, learning_rate=1e-3, min_learning_rate=1e-4, warmup_steps=2, dropout=0.1)


@pytest.fixture(scope="module")
def emulated():
    made = subprocess.run(["make", "-s", "-C", str(ROOT), "DEVICE=emulator", "train_gpt"], capture_output=True,
                          text=True, timeout=900)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-4000:]
    return EMULATED


def words(flags):
    for key, value in flags.items():
        yield "--" + key.replace("_", "-")
        yield str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def train(tmp_path_factory, texts, emulated):
    """train(device, env, flag=value, ...): a run with a log directory, made once."""
    made = {}

    def run(device, streams="eager", **flags):
        key = (device, streams, tuple(sorted(flags.items())))
        if key not in made:
            log_dir = tmp_path_factory.mktemp("run")
            options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "val_every": 10,
                       "val_steps": 2, "log_dir": log_dir, "timeout": 120, **SHAPE, **flags}
            if device == "cpu":
                process = run_program(*words(options))
            else:
                process = subprocess.run([str(emulated), *words(options)], capture_output=True, text=True, timeout=600,
                                         env=environment({"TRAIN_GPT_STREAMS": streams}), stdin=subprocess.DEVNULL)
            made[key] = Run(process, log_dir)
            assert made[key].code == 0, f"{device} {flags}\n{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
        return made[key]

    return run


def curve(run):
    return [{key: line[key] for key in ("step", "loss", "grad_norm", "val_loss") if key in line} for line in run.metrics]


def relative(a, b):
    assert len(a) == len(b) and len(a) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


@pytest.mark.parametrize("precision,gradients,bound", [("fp32", "auto", 1e-5), ("bf16", "auto", 1e-2),
                                                       ("bf16", "fp32", 1e-2)])
def test_ten_losses_are_the_cpus(train, precision, gradients, bound):
    flags = dict(precision=precision, gradient_dtype=gradients)
    ours, cpus = train("emulator", **flags), train("cpu", **flags)
    assert len(ours.losses) == 10
    assert relative(ours.losses, cpus.losses) <= bound
    assert relative(ours.norms[:1], cpus.norms[:1]) <= bound  # of the first step's gradient
    validations = [[line["val_loss"] for line in run.metrics if "val_loss" in line] for run in (ours, cpus)]
    assert relative(*validations) <= bound
    summary = ours.summary
    assert summary["memory_bytes"] == summary["memory_planned"]
    assert summary["communication_per_step"] == summary["communication_planned"]


@pytest.mark.parametrize("precision,bound", [("fp32", 1e-5), ("bf16", 1e-2)])
def test_strategies_have_the_same_bits(train, precision, bound):
    """At two ranks, among each other; and they are the CPU program's losses."""
    runs = [train("emulator", precision=precision, strategy=strategy, nproc=2, micro_batch=1)
            for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert all(curve(run) == curve(runs[0]) for run in runs)
    assert len({run.summary["params_hash"] for run in runs}) == 1
    cpus = train("cpu", precision=precision, strategy="ddp", nproc=2, micro_batch=1)
    assert relative(runs[0].losses, cpus.losses) <= bound


@pytest.mark.parametrize("strategy", ["ddp", "zero1", pytest.param("zero2", marks=full), "zero3"])
@pytest.mark.parametrize("streams", ["latest", "random:1", *[pytest.param(f"random:{seed}", marks=full)
                                                            for seed in range(2, 12)]])
def test_any_order_of_streams_gives_the_same_bits(train, strategy, streams):
    """A wait that is missing lets a stream run ahead, or behind, and shows as another bit. Several micro-batches, so
    that gradients are added up beside the computation."""
    flags = dict(precision="bf16", strategy=strategy, nproc=2, micro_batch=1, tokens_per_step=33 * 4, steps=4)
    eager, other = train("emulator", **flags), train("emulator", streams, **flags)
    assert curve(other) == curve(eager)
    assert other.summary["params_hash"] == eager.summary["params_hash"]


def test_recomputing_and_prefetching_change_no_bit(train):
    flags = dict(precision="bf16", strategy="zero3", nproc=2, micro_batch=1)
    plain = train("emulator", **flags)
    other = train("emulator", "random:5", **flags, recompute="full", prefetch=2, classifier_chunks=1)
    assert curve(other) == curve(plain)


def test_checkpoints_under_any_order_of_streams(train):
    """What is saved is the state after its step, whatever the streams still have to do, and what is loaded is used."""
    flags = dict(precision="bf16", strategy="zero1", nproc=2, micro_batch=1, tokens_per_step=33 * 4, steps=4)
    eager = train("emulator", **flags)
    saved = train("emulator", "latest", **flags, checkpoint_every=2)
    assert curve(saved) == curve(eager)
    resumed = train("emulator", "random:1", **flags, resume=str(saved.log_dir / "step_00000002"))
    assert [line["step"] for line in resumed.metrics] == [3, 4, 4]
    assert curve(resumed) == curve(eager)[-3:]
    assert resumed.summary["params_hash"] == eager.summary["params_hash"]


def test_the_program_says_which_device_it_is(emulated):
    process = subprocess.run([str(emulated), "--help"], capture_output=True, text=True, env=environment())
    assert process.returncode == 0 and "--matmul-tune" in process.stdout


def test_two_runs_have_the_same_bits(train, texts, emulated, tmp_path):
    """Whatever the order in which the threads of a block run."""
    flags = dict(precision="bf16")
    options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "val_every": 10, "val_steps": 2,
               "log_dir": tmp_path / "log", "timeout": 120, **SHAPE, **flags}
    process = subprocess.run([str(emulated), *words(options)], capture_output=True, text=True, timeout=600,
                             env=environment({"TRAIN_GPT_THREADS": "random:3"}), stdin=subprocess.DEVNULL)
    assert process.returncode == 0, process.stderr
    again = json.loads((tmp_path / "log/summary.json").read_text())
    assert again["params_hash"] == train("emulator", **flags).summary["params_hash"]
