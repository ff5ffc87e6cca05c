"""Weights in and out: checkpoints, Hugging Face's GPT-2, llm.c; evaluation without training; HellaSwag.

The models in test/golden/hf were written by transformers (dev/make_hf_goldens.py); test_logits, a unit test, is held to
PyTorch's logits there and prints logits of any weights.
"""
import fcntl
import json
import math
import os
import random
import shutil
import struct
import subprocess

import pytest

from conftest import ROOT, Run, environment, run_program

full = pytest.mark.full
GOLDEN = ROOT / "test/golden/hf"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
LOGITS = ROOT / "build/cpu/test/test_logits"
# Nothing divides; blocks enough for two stages.
SHAPE = dict(n_layer=3, n_head=2, n_embd=40, context_length=40, vocab_size=257)
BATCH = dict(sequence_length=24, micro_batch=2, tokens_per_step=12 * 24)
COMMON = dict(BATCH, precision="fp32", schedule="constant", learning_rate=3e-4, min_learning_rate=3e-4, warmup_steps=10,
              steps=10, val_every=0)
GRIDS = {
    "ddp": dict(strategy="ddp", nproc=1),
    "zero3x3": dict(strategy="zero3", nproc=3),
    "tp2": dict(strategy="tp", nproc=2, micro_batch=4),
    "pp2": dict(strategy="ddp", nproc=2, pipeline_parallel=2),
    "tp2dp2": dict(strategy="zero1", nproc=4, tensor_parallel=2, micro_batch=3),
}


def words(flags):
    for key, value in flags.items():
        yield "--" + key.replace("_", "-")
        yield str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def train(texts):
    """train(log_dir, flag=value, ...): a run without any shape of its own; expects the exit code `expect`."""

    def run(log_dir, expect=0, **flags):
        options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "timeout": 60, **COMMON, **flags}
        options = {key: value for key, value in options.items() if value is not None}
        result = Run(run_program(*words(options), "--log-dir", log_dir), log_dir)
        assert result.code == expect, f"exit code {result.code}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result

    return run


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory):
    """saved(grid): a run with a checkpoint after steps 5 and 10, and a validation after 10; each is made once."""
    made = {}

    def run(grid, **flags):
        key = (grid, *sorted(flags.items()))
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("saved"), checkpoint_every=5, val_every=10, val_steps=2,
                              **{**SHAPE, **GRIDS[grid], **flags})
        return made[key]

    return run


def export(*arguments, expect=0):
    process = run_program(*arguments)
    assert process.returncode == expect, process.stdout + process.stderr
    return process.stdout if expect == 0 else process.stderr


def evaluate(train, log_dir, weights, **flags):
    """The summary of an evaluation of weights: params_hash among it."""
    return train(log_dir, eval_only=True, init_from=weights, val_steps=2, train_data=None, **flags).summary


def same_files(a, b):
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir())
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


def safetensors(path):
    """Name -> (dtype, shape, raw bytes)."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, body = json.loads(raw[8:8 + length]), raw[8 + length:]
    return {name: (entry["dtype"], entry["shape"], body[entry["data_offsets"][0]:entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


# ----------------------------------------------------------------------------------------------------------------------
# Round trips


@pytest.mark.parametrize("grid", GRIDS)
def test_round_trips(grid, train, saved, tmp_path):
    """Out of any grid of ranks and into any other: the same parameters, the same bytes."""
    run = saved(grid)
    printed = export("--export", tmp_path / "hf", "--export-llmc", tmp_path / "model.bin", "--from", run.log_dir)
    for name in ("hf/config.json", "hf/model.safetensors", "model.bin"):
        assert f"{tmp_path / name}: {(tmp_path / name).stat().st_size} bytes" in printed
    tensors = safetensors(tmp_path / "hf/model.safetensors")
    assert tensors["transformer.wte.weight"][1] == [257, 40] and "lm_head.weight" not in tensors
    other = GRIDS["zero3x3" if grid != "zero3x3" else "tp2dp2"]
    sources = ((run.log_dir / "step_00000010", other), (tmp_path / "hf", other), (tmp_path / "model.bin", {}))
    for source, ranks in sources:
        summary = evaluate(train, tmp_path / f"eval_{source.name}", source, **ranks)
        assert summary["params_hash"] == run.summary["params_hash"]
    # Out of either format, and out of a checkpoint of a run that began with it: the same bytes again.
    export("--export", tmp_path / "again", "--from", tmp_path / "model.bin")
    same_files(tmp_path / "again", tmp_path / "hf")
    export("--export-llmc", tmp_path / "again.bin", "--from", tmp_path / "again")
    assert (tmp_path / "again.bin").read_bytes() == (tmp_path / "model.bin").read_bytes()


def test_a_run_from_any_form(train, saved, tmp_path):
    """Steps of training from the checkpoint, and from exports of it, under different strategies: the same bits."""
    run = saved("tp2dp2")
    export("--export", tmp_path / "hf", "--export-llmc", tmp_path / "model.bin", "--from", run.log_dir)
    flags = dict(steps=3, micro_batch=6, nproc=2)
    begun = [train(tmp_path / "a", init_from=run.log_dir, strategy="ddp", **flags),
             train(tmp_path / "b", init_from=tmp_path / "hf", strategy="zero3", **flags),
             train(tmp_path / "c", init_from=tmp_path / "model.bin", strategy="zero1", **flags)]
    assert len({run.summary["params_hash"] for run in begun}) == 1
    assert begun[0].losses == begun[1].losses == begun[2].losses
    assert len(begun[0].losses) == 3 and begun[0].losses[0] < saved("tp2dp2").losses[0]
    assert "model    3 layers, 2 heads, 40 wide, context 40, vocabulary 257" in begun[0].stdout  # none of it was given
    # The configuration that a run leaves names the same run.
    config = json.loads((begun[1].log_dir / "config.json").read_text())
    assert config["checkpoint"]["init_from"] == str(tmp_path / "hf") and config["model"]["n_embd"] == 40
    process = run_program(begun[1].log_dir / "config.json", "--log-dir", tmp_path / "again")
    assert process.returncode == 0, process.stderr
    assert Run(process, tmp_path / "again").summary["params_hash"] == begun[0].summary["params_hash"]


def test_masters_begin_as_they_are(train, saved, tmp_path):
    """bf16 with masters: they get the file's fp32 values. A step of no size shows them in the hash."""
    run = saved("zero3x3", precision="bf16")
    still = train(tmp_path / "still", init_from=run.log_dir, precision="bf16", steps=1, learning_rate=1e-30,
                  min_learning_rate=1e-30, warmup_steps=0, weight_decay=0, strategy="zero1", nproc=2, micro_batch=3)
    assert still.summary["params_hash"] == run.summary["params_hash"]
    # Without masters there are only rounded values.
    rounded = evaluate(train, tmp_path / "rounded", run.log_dir, precision="bf16")
    assert rounded["params_hash"] != run.summary["params_hash"]


def test_fresh_beginning(train, saved, tmp_path):
    """From weights, a run begins at step 0 with a fresh optimizer: other than a run that goes on."""
    run = saved("ddp")
    begun = train(tmp_path / "begun", init_from=run.log_dir, steps=15)
    assert [line["step"] for line in begun.steps] == list(range(1, 16))
    assert begun.steps[0]["lr"] == pytest.approx(3e-5)  # warm-up, from its first step
    log_dir = tmp_path / "on"
    shutil.copytree(run.log_dir, log_dir)
    on = train(log_dir, resume="auto", steps=15)
    assert on.summary["params_hash"] != begun.summary["params_hash"]


def test_a_requeued_job(train, saved, tmp_path):
    """--init-from with --resume auto: begins with the weights once, then goes on from its own checkpoints."""
    weights = tmp_path / "weights.bin"
    export("--export-llmc", weights, "--from", saved("ddp").log_dir)
    flags = dict(init_from=weights, micro_batch=3, nproc=2)
    whole = train(tmp_path / "whole", **flags)
    first = train(tmp_path / "log", resume="auto", checkpoint_every=4, steps=4, **flags)
    assert first.losses == whole.losses[:4]
    weights.unlink()  # it is not needed any more
    second = train(tmp_path / "log", resume="auto", checkpoint_every=4, **flags)
    assert f"resumed  from {tmp_path / 'log/step_00000004'}" in second.stdout
    assert second.losses == whole.losses and second.summary["params_hash"] == whole.summary["params_hash"]


def test_gpt2_vocabulary(train, saved, tmp_path):
    """50257 rows in, 50257 rows out, whatever the padding of a split vocabulary; llm.c's padding is zeros."""
    run = train(tmp_path / "log", **{**GRIDS["tp2"], "n_layer": 1, "n_head": 2, "n_embd": 8, "context_length": 8,
                                     "vocab_size": 50257, "sequence_length": 8, "micro_batch": 1, "tokens_per_step": 8,
                                     "steps": 2, "checkpoint_every": 2})
    export("--export", tmp_path / "hf", "--export-llmc", tmp_path / "model.bin", "--from", run.log_dir)
    dtype, shape, wte = safetensors(tmp_path / "hf/model.safetensors")["transformer.wte.weight"]
    assert dtype == "F32" and shape == [50257, 8]
    raw = (tmp_path / "model.bin").read_bytes()
    assert struct.unpack("<8i", raw[:32]) == (20240326, 3, 8, 50257, 1, 2, 8, 50304)
    assert raw[1024:1024 + len(wte)] == wte and raw[1024 + len(wte):1024 + 50304 * 32] == bytes(47 * 32)
    export("--export", tmp_path / "again", "--from", tmp_path / "model.bin")
    same_files(tmp_path / "again", tmp_path / "hf")
    flags = dict(sequence_length=8, micro_batch=2, tokens_per_step=None)
    for source, ranks in ((tmp_path / "hf", GRIDS["tp2"]), (tmp_path / "model.bin", dict(nproc=1))):
        summary = evaluate(train, tmp_path / f"eval_{source.name}", source, **{**ranks, **flags})
        assert summary["params_hash"] == run.summary["params_hash"]
        assert summary["parameters"] == run.summary["parameters"]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_smaller_types(dtype, train, saved, tmp_path):
    """Rounded once, what was exported goes through every form unchanged."""
    run = saved("tp2")
    export("--export", tmp_path / "hf", "--export-dtype", dtype, "--from", run.log_dir)
    tensors = safetensors(tmp_path / "hf/model.safetensors")
    assert {entry[0] for entry in tensors.values()} == {dtype.replace("fp", "F").upper()}
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["torch_dtype"] == {"bf16": "bfloat16", "fp16": "float16"}[dtype]
    export("--export", tmp_path / "again", "--export-dtype", dtype, "--from", tmp_path / "hf")
    same_files(tmp_path / "again", tmp_path / "hf")
    rounded = evaluate(train, tmp_path / "a", tmp_path / "hf")
    exact = evaluate(train, tmp_path / "b", run.log_dir)
    # bf16 keeps 8 bits, fp16 11; the loss of so small a model moves by less than the weights' relative error.
    assert rounded["final_val_loss"] == pytest.approx(exact["final_val_loss"], rel=4e-3 if dtype == "bf16" else 5e-4)
    assert rounded["params_hash"] != exact["params_hash"]
    if dtype == "bf16":
        export("--export-llmc", tmp_path / "model.bin", "--export-dtype", dtype, "--from", run.log_dir)
        assert (tmp_path / "model.bin").read_bytes()[4:8] == struct.pack("<i", 5)
        assert evaluate(train, tmp_path / "c", tmp_path / "model.bin")["params_hash"] == rounded["params_hash"]


# ----------------------------------------------------------------------------------------------------------------------
# Against PyTorch


def shard(path, tokens):
    header = struct.pack("<256i", 20240520, 1, len(tokens), *([0] * 253))
    path.write_bytes(header + struct.pack(f"<{len(tokens)}H", *tokens))


@pytest.mark.parametrize("grid, form",
                         [("ddp", "fp32"), ("zero3x3", "fp32.bin"), ("tp2", "sharded"), ("pp2", "buffers")])
def test_steps_equal_pytorchs(grid, form, train, tmp_path):
    """From a directory that transformers wrote (or its like): losses and norms of four AdamW steps are PyTorch's. The
    data are one batch, a shard for each row, so every step has it, in some order of its rows."""
    for i, row in enumerate(EXPECTED["batches"][0]):
        shard(tmp_path / f"row{i}.bin", row)
    optimizer = EXPECTED["optimizer"]
    ranks = {**GRIDS[grid], "micro_batch": 1 if grid == "zero3x3" else 3}
    run = train(tmp_path / "log", init_from=GOLDEN / form, train_data=tmp_path / "row*.bin", val_data=None, steps=4,
                sequence_length=None, tokens_per_step=24, warmup_steps=0, min_learning_rate=1e-3,
                **{**ranks, **optimizer})
    assert run.losses == pytest.approx(EXPECTED["repeated_losses"], rel=1e-5)
    assert run.norms == pytest.approx(EXPECTED["repeated_norms"], rel=1e-5)


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    """transformers(script, argument, ...): runs a script of dev/ with the real library, over the system's PyTorch."""
    venv = tmp_path_factory.mktemp("transformers") / "venv"
    system = subprocess.run(["/usr/bin/python3", "-c", "import torch; print(torch.__version__)"], capture_output=True,
                            text=True)
    if system.returncode != 0:
        pytest.skip("PyTorch is not here (scripts/test.sh --full installs it)")
    # The last for Debian 12's PyTorch 1.13; a later one for later Pythons.
    version = "4.35.2" if system.stdout.startswith("1.") else "4.46.3"
    for command in (["/usr/bin/python3", "-m", "venv", "--system-site-packages", venv],
                    [venv / "bin/pip", "install", "-q", f"transformers=={version}"]):
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode != 0:
            pytest.skip(f"transformers cannot be installed: {process.stdout[-500:]}{process.stderr[-500:]}")

    def run(script, *arguments):
        process = subprocess.run([venv / "bin/python", ROOT / "dev" / script, *map(str, arguments)],
                                 capture_output=True, text=True, env=environment({"HF_HUB_OFFLINE": "1"}), timeout=300)
        assert process.returncode == 0, process.stderr[-4000:]
        return process.stdout

    return run


def assert_same_logits(ours, theirs, tolerance):
    assert len(ours) == len(theirs) and len(ours[0]) == len(theirs[0])
    assert max(abs(a - b) for x, y in zip(ours, theirs) for a, b in zip(x, y)) <= tolerance


@full
@pytest.mark.parametrize("grid", ["zero3x3", "tp2dp2", "pp2"])
def test_exports_load_in_transformers(grid, saved, transformers, tmp_path):
    """Their logits are ours: of the export, and of the checkpoint that it came from."""
    run = saved(grid)
    tokens = [draw % 257 for draw in range(3, 1200, 37)]
    for dtype in ("fp32", "bf16", "fp16"):
        export("--export", tmp_path / dtype, "--export-dtype", dtype, "--from", run.log_dir)
        theirs = [[float(word) for word in line.split()] for line in
                  transformers("transformers_check.py", "logits", tmp_path / dtype, *tokens).splitlines()]
        assert_same_logits(logits(tmp_path / dtype, tokens), theirs, 1e-5)
        if dtype == "fp32":
            assert_same_logits(logits(run.log_dir, tokens), theirs, 1e-5)


@full
def test_goldens_are_what_transformers_makes(transformers, tmp_path):
    transformers("make_hf_goldens.py", tmp_path / "hf")
    made = json.loads((tmp_path / "hf/expected.json").read_text())
    for key in ("logits", "losses", "norms", "repeated_losses", "repeated_norms"):
        assert made[key] == pytest.approx(EXPECTED[key], rel=1e-9, abs=1e-9)  # float64 on another machine
    assert made["batches"] == EXPECTED["batches"]
    for name in ("fp32.bin", "bf16.bin", "fp32/model.safetensors", "bf16/model.safetensors", "fp16/model.safetensors"):
        assert (tmp_path / "hf" / name).read_bytes() == (GOLDEN / name).read_bytes(), name


@full
def test_gpt2_vocabulary_loads_in_transformers(train, transformers, tmp_path):
    run = train(tmp_path / "log", **{**GRIDS["tp2"], "n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 16,
                                     "vocab_size": 50257, "sequence_length": 16, "micro_batch": 1,
                                     "tokens_per_step": 16, "steps": 3, "checkpoint_every": 3})
    export("--export", tmp_path / "hf", "--from", run.log_dir)
    tokens = [50256, 0, 17, 50255, 31000]
    theirs = [[float(word) for word in line.split()] for line in
              transformers("transformers_check.py", "logits", tmp_path / "hf", *tokens).splitlines()]
    assert_same_logits(logits(run.log_dir, tokens), theirs, 1e-5)


@full
@pytest.mark.parametrize("grid", ["ddp", "zero3x3", "tp2", "pp2", "tp2dp2"])
def test_steps_equal_pytorchs_on_another_shape(grid, train, transformers, tmp_path):
    """A directory that transformers writes now -> steps of training equal to PyTorch's."""
    transformers("transformers_check.py", "train", tmp_path / "hf", tmp_path / "expected.json")
    expected = json.loads((tmp_path / "expected.json").read_text())
    for i, row in enumerate(expected["rows"]):
        shard(tmp_path / f"row{i}.bin", row)
    ranks = {**GRIDS[grid], "micro_batch": 2 if grid == "zero3x3" else 3}
    run = train(tmp_path / "log", init_from=tmp_path / "hf", train_data=tmp_path / "row*.bin", val_data=None, steps=5,
                sequence_length=None, tokens_per_step=6 * 32, warmup_steps=0, min_learning_rate=1e-3,
                **{**ranks, **EXPECTED["optimizer"]})
    assert run.losses == pytest.approx(expected["losses"], rel=1e-5)
    assert run.norms == pytest.approx(expected["norms"], rel=1e-5)


# ----------------------------------------------------------------------------------------------------------------------
# Evaluation


def tree(folder):
    return {path.relative_to(folder): (path.stat().st_mtime_ns, path.read_bytes())
            for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("grid", ["ddp", "zero3x3", "tp2dp2"])
def test_evaluation_only(grid, train, saved, tmp_path):
    """The loss that training saw, from parameters alone; nothing of the run is touched."""
    run = saved(grid)
    log_dir = tmp_path / "log"
    shutil.copytree(run.log_dir, log_dir)
    (log_dir / "step_00000099.new").mkdir()  # of a run that is writing, say
    (log_dir / "step_00000099.new/rank_00000.safetensors").write_text("")
    before = tree(log_dir)
    result = train(log_dir, eval_only=True, resume="auto", val_steps=2, train_data=None, sample_every=1,
                   sample_tokens=4, sample_prompt="ba", **GRIDS[grid])
    assert "sample after 10 steps ---\nba" in result.stdout
    evaluated = Run(subprocess.CompletedProcess([], 0), log_dir / "eval")
    assert evaluated.metrics == [{"step": 10, "val_loss": run.metrics[-1]["val_loss"]}]
    summary = evaluated.summary
    assert summary["final_val_loss"] == run.summary["final_val_loss"]
    assert summary["params_hash"] == run.summary["params_hash"]
    assert summary["memory_bytes"] == summary["memory_planned"]
    assert summary["memory_bytes"]["optimizer"] == 0 and summary["memory_bytes"]["gradients"] == 0
    assert summary["memory_bytes"]["peak"] < run.summary["memory_bytes"]["peak"]
    assert summary["communication_per_step"] == summary["communication_planned"]
    # An older one by name, which training would begin from and throw the later one away.
    older = train(log_dir, eval_only=True, resume=log_dir / "step_00000005", val_steps=2, train_data=None)
    assert "step 5: validation loss" in older.stdout
    after = tree(log_dir)
    assert {path: after[path] for path in before} == before
    assert {path.parts[0] for path in set(after) - set(before)} == {"eval"}
    # With a log directory of its own.
    other = train(tmp_path / "other", eval_only=True, resume=log_dir / "step_00000010", val_steps=2, train_data=None)
    assert other.summary["params_hash"] == run.summary["params_hash"]


def test_evaluation_beside_a_log(train, saved, tmp_path):
    """An evaluation leaves the log of a run that trained without checkpoints, and replaces that of another evaluation."""
    weights = saved("ddp").log_dir
    trained = train(tmp_path / "trained", steps=2, **SHAPE)
    before = tree(trained.log_dir)
    for _ in range(2):
        train(trained.log_dir, eval_only=True, init_from=weights, val_steps=2, train_data=None)
        after = tree(trained.log_dir)
        assert {path: after[path] for path in before} == before
        assert sorted({path.parts[0] for path in set(after) - set(before)}) == ["eval"]
        assert len((trained.log_dir / "eval/metrics.jsonl").read_text().splitlines()) == 1
    for _ in range(2):
        evaluated = train(tmp_path / "evaluated", eval_only=True, init_from=weights, val_steps=2, train_data=None)
        assert len(evaluated.metrics) == 1 and not (evaluated.log_dir / "eval").exists()


def make_hellaswag(path, count, vocabulary, longest, seed=8):
    """A file in llm.c's form of made-up examples: [(label, context, four completions)]."""
    draw = random.Random(seed)
    examples, numbers = [], []
    for number in range(count):
        context = [draw.randrange(vocabulary) for _ in range(draw.randint(1, longest // 2))]
        ends = [[draw.randrange(vocabulary) for _ in range(draw.randint(1, longest - len(context)))] for _ in range(4)]
        label = draw.randrange(4)
        body = [number, label, 4, len(context), *context]
        for end in ends:
            body += [len(end), *end]
        examples.append((label, context, ends))
        numbers.append([65535, 2 * (len(body) + 2), *body])
    header = struct.pack("<256i", 20240522, 1, count, max(2 * len(one) for one in numbers), *([0] * 252))
    path.write_bytes(header + b"".join(struct.pack(f"<{len(one)}H", *one) for one in numbers))
    return examples


def logits(weights, tokens):
    process = subprocess.run([LOGITS, weights, *map(str, tokens)], capture_output=True, text=True, timeout=60,
                             env=environment({"OMP_NUM_THREADS": "1"}))
    assert process.returncode == 0, process.stderr
    return [[float(word) for word in line.split()] for line in process.stdout.splitlines()]


def mean_loss(weights, context, end):
    """Of the completion's tokens, from the logits behind those before them."""
    rows = logits(weights, (context + end)[:-1])[len(context) - 1:]
    losses = []
    for row, token in zip(rows, end, strict=True):
        highest = max(row)
        losses.append(highest + math.log(sum(math.exp(x - highest) for x in row)) - row[token])
    return sum(losses) / len(losses)


@pytest.fixture(scope="module")
def hellaswag(tmp_path_factory):
    """A file of examples, and how many of them the golden model answers right, by its logits."""
    path = tmp_path_factory.mktemp("hellaswag") / "examples.bin"
    examples = make_hellaswag(path, 7, 13, 9)
    right = []
    for label, context, ends in examples:
        losses = [mean_loss(GOLDEN / "fp32", context, end) for end in ends]
        ranked = sorted(losses)
        assert ranked[1] - ranked[0] > 1e-4, "a tie that rounding could decide"
        right.append(losses.index(ranked[0]) == label)
    assert right[-1] and not all(right)  # one that is left out, or taken twice, shows
    return path, sum(right), len(examples)


HELLASWAG_GRIDS = {
    "one rank": dict(micro_batch=4),
    "a row at a time": dict(micro_batch=1),
    "three rows": dict(micro_batch=3),
    "more rows than there are": dict(micro_batch=64),
    "two ranks": dict(strategy="ddp", nproc=2, micro_batch=5),
    "three ranks": dict(strategy="zero3", nproc=3, micro_batch=3),
    "tensor": dict(nproc=2, strategy="tp", micro_batch=6),
    "sequence": dict(nproc=2, tensor_parallel=2, sequence_parallel=True, micro_batch=2),
    "pipeline": dict(nproc=2, pipeline_parallel=2, micro_batch=3),
    "all": dict(nproc=4, tensor_parallel=2, pipeline_parallel=2, micro_batch=3),
}


@pytest.mark.parametrize("grid", HELLASWAG_GRIDS)
def test_hellaswag(grid, hellaswag, train, tmp_path):
    path, correct, count = hellaswag
    run = train(tmp_path / "log", eval_only=True, init_from=GOLDEN / "fp32", hellaswag=path, train_data=None,
                val_data=None, sequence_length=None, tokens_per_step=None, **HELLASWAG_GRIDS[grid])
    assert run.metrics == [{"step": 0, "hellaswag": pytest.approx(correct / count, rel=1e-8),
                            "hellaswag_correct": correct, "hellaswag_examples": count}]
    assert run.summary["final_hellaswag"] == pytest.approx(correct / count)
    assert f"HellaSwag {correct} of {count}" in run.stdout
    assert run.summary["memory_bytes"] == run.summary["memory_planned"]


def test_hellaswag_while_training(hellaswag, texts, train, tmp_path):
    """Every few steps and at the end; training does not see it, nor does the plan."""
    path = tmp_path / "examples.bin"
    make_hellaswag(path, 5, 257, 20)
    flags = dict(SHAPE, strategy="zero2", nproc=2, micro_batch=3, val_every=4, val_steps=1, steps=7)
    plain = train(tmp_path / "plain", **flags)
    run = train(tmp_path / "log", hellaswag=path, hellaswag_every=3, **flags)
    lines = [line for line in run.metrics if "hellaswag" in line]
    assert [line["step"] for line in lines] == [0, 3, 6, 7]
    assert all(line["hellaswag"] == pytest.approx(line["hellaswag_correct"] / 5) for line in lines)
    assert run.losses == plain.losses and run.summary["params_hash"] == plain.summary["params_hash"]
    for key in ("memory_bytes", "communication_per_step"):
        assert run.summary[key] == plain.summary[key]
    assert run.summary["memory_bytes"] == run.summary["memory_planned"]


# ----------------------------------------------------------------------------------------------------------------------
# The host's memory for checkpoints


@pytest.mark.parametrize("flags", [dict(precision="bf16"), dict(precision="fp32", checkpoint_async=False),
                                   dict(precision="bf16", tensor_parallel=2, pipeline_parallel=2),
                                   dict(precision="bf16", n_layer=4, pipeline_parallel=3)],
                         ids=["bf16", "waiting", "grid", "a later stage has most"])
def test_plan_of_snapshots(flags, train, tmp_path):
    """What --plan says of every strategy's snapshots is what runs allocate."""
    ranks = flags.get("tensor_parallel", 1) * flags.get("pipeline_parallel", 1)
    ranks = 2 if ranks == 1 else ranks
    options = {**SHAPE, **BATCH, "micro_batch": 3, "checkpoint_every": 2, **flags}
    process = run_program("--plan", "--world-size", ranks, *words(options), "--plan-json", tmp_path / "plan.json")
    assert process.returncode == 0, process.stderr
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "host: checkpoint " in process.stdout
    for strategy in ("ddp", "zero3") if ranks == 2 else ("zero1",):
        run = train(tmp_path / strategy, strategy=strategy, nproc=ranks, steps=2, **options)
        assert run.summary["checkpoints"]["snapshot_bytes"] == plan[strategy]["snapshot_bytes"] > 0
        assert f"{plan[strategy]['snapshot_bytes'] / 1e6:.3f}" in process.stdout
    none = run_program("--plan", *words({**SHAPE, **BATCH}), "--plan-json", tmp_path / "none.json")
    assert "host: checkpoint" not in none.stdout
    assert json.loads((tmp_path / "none.json").read_text())["ddp"]["snapshot_bytes"] == 0


# ----------------------------------------------------------------------------------------------------------------------
# Errors: one line that names the key or the file, exit code 2, nothing written


def damage(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_errors(saved, texts, hellaswag, tmp_path):
    good = saved("zero3x3").log_dir
    damaged, partial, foreign, empty = (tmp_path / name for name in ("damaged", "partial", "foreign", "empty"))
    shutil.copytree(good, damaged)
    damage(damaged / "step_00000010/rank_00001.safetensors")
    shutil.copytree(good, partial)
    (partial / "step_00000010/rank_00002.safetensors").unlink()
    shutil.copytree(good, foreign)
    (foreign / "latest").write_text("../../etc\n")
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    (empty / "config.json").write_text("{}")
    truncated = tmp_path / "truncated.bin"
    truncated.write_bytes((GOLDEN / "fp32.bin").read_bytes()[:-1])
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text("mine")
    data = ["--train-data", texts / "train.txt"]
    evaluation = ["--eval-only", "--val-data", texts / "val.txt"]
    examples = ["--eval-only", "--init-from", GOLDEN / "fp32", "--hellaswag"]
    cases = [
        (data + ["--init-from", tmp_path / "nowhere"], ["nowhere", "cannot be read"]),
        (data + ["--init-from", texts], ["texts", "no weights of a known kind", "checkpoint", "Hugging Face", "llm.c"]),
        (data + ["--init-from", truncated], ["truncated.bin", "truncated"]),
        (data + ["--init-from", empty], ["empty", "without a checkpoint"]),
        (data + ["--init-from", foreign], ["latest", "does not name a checkpoint"]),
        (data + ["--init-from", damaged], ["rank_00001.safetensors", "checksum"]),
        (data + ["--init-from", damaged, "--nproc", 2], ["rank_00001.safetensors", "checksum"]),
        (data + ["--init-from", partial], ["rank_00002.safetensors", "No such file"]),
        (data + ["--init-from", good, "--n-layer", 4, "--n-embd", 48], ["n_layer 3, but 4", "n_embd 40, but 48"]),
        (data + ["--init-from", good, "--preset", "gpt2-124M"],
         ["n_layer 3, but 12", "n_head 2, but 12", "n_embd 40, but 768", "context_length 40, but 1024",
          "vocab_size 257, but 50257"]),
        (data + ["--init-from", good, "--resume", good / "step_00000010"], ["init_from", "resume", "one of them"]),
        (data + ["--init-from", good, "--tensor-parallel", 3, "--nproc", 3], ["tensor_parallel", "n_head 2"]),
        (data + ["--resume", tmp_path / "step_00000007", "--sequence-length", 1024],  # more than the default's
         ["step_00000007/manifest.json", "cannot be read"]),
        (data + ["--hellaswag-every", 3], ["hellaswag_every", "--hellaswag FILE"]),
        (evaluation, ["eval_only", "random weights", "--init-from"]),
        (evaluation + ["--resume", "auto", "--log-dir", notes], ["notes", "no checkpoint"]),
        (evaluation + ["--resume", damaged / "step_00000010"], ["rank_00001.safetensors", "checksum"]),
        (evaluation + ["--resume", good / "step_00000010", "--n-layer", 5], ["n_layer 3", "5"]),
        (["--eval-only", "--init-from", good], ["eval_only", "--val-data"]),
        (examples + [tmp_path / "nowhere.bin"], ["nowhere.bin"]),
        (examples + [truncated], ["truncated.bin", "HellaSwag"]),
        (examples + [hellaswag[0], "--sequence-length", 3], ["examples.bin", "sequence length 3"]),
        (["--export", tmp_path / "out"], ["from", "no weights"]),
        (["--from", good], ["from", "--export DIRECTORY"]),
        (["--export", tmp_path / "out", "--from", damaged], ["rank_00001.safetensors", "checksum"]),
        (["--export", tmp_path / "out", "--from", partial / "step_00000010"], ["rank_00002.safetensors"]),
        (["--export", notes, "--from", good], ["notes", "notes.txt", "not overwritten"]),
        (["--export", good, "--from", good], ["saved", "no export", "not overwritten"]),
        (["--export-llmc", texts / "train.txt", "--from", good], ["train.txt", "not overwritten"]),
        (["--export-llmc", tmp_path / "out.bin", "--export-dtype", "fp16", "--from", good], ["export_dtype", "fp16"]),
        # The target comes before the source, which is damaged.
        (["--export", tmp_path / "no/where", "--from", damaged], ["no/where", "cannot be made"]),
        (["--export-llmc", tmp_path / "no/out.bin", "--from", damaged], ["no/out.bin", "No such file"]),
        (["--export-llmc", f"{notes}/", "--from", damaged], ["--export-llmc", "notes/", "slash"]),
        (["--export", f"{tmp_path}/out//", "--export-llmc", tmp_path / "out", "--from", good], ["--export-llmc", "out"]),
        (["--export", tmp_path / "out", "--export-llmc", f"{tmp_path}/./out/model.safetensors", "--from", good],
         ["--export-llmc", "model.safetensors", "another name"]),
        (["--export", tmp_path / "out", "--export-llmc", f"{tmp_path}/./out", "--from", good], ["out", "not overwritten"]),
        (["--export", tmp_path / "out", "--export-llmc", tmp_path / "out.bin", "--from", damaged],
         ["rank_00001.safetensors", "checksum"]),
        (["--export", tmp_path / "out", "--from", good, "--plan"], ["--plan", "export"]),
        (["--export", tmp_path / "out", "--from", good, "--eval-only"], ["--eval-only", "export"]),
        (["--export-llmc", tmp_path / "out.bin", "--from", good, "--init-from", good], ["--init-from", "--from"]),
        (["--export", tmp_path / "out", "--from", good, "--resume", "auto"], ["resume", "--from"]),
    ]
    before = {path: path.stat().st_mtime_ns for folder in (tmp_path, good) for path in folder.rglob("*")}
    for arguments, parts in cases:
        log = ["--log-dir", tmp_path / "log"] if "--log-dir" not in arguments and "--from" not in arguments else []
        process = run_program(*arguments, *log, "--steps", 3)
        assert process.returncode == 2, f"{arguments}: exit code {process.returncode}\n{process.stdout}{process.stderr}"
        lines = process.stderr.splitlines()
        assert len(lines) == 1 and lines[0].startswith("train_gpt: error: "), f"{arguments}: {process.stderr}"
        for part in parts:
            assert part in lines[0], f"{arguments}: {part} is not in: {lines[0]}"
        after = {path: path.stat().st_mtime_ns for folder in (tmp_path, good) for path in folder.rglob("*")}
        assert after == before, f"{arguments}: wrote something"


def test_what_an_export_may_replace(saved, tmp_path):
    """Neither somebody's file nor another kind of model, and never its own source."""
    good = saved("zero3x3").log_dir
    strangers = {"run/config.json": '{"model": {"n_layer": 2}}', "llama/config.json": '{"model_type": "llama"}',
                 "llama/model.safetensors": "theirs", "alone/model.safetensors": "theirs", "notes.bin.tmp": "notes"}
    for name, text in strangers.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["--export", tmp_path / "run"], ["--export", tmp_path / "llama"],
                      ["--export", tmp_path / "alone"], ["--export-llmc", tmp_path / "notes.bin"]):
        assert "not overwritten" in export(*arguments, "--from", good, expect=2)
    assert {name: (tmp_path / name).read_text() for name in strangers} == strangers
    export("--export-llmc", tmp_path / "whole.bin", "--from", good)
    whole = (tmp_path / "whole.bin").read_bytes()
    source = tmp_path / "model.bin.tmp"
    source.write_bytes(whole)
    assert "cannot be its source" in export("--export-llmc", tmp_path / "model.bin", "--from", source, expect=2)
    assert source.read_bytes() == whole and not (tmp_path / "model.bin").exists()
    export("--export-llmc", tmp_path / "model.bin", "--from", good)  # what an interrupted export has left gives way
    assert (tmp_path / "model.bin").read_bytes() == whole and not source.exists()


def test_exports_at_once(saved, tmp_path):
    """Of exports to one target at once one writes, and the others are refused: what appears is a whole one."""
    sources = [saved("zero3x3").log_dir / name for name in ("step_00000010", "step_00000005")]
    models = []
    for i, source in enumerate(sources):
        export("--export", tmp_path / f"hf{i}", "--export-llmc", tmp_path / f"{i}.bin", "--from", source)
        models.append(((tmp_path / f"hf{i}/model.safetensors").read_bytes(), (tmp_path / f"{i}.bin").read_bytes()))
    assert models[0][0] != models[1][0]
    targets = ["--export", tmp_path / "hf", "--export-llmc", tmp_path / "model.bin"]
    for _ in range(5):
        running = [subprocess.Popen([ROOT / "train_gpt", *targets, "--from", sources[i % 2]], env=environment(),
                                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for i in range(6)]
        ended = [(process.communicate(timeout=120)[1], process.returncode) for process in running]
        assert all(code == 0 or (code == 2 and str(tmp_path) in error) for error, code in ended), ended
        assert any(code == 0 for _, code in ended)
        written = (tmp_path / "hf/model.safetensors").read_bytes(), (tmp_path / "model.bin").read_bytes()
        assert written[0] in (models[0][0], models[1][0]) and written[1] in (models[0][1], models[1][1])
        assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
        assert not (tmp_path / "model.bin.tmp").exists()
    for target, temporary in (("hf", "hf/config.json.tmp"), ("model.bin", "model.bin.tmp")):
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        with open(tmp_path / temporary, "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            option = "--export" if target == "hf" else "--export-llmc"
            refused = export(option, tmp_path / target, "--from", sources[0], expect=2)
            assert str(tmp_path / target) in refused and "by another process" in refused, refused
            assert (tmp_path / temporary).exists()
        (tmp_path / temporary).unlink()
        assert {**before, tmp_path / "hf": 0} == {**{path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")},
                                                  tmp_path / "hf": 0}


def test_latest_is_not_needed(saved, tmp_path):
    """The newest checkpoint with a manifest stands for a log directory whose latest is missing, or names none."""
    good, log_dir = saved("zero3x3").log_dir, tmp_path / "log"
    shutil.copytree(good, log_dir)
    for step in (5, 10):
        export("--export", tmp_path / f"hf{step}", "--from", good / f"step_{step:08d}")

    def expect(step, name):
        export("--export", tmp_path / name, "--from", log_dir)
        same_files(tmp_path / name, tmp_path / f"hf{step}")

    (log_dir / "latest").write_text("step_00000005\n")
    expect(5, "named")
    (log_dir / "latest").write_text("step_00000099\n")
    expect(10, "gone")
    (log_dir / "latest").unlink()
    expect(10, "none")
    (log_dir / "metrics.jsonl").unlink()
    (log_dir / "step_00000010/manifest.json").unlink()
    expect(5, "no manifest")
    shutil.rmtree(log_dir / "step_00000005")
    (log_dir / "latest").write_text("step_00000099\n")
    assert "step_00000099" in export("--export", tmp_path / "nothing", "--from", log_dir, expect=2)


def test_manifest_without_files(saved, texts, tmp_path):
    """A manifest of a huge model takes no memory, and its missing files are named, not what it would need."""
    manifest = json.loads((saved("ddp").log_dir / "step_00000010/manifest.json").read_text())
    manifest["model"].update(n_layer=1000, n_head=1024, n_embd=65536)
    manifest["grid"].update(tensor_parallel=1024, data_parallel=1, pipeline_parallel=1, shard_group=1)
    manifest["files"] = manifest["files"][:1] * 1024
    huge = tmp_path / "huge"
    huge.mkdir()
    (huge / "manifest.json").write_text(json.dumps(manifest))
    evaluation = ["--eval-only", "--val-data", texts / "val.txt"]
    for arguments in (["--export", tmp_path / "out", "--from", huge], evaluation + ["--resume", huge],
                      evaluation + ["--init-from", huge]):
        with open(tmp_path / "error", "w") as error:
            process = subprocess.Popen([ROOT / "train_gpt", *map(str, arguments)], env=environment(),
                                       stdout=subprocess.DEVNULL, stderr=error)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 2 and "rank_00000.safetensors" in (tmp_path / "error").read_text()
        assert usage.ru_maxrss < 400_000  # KB; the program and its libraries take a small part of it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["error", "huge"]


def test_latest_of_another_program(saved, tmp_path):
    """A Hugging Face model with a file latest, such as DeepSpeed's, is no log directory."""
    export("--export", tmp_path / "hf", "--from", saved("zero3x3").log_dir)
    (tmp_path / "hf/latest").write_text("global_step500\n")
    export("--export", tmp_path / "again", "--from", tmp_path / "hf")
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "hf/model.safetensors").read_bytes()


def test_a_failing_export(saved, tmp_path):
    """A disk that is full: exit code 1, the file named, nothing left but what was there."""
    good = saved("zero3x3").log_dir
    export("--export", tmp_path / "hf", "--from", good)
    before = {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}

    def limit():
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000))

    for target in ("hf", "new"):
        process = subprocess.run([ROOT / "train_gpt", "--export", tmp_path / target, "--from", good], env=environment(),
                                 preexec_fn=limit, capture_output=True, text=True, timeout=60)
        assert process.returncode == 1 and "model.safetensors" in process.stderr, process.stderr
    assert {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()} == before
    assert not (tmp_path / "new").exists()
