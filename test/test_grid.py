"""Tensor, sequence and pipeline parallelism, alone and together: every grid of ranks trains the same model, takes the
bytes it should take, and sends what it should send.

What is expected is worked out here from the shapes alone, or comes from the same batch on one rank.
"""
import array
import json
import random
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from conftest import ROOT, Run, run_program

full = pytest.mark.full
TOLERANCE = 5e-6  # relative: the order of summation differs
# The conditions of that tolerance: fp32, 20 steps, a learning rate of 3e-4 at most, 10 steps of warm-up.
BASE = dict(precision="fp32", steps=20, learning_rate=3e-4, min_learning_rate=3e-5, warmup_steps=10, n_layer=4, n_head=4,
            n_embd=32, context_length=24, sequence_length=24, vocab_size=256, micro_batch=2, tokens_per_step=384)
DATA = ("strategy", "shard_group", "tensor_parallel", "sequence_parallel", "pipeline_parallel", "pipeline_chunks",
        "prefetch", "reshard_after_forward", "recompute", "classifier_chunks", "micro_batch", "nproc", "check_replicas",
        "overlap")  # options that do not change what is computed


def words(flags):
    for key, value in flags.items():
        yield "--" + key.replace("_", "-")
        yield str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A shard of tokens below 65, and one below 50257."""
    folder, draw = tmp_path_factory.mktemp("tokens"), random.Random(3)
    for vocabulary in (65, 50257):
        values = [min(draw.randrange(vocabulary), draw.randrange(vocabulary)) for _ in range(20000)]
        (folder / f"{vocabulary}.bin").write_bytes(array.array("i", [20240520, 1, len(values)] + [0] * 253).tobytes() +
                                                   array.array("H", values).tobytes())
    return folder


@pytest.fixture(scope="module")
def train(tmp_path_factory, texts, tokens):
    """train(flag=value, ...): a run with a log directory; BASE holds where nothing is given. Each is made once."""
    made = {}

    def run(**flags):
        flags = {**BASE, **flags}
        key = tuple(sorted(flags.items()))
        if key not in made:
            text = tokens / f"{flags['vocab_size']}.bin" if flags["vocab_size"] != 256 else texts / "train.txt"
            val = texts / "val.txt" if flags["vocab_size"] == 256 else ""
            options = {"train_data": text, "val_data": val, "val_every": 20, "log_dir": tmp_path_factory.mktemp("run"),
                       "timeout": 200, **flags}
            made[key] = Run(run_program(*words(options), timeout=400), options["log_dir"])
            assert made[key].code == 0, f"{flags}\n{made[key].stdout[-2000:]}\n{made[key].stderr[-4000:]}"
        return made[key]

    return run


def alone(flags):
    """The same batch on one rank."""
    return {**{key: value for key, value in flags.items() if key not in DATA}, "nproc": 1, "micro_batch": 2}


def relative(a, b):
    assert len(a) == len(b) and len(a) > 0
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def agree(run, reference, tolerance=TOLERANCE):
    assert relative(run.losses, reference.losses) <= tolerance
    assert relative(run.norms, reference.norms) <= tolerance
    validations = [[line["val_loss"] for line in one.metrics if "val_loss" in line] for one in (run, reference)]
    if validations[1]:
        assert relative(*validations) <= tolerance
    assert run.summary["memory_bytes"] == run.summary["memory_planned"]
    assert run.summary["communication_per_step"] == run.summary["communication_planned"]


GRIDS = [
    pytest.param(dict(nproc=2, strategy="tp"), id="tp2"),
    pytest.param(dict(nproc=4, strategy="tp", dropout=0.1), id="tp4 dropout"),
    pytest.param(dict(nproc=2, tensor_parallel=2, sequence_parallel=True, dropout=0.1), id="sp2 dropout"),
    pytest.param(dict(nproc=4, tensor_parallel=4, sequence_parallel=True), marks=full, id="sp4"),
    pytest.param(dict(nproc=3, tensor_parallel=3, n_head=6, n_embd=48, sequence_parallel=True), id="sp3"),
    pytest.param(dict(nproc=2, pipeline_parallel=2, micro_batch=16), id="pp2, 1 micro-batch"),
    pytest.param(dict(nproc=2, pipeline_parallel=2, micro_batch=8, recompute="full"), id="pp2, 2, recompute"),
    pytest.param(dict(nproc=3, pipeline_parallel=3, dropout=0.1), id="pp3, 8, dropout"),
    pytest.param(dict(nproc=4, pipeline_parallel=4, micro_batch=4), marks=full, id="pp4, 4"),
    pytest.param(dict(nproc=4, pipeline_parallel=4), id="pp4, 8"),
    pytest.param(dict(nproc=2, pipeline_parallel=2, pipeline_chunks=2), id="pp2 interleaved"),
    pytest.param(dict(nproc=3, pipeline_parallel=3, pipeline_chunks=2, n_layer=7, micro_batch=2, tokens_per_step=288),
                 marks=full, id="pp3 interleaved"),
    pytest.param(dict(nproc=2, strategy="tp", vocab_size=50257, steps=10), marks=full, id="tp2 of 50257"),
    pytest.param(dict(nproc=4, strategy="tp", vocab_size=65), id="tp4 of 65: one rank has only padding"),
]


@pytest.mark.parametrize("flags", GRIDS)
def test_a_grid_trains_as_one_rank_does(train, flags):
    agree(train(**flags, check_replicas=20), train(**alone({**BASE, **flags})))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=full), pytest.param("zero1", marks=full), "zero2",
                                      pytest.param("zero3", marks=full)])
def test_all_axes_at_once(train, strategy):
    flags = dict(nproc=8, tensor_parallel=2, pipeline_parallel=2, strategy=strategy)
    agree(train(**flags, check_replicas=20), train(**alone({**BASE, **flags})))


def test_all_axes_with_everything(train):
    flags = dict(nproc=8, tensor_parallel=2, sequence_parallel=True, pipeline_parallel=2, pipeline_chunks=2,
                 strategy="zero3", recompute="full", dropout=0.1, classifier_chunks=3)
    agree(train(**flags, check_replicas=20), train(**alone({**BASE, **flags})))


def test_strategies_have_the_same_bits_on_any_grid(train):
    """Where each micro-batch's gradients are not reduced apart: one micro-batch."""
    flags = dict(nproc=4, tensor_parallel=2, sequence_parallel=True, micro_batch=8, precision="bf16", steps=5)
    runs = [train(**flags, strategy=strategy) for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert len({tuple(run.losses + run.norms) for run in runs}) == 1
    assert len({run.summary["params_hash"] for run in runs}) == 1


# ---------------------------------------------------------------------------------------------------------------------
# Random grids

def legal_grid(draw):
    while True:
        T, P, D = draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 1, 2, 3, 4]), draw.choice([1, 1, 2, 3])
        if 2 <= T * P * D <= 8:
            break
    V = draw.choice([1, 1, 2]) if P > 1 else 1
    heads = draw.choice([n for n in (4, 6, 12) if n % T == 0])
    micro = draw.choice([1, 2, 3, 4]) * (P if V > 1 else 1)
    strategy = draw.choice(["ddp", "zero1", "zero2", "zero3"])
    flags = dict(nproc=T * P * D, tensor_parallel=T, pipeline_parallel=P, pipeline_chunks=V, strategy=strategy,
                 n_head=heads, n_embd=heads * draw.choice([4, 8]), n_layer=P * V + draw.randint(0, 2), micro_batch=1,
                 tokens_per_step=24 * D * micro, recompute=draw.choice(["none", "full"]),
                 dropout=draw.choice([0, 0.1]), classifier_chunks=draw.choice([1, 2, 5]), steps=12)
    if T > 1:
        flags["sequence_parallel"] = draw.choice([True, False])
    if strategy == "zero3":
        flags["shard_group"] = draw.choice([g for g in range(1, D + 1) if D % g == 0])
        flags["prefetch"] = draw.choice([0, 1, 2])
        flags["reshard_after_forward"] = draw.choice([True, False])
    return flags


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=full if seed >= 10 else []) for seed in range(100)])
def test_random_grids_train_as_one_rank_does(train, seed):
    flags = legal_grid(random.Random(seed))
    reference = {**alone({**BASE, **flags}), "micro_batch": 1}
    agree(train(**flags, check_replicas=6), train(**reference))


def illegal_grid(draw):
    """Flags of a grid that cannot be, and the key that the message must name."""
    flags = dict(BASE, nproc=draw.choice([2, 4, 6, 8]))
    kind = draw.randrange(9)
    if kind == 0:
        flags.update(n_head=6, n_embd=48, tensor_parallel=4, nproc=4)
        return flags, "tensor_parallel"
    if kind == 1:
        flags.update(strategy="tp", tensor_parallel=draw.choice([n for n in (1, 3, 5) if n != flags["nproc"]]))
        return flags, "tensor_parallel"
    if kind == 2:
        flags.update(strategy="tp", n_head=5, n_embd=40)
        return flags, "strategy"
    if kind == 3:
        flags.update(pipeline_parallel=flags["nproc"], n_layer=flags["nproc"] - 1)
        return flags, "pipeline_parallel"
    if kind == 4:
        flags.update(pipeline_parallel=draw.choice([3, 5, 7]), n_layer=9, nproc=draw.choice([2, 4, 8]))
        return flags, "pipeline_parallel"
    if kind == 5:
        flags.update(pipeline_chunks=draw.randint(2, 5))
        return flags, "pipeline_chunks"
    if kind == 6:
        flags.update(pipeline_parallel=2, nproc=2, pipeline_chunks=draw.choice([3, 4, 9]))
        return flags, "pipeline_chunks"
    if kind == 7:
        flags.update(pipeline_parallel=2, nproc=2, pipeline_chunks=2, tokens_per_step=48 * draw.choice([1, 3, 5]))
        return flags, "pipeline_chunks"
    if draw.choice([True, False]):
        flags.update(sequence_parallel=True, tokens_per_step=0)
        return flags, "sequence_parallel"
    flags.update(sequence_parallel=True, nproc=2, tensor_parallel=2, sequence_length=draw.choice([5, 23]),
                 tokens_per_step=0)
    return flags, "sequence_parallel"


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=full if seed >= 20 else []) for seed in range(100)])
def test_illegal_grids_are_refused(texts, tmp_path, seed):
    flags, key = illegal_grid(random.Random(seed))
    process = run_program("--train-data", texts / "train.txt", "--log-dir", tmp_path / "log", *words(flags))
    lines = process.stderr.splitlines()
    assert process.returncode == 2 and len(lines) == 1, (flags, process.stderr)
    assert key in lines[0].split(":")[1] + lines[0].split(":")[2], lines[0]
    assert not (tmp_path / "log").exists()


def test_heads_that_cannot_be_shared_name_what_can(texts):
    process = run_program("--train-data", texts / "train.txt", "--n-head", 12, "--n-embd", 48, "--nproc", 8,
                          "--tensor-parallel", 8)
    assert process.returncode == 2 and "what divides: 1, 2, 3, 4, 6, 12" in process.stderr


# ---------------------------------------------------------------------------------------------------------------------
# What is sent

L, B, T, C, LENGTH = 4, 2, 24, 32, 24


def counts(run):
    return {kind: (count["calls"], count["payload_bytes"])
            for kind, count in run.summary["communication_per_step"].items() if kind not in ("all_ranks", "scalars")}


@pytest.mark.parametrize("precision,size", [("fp32", 4), ("bf16", 2)])
def test_tensor_parallel_exchanges(train, precision, size):
    """A layer and micro-batch: two all-reduces of B T C forward and two backward. Beside them, a micro-batch: one for the
    embedding, one for the head's input gradient, and a gather of three numbers a token and rank for the loss."""
    run, micro = train(nproc=2, strategy="tp", precision=precision, steps=2), 8
    rows = B * LENGTH
    assert counts(run) == {"all_reduce": (micro * (4 * L + 2), micro * (4 * L + 2) * rows * C * size),
                           "reduce_scatter": (0, 0), "all_gather": (micro, micro * rows * 3 * 4 * 2),
                           "send": (0, 0), "recv": (0, 0)}


def test_sequence_parallel_exchanges(train):
    """The same bytes as reduce-scatter and all-gather: backward, a pair's input is gathered once more, for the gradient
    of its weights. Once a step the gradients of what ranks hold in common are added: of a block 6 C, of the last layer
    norm 2 C, each on 64 elements."""
    run, micro, size = train(nproc=2, tensor_parallel=2, sequence_parallel=True, precision="bf16", steps=2), 8, 2
    one, stats = B * LENGTH * C * size, B * LENGTH * 3 * 4 * 2
    scattered = micro * (2 * L + 1 + 2 * L + 1)  # forward, embedding; backward, head
    gathered = micro * (2 * L + 1 + 4 * L + 1)   # forward, head; backward, embedding
    replicated = L * 6 * 64 + 2 * 64
    assert counts(run) == {"all_reduce": (L + 1, replicated * size), "reduce_scatter": (scattered, scattered * one),
                           "all_gather": (gathered + micro, gathered * one + micro * stats),
                           "send": (0, 0), "recv": (0, 0)}


@pytest.mark.parametrize("flags,P,V,S", [(dict(nproc=2, pipeline_parallel=2), 2, 1, 1),
                                         (dict(nproc=2, pipeline_parallel=2, pipeline_chunks=2), 2, 2, 1),
                                         (dict(nproc=4, pipeline_parallel=2, tensor_parallel=2), 2, 1, 1),
                                         (dict(nproc=4, pipeline_parallel=2, tensor_parallel=2, sequence_parallel=True),
                                          2, 1, 2)])
def test_pipeline_exchanges(train, flags, P, V, S):
    """Summed over the ranks of a pipeline, 2 (P V - 1) B T C elements a micro-batch are sent, over S with sequence
    parallelism; the tied embedding is reduced once a step between both ends."""
    run, micro = train(**flags, steps=2), 8
    sent = run.summary["communication_per_step"]["all_ranks"]["send"]
    columns = flags.get("tensor_parallel", 1)
    assert sent["calls"] == columns * 2 * (P * V - 1) * micro
    assert sent["payload_bytes"] == columns * 2 * (P * V - 1) * micro * B * LENGTH * C // S * 4
    assert run.summary["communication_per_step"]["all_ranks"]["recv"] == sent
    if columns == 1:
        assert counts(run)["all_reduce"] == (1, 256 * C * 4)


# ---------------------------------------------------------------------------------------------------------------------
# Memory, the plan, the trace

def plan(tmp_path, **flags):
    path = tmp_path / "plan.json"
    process = run_program("--plan", "--plan-json", path, *words({**BASE, **flags}))
    assert process.returncode == 0, process.stderr
    return json.loads(path.read_text()), process.stdout


@pytest.mark.parametrize("P,V", [(2, 1), (4, 1), (2, 2)])
def test_activations_do_not_grow_with_micro_batches(tmp_path, P, V):
    def activations(micro):
        found, _ = plan(tmp_path, world_size=P, pipeline_parallel=P, pipeline_chunks=V, tokens_per_step=48 * micro)
        return found["ddp"]["memory_bytes"]["activations"]

    full_pipeline = activations(4 * P)
    assert activations(16 * P) == full_pipeline == activations(64 * P)
    assert activations(P) <= full_pipeline


def test_a_plan_says_what_the_pipeline_costs(tmp_path):
    found, text = plan(tmp_path, world_size=4, pipeline_parallel=4, tokens_per_step=48 * 8)
    assert found["pipeline_bubble"] == pytest.approx(3 / 8)
    assert "37.5 %" in text
    found, text = plan(tmp_path, world_size=8, tensor_parallel=2, sequence_parallel=True, precision="bf16",
                       tokens_per_step=0)
    s, b, h, a, t = 24, 2, 32, 4, 2
    assert f"{s * b * h * (34 + 5 * a * s / h) / t / 1e6:.3f} MB with" in text
    assert f"{s * b * h * 34 / t / 1e6:.3f} MB without" in text


def schedule(P, p, M):
    """1F1B: forwards until the pipeline is full, one forward and one backward in turn, the remaining backwards."""
    items, forward, backward = [], 0, 0
    while backward < M:
        if forward < M and forward - backward < P - p:
            items.append(f"F{forward}")
            forward += 1
        else:
            items.append(f"B{backward}")
            backward += 1
    return items


def test_a_trace_shows_the_schedule(train):
    run = train(nproc=4, pipeline_parallel=4, steps=3, trace=2)
    events = json.loads((run.log_dir / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in spans)
    items = {p: sorted((event["ts"], event["name"].split(",")[0], event["dur"]) for event in spans
                       if event["pid"] == p and event["name"][0] in "FB" and event["name"].endswith(f"stage {p}"))
             for p in range(4)}
    for p in range(4):
        assert [name for _, name, _ in items[p]] == schedule(4, p, 8)
        for (start, _, length), (following, _, _) in zip(items[p], items[p][1:]):
            assert start + length <= following + 1  # microseconds: a stream does one thing at a time
    # A forward begins after the stage before has ended its own, a backward after the stage behind.
    ends = {(p, name): start + length for p in range(4) for start, name, length in items[p]}
    begins = {(p, name): start for p in range(4) for start, name, _ in items[p]}
    skew = 5000  # microseconds by which ranks' clocks may differ: they begin behind a barrier
    for micro in range(8):
        for p in range(3):
            assert begins[p + 1, f"F{micro}"] + skew >= ends[p, f"F{micro}"]
            assert begins[p, f"B{micro}"] + skew >= ends[p + 1, f"B{micro}"]
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"compute", "communication", "send forward", "receive backward"} <= threads


def test_the_picture_of_a_trace(train, tmp_path):
    """plot.py draws a rectangle for each pass of a micro-batch through a stage."""
    run = train(nproc=4, pipeline_parallel=4, steps=3, trace=2)
    for extra in ([], ["--streams"]):
        process = subprocess.run([sys.executable, ROOT / "scripts/plot.py", run.log_dir / "trace.json",
                                  tmp_path / "out.svg", *extra], capture_output=True, text=True)
        assert process.returncode == 0, process.stderr
        titles = [element.text for element in ElementTree.parse(tmp_path / "out.svg").iter()
                  if element.tag.endswith("title")]
        assert len([title for title in titles if ", stage" in title]) == 2 * 4 * 8
        assert any(title.startswith("send") for title in titles) == bool(extra)
    (tmp_path / "bad.json").write_text("{}")
    process = subprocess.run([sys.executable, ROOT / "scripts/plot.py", tmp_path / "bad.json", tmp_path / "x.svg"],
                             capture_output=True, text=True)
    assert process.returncode == 2 and "bad.json" in process.stderr


def test_a_trace_needs_a_place_and_a_step(texts):
    for words_, message in [(["--trace", 1], "log_dir"), (["--trace", 9, "--steps", 3, "--log-dir", "x"], "beyond")]:
        process = run_program("--train-data", texts / "train.txt", *words_)
        assert process.returncode == 2 and message in process.stderr and "trace" in process.stderr
