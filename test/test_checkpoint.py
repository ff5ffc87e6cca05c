"""Checkpoints: a run that was stopped, killed or moved to other ranks goes on as if nothing had been.

The undisturbed run is the measure: same grid, same bits; another grid, the same curve.
"""
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import time

import pytest

from conftest import PROGRAM, Run, environment, run_program

full = pytest.mark.full
# Nothing divides; blocks enough for two stages.
SHAPE = dict(n_layer=3, n_head=2, n_embd=40, context_length=40, vocab_size=257, sequence_length=24, micro_batch=2)
# 12 windows a step: 1, 2, 3 or 4 ranks can share it (micro_batch says how).
COMMON = dict(SHAPE, tokens_per_step=12 * 24, precision="fp32", schedule="constant", learning_rate=3e-4,
              min_learning_rate=3e-4, warmup_steps=10, steps=12, val_every=4, val_steps=2)
GRIDS = {
    "ddp1": dict(strategy="ddp", nproc=1),
    "ddp2": dict(strategy="ddp", nproc=2),
    "zero1x2": dict(strategy="zero1", nproc=2),
    "zero2x4": dict(strategy="zero2", nproc=4, micro_batch=3),
    "zero3x2": dict(strategy="zero3", nproc=2),
    "zero3x3": dict(strategy="zero3", nproc=3),
    "hybrid": dict(strategy="zero3", nproc=4, shard_group=2, micro_batch=1),
    "tp2": dict(strategy="tp", nproc=2, micro_batch=4),
    "pp2": dict(strategy="ddp", nproc=2, pipeline_parallel=2),
    "tp2dp2": dict(strategy="zero1", nproc=4, tensor_parallel=2, micro_batch=1),
    "pp2dp2": dict(strategy="zero3", nproc=4, pipeline_parallel=2, micro_batch=3),
}


def words(flags):
    for key, value in flags.items():
        yield "--" + key.replace("_", "-")
        yield str(value).lower() if isinstance(value, bool) else str(value)


@pytest.fixture(scope="module")
def train(texts):
    """train(log_dir, flag=value, ...): a run; expects the exit code `expect`."""

    def run(log_dir, expect=0, preexec=None, **flags):
        options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "timeout": 60, **COMMON, **flags}
        if log_dir is not None:
            options["log_dir"] = log_dir
        process = subprocess.run([str(PROGRAM), *words(options)], env=environment(), timeout=300, preexec_fn=preexec,
                                 stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        result = Run(process, log_dir)
        assert result.code == expect, f"exit code {result.code}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
        return result

    return run


@pytest.fixture(scope="module")
def undisturbed(train, tmp_path_factory):
    """undisturbed(flag=value, ...): the run without checkpoints; each is made once."""
    made = {}

    def run(**flags):
        key = tuple(sorted(flags.items()))
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("undisturbed"), **flags)
        return made[key]

    return run


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory):
    """saved(flag=value, ...): the run with checkpoints after steps 5, 10 and 12; each is made once."""
    made = {}

    def run(**flags):
        key = tuple(sorted(flags.items()))
        if key not in made:
            made[key] = train(tmp_path_factory.mktemp("saved"), checkpoint_every=5, checkpoint_keep=3, **flags)
        return made[key]

    return run


def copy_of(run, folder, drop=()):
    """A copy of a run's log directory, without the checkpoints after some steps."""
    log_dir = folder / "log"
    shutil.copytree(run.log_dir, log_dir)
    for step in drop:
        shutil.rmtree(log_dir / f"step_{step:08d}")
    return log_dir


def checkpoints(log_dir):
    return sorted(path.name for path in pathlib.Path(log_dir).iterdir() if path.name.startswith("step_"))


def name(step):
    return f"step_{step:08d}"


def curve(run):
    """What a resumed run must have to the bit: every line of the log in its order, timings aside; the parameters."""
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [{key: line[key] for key in keys if key in line} for line in run.metrics], run.summary["params_hash"]


def far(run, other, first):
    """The greatest relative difference of losses from step `first` on."""
    a, b = ({line["step"]: line["loss"] for line in r.steps} for r in (run, other))
    steps = range(first, COMMON["steps"] + 1)
    return max(abs(a[step] - b[step]) / abs(b[step]) for step in steps)


# ---------------------------------------------------------------------------------------------------------------------
# The same grid: the same bits

CASES = [pytest.param("zero1x2", {}), pytest.param("zero3x2", dict(precision="bf16")), pytest.param("tp2", {}),
         pytest.param("pp2", dict(checkpoint_async=False)),
         pytest.param("ddp1", dict(precision="bf16", master_weights=False, dropout=0.1))]
CASES += [pytest.param(grid, {}, marks=full) for grid in GRIDS if grid not in ("zero1x2", "tp2")]


@pytest.mark.parametrize("grid,flags", CASES)
def test_same_grid_same_bits(train, undisturbed, saved, tmp_path, grid, flags):
    flags = {**GRIDS[grid], **flags}
    other = {key: value for key, value in flags.items() if key != "checkpoint_async"}
    expected = undisturbed(**other)
    run = saved(**flags)
    assert curve(run) == curve(expected)
    assert run.summary["checkpoints"]["begun"] == run.summary["checkpoints"]["saved"] == 3
    assert checkpoints(run.log_dir) == [name(5), name(10), name(12)]
    assert (run.log_dir / "latest").read_text() == name(12) + "\n"
    log_dir = copy_of(run, tmp_path, drop=(10, 12))
    resumed = train(log_dir, checkpoint_every=5, checkpoint_keep=3, resume="auto", **flags)
    assert "after step 5; nothing is changed" in resumed.stdout
    assert curve(resumed) == curve(expected)
    assert checkpoints(log_dir) == [name(5), name(10), name(12)]
    assert resumed.summary["steps"] == 12 and resumed.summary["tokens"] == 12 * COMMON["tokens_per_step"]


def test_bad_steps_go_on(train, tmp_path):
    """The run diverges; how many steps in a row were skipped is not forgotten."""
    wild = dict(GRIDS["ddp1"], learning_rate=1000, min_learning_rate=0, warmup_steps=0, weight_decay=1000, steps=100,
                max_bad_steps=5, val_every=0, checkpoint_every=1, checkpoint_keep=100)
    ended = train(tmp_path / "a", expect=1, **wild)
    assert "5 steps in a row, up to step" in ended.stderr
    last = len(ended.metrics)
    resumed = train(tmp_path / "b", expect=1, resume=tmp_path / "a" / name(last - 3), **wild)
    assert resumed.stderr == ended.stderr and [line["step"] for line in resumed.metrics] == [last - 2, last - 1, last]


def test_finished_run_stays_finished(train, saved, tmp_path):
    run = saved(**GRIDS["zero1x2"])
    log_dir = copy_of(run, tmp_path)
    again = train(log_dir, checkpoint_every=5, checkpoint_keep=3, resume="auto", **GRIDS["zero1x2"])
    assert curve(again) == curve(run)
    assert again.summary["final_train_loss"] == run.summary["final_train_loss"]


def test_chosen_checkpoint(train, saved, undisturbed, tmp_path):
    """Going on from an older one of the same directory: what came after it goes, so that auto cannot take it."""
    log_dir = copy_of(saved(**GRIDS["zero1x2"]), tmp_path)
    resumed = train(log_dir, resume=log_dir / name(5), **GRIDS["zero1x2"])
    assert curve(resumed) == curve(undisturbed(**GRIDS["zero1x2"]))
    assert checkpoints(log_dir) == [name(5)]


# ---------------------------------------------------------------------------------------------------------------------
# Another grid: the same curve

def pairs():
    quick = ["ddp1", "zero3x3", "tp2", "pp2"]
    for source in GRIDS:
        for target in GRIDS:
            if source != target:
                yield pytest.param(source, target, marks=[] if {source, target} <= set(quick) else full)


@pytest.mark.parametrize("source,target", pairs())
def test_other_grid(train, undisturbed, saved, tmp_path, source, target):
    run = saved(**GRIDS[source])
    resumed = train(tmp_path / "log", resume=run.log_dir / name(5), **GRIDS[target])
    assert [line["step"] for line in resumed.steps] == list(range(6, 13))
    assert far(resumed, undisturbed(**GRIDS["ddp1"]), 6) < 5e-6
    assert "changed: " in resumed.stdout and "nproc" in resumed.stdout or GRIDS[source]["nproc"] == GRIDS[target]["nproc"]


def test_other_precision(train, saved, undisturbed, tmp_path):
    """bf16 rounds parameters to 8 bits, its optimizer does not: losses agree to 1e-2, as those of whole runs do."""
    expected = undisturbed(**GRIDS["ddp1"])
    narrow = dict(GRIDS["zero1x2"], precision="bf16")
    resumed = train(tmp_path / "a", resume=saved(**GRIDS["ddp1"]).log_dir / name(5), **narrow)
    assert 0 < far(resumed, expected, 6) < 1e-2
    resumed = train(tmp_path / "b", resume=saved(**GRIDS["zero3x2"], precision="bf16").log_dir / name(5),
                    **GRIDS["zero1x2"])
    assert far(resumed, expected, 6) < 1e-2
    assert 'precision "bf16" -> "fp32"' in resumed.stdout


def test_files_can_be_read(saved):
    """The files are plain safetensors: together they hold every element once."""
    run = saved(**GRIDS["zero3x3"])
    elements = 0
    for path in sorted((run.log_dir / name(12)).glob("*.safetensors")):
        raw = path.read_bytes()
        header = json.loads(raw[8:8 + struct.unpack("<Q", raw[:8])[0]])
        assert header.pop("__metadata__")["written by"].startswith("train_gpt, rank ")
        for state in ("params", "m", "v"):
            assert header["block 2." + state]["dtype"] == "F32"
        elements += sum(entry["shape"][0] for key, entry in header.items() if key.endswith(".params"))
    assert elements == run.summary["padded_parameters"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and what is passed over

def test_changes(train, saved, tmp_path, texts):
    run = saved(**GRIDS["ddp1"])
    chosen = run.log_dir / name(5)
    other = tmp_path / "other.txt"
    other.write_bytes((texts / "train.txt").read_bytes()[:-1] + b"!")
    longer = tmp_path / "longer.txt"
    longer.write_bytes((texts / "train.txt").read_bytes() + b"!")
    for flags, message in ((dict(n_layer=4), "n_layer 3, this run has 4"), (dict(n_head=4), "n_head 2"),
                           (dict(vocab_size=300), "vocab_size 257"), (dict(context_length=48), "context_length 40"),
                           (dict(seed=1), "seed 1337"), (dict(tokens_per_step=24 * 24), "tokens_per_step 288"),
                           (dict(sequence_length=12), "sequence_length 24"), (dict(steps=4), "after step 5"),
                           (dict(train_data=other), "train_data had another content"),
                           (dict(train_data=longer), "train_data had ")):
        refused = train(tmp_path / "refused", expect=2, resume=chosen, **flags)
        assert message in refused.stderr and name(5) in refused.stderr, refused.stderr
        assert refused.stderr.count("\n") == 1
        assert not (tmp_path / "refused").exists()
    same = tmp_path / "moved.txt"
    shutil.copy(texts / "train.txt", same)
    changed = train(tmp_path / "changed", resume=chosen, train_data=same, learning_rate=1e-4, min_learning_rate=1e-4,
                    steps=13)
    for part in ("learning_rate 0.0003 -> 0.0001", "steps 12 -> 13"):
        assert part in changed.stdout


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[-5] ^= 0x10
    path.write_bytes(raw)


DAMAGES = {
    "flipped": (lambda folder: flip(folder / "rank_00001.safetensors"), "rank_00001.safetensors"),
    "cut": (lambda folder: os.truncate(folder / "rank_00000.safetensors", 5000), "rank_00000.safetensors"),
    "missing file": (lambda folder: (folder / "rank_00001.safetensors").unlink(), "rank_00001.safetensors"),
    "missing manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
    "no JSON": (lambda folder: os.truncate(folder / "manifest.json", 300), "manifest.json"),
    "no number": (lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"updates":', '"updates": "x", "was":')), '"updates"'),
    "no grid": (lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"data_parallel":', '"data_parallel": 3, "was":')), "grid of ranks"),
    "another step": (lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"step":', '"step": 11, "was":')), "is of step 11"),
}


def test_damage(train, saved, undisturbed, tmp_path):
    source = saved(**GRIDS["zero1x2"])
    for i, (damage, named) in enumerate(DAMAGES.values()):
        log_dir = copy_of(source, tmp_path / str(i))
        damage(log_dir / name(12))
        refused = train(tmp_path / "refused", expect=2, resume=log_dir / name(12),
                        **GRIDS["ddp2" if i == 0 else "ddp1"])
        assert name(12) in refused.stderr and named in refused.stderr, refused.stderr
        assert not (tmp_path / "refused").exists()
        if i > 1 and i != 3:
            continue
        resumed = train(log_dir, checkpoint_every=5, checkpoint_keep=3, resume="auto", **GRIDS["zero1x2"])
        assert name(12) in resumed.stderr and named in resumed.stderr, resumed.stderr
        assert "after step 10" in resumed.stdout
        assert curve(resumed) == curve(undisturbed(**GRIDS["zero1x2"]))
        assert checkpoints(log_dir) == [name(5), name(10), name(12)]
        train(tmp_path / f"again{i}", resume=log_dir / name(12), **GRIDS["ddp1"])


def test_place_in_the_log(train, saved, undisturbed, tmp_path):
    """A manifest that would cut the run's own log within a line is damaged; so is one that would empty it."""
    for log_bytes in (lambda n: n - 1, lambda n: 0):
        log_dir = copy_of(saved(**GRIDS["ddp1"]), tmp_path / str(log_bytes(1000)))
        path = log_dir / name(12) / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["log_bytes"] = log_bytes(manifest["log_bytes"])
        path.write_text(json.dumps(manifest))
        before = (log_dir / "metrics.jsonl").read_bytes()
        refused = train(log_dir, expect=2, resume=log_dir / name(12))
        assert name(12) in refused.stderr and "log_bytes" in refused.stderr, refused.stderr
        assert (log_dir / "metrics.jsonl").read_bytes() == before
        train(tmp_path / "other", resume=log_dir / name(12))  # into another log: its place there is not used
        resumed = train(log_dir, checkpoint_every=5, checkpoint_keep=3, resume="auto")
        assert name(12) in resumed.stderr and "log_bytes" in resumed.stderr and "after step 10" in resumed.stdout
        assert curve(resumed) == curve(undisturbed(**GRIDS["ddp1"]))


def test_log_directories(train, saved, undisturbed, tmp_path):
    log_dir = copy_of(saved(**GRIDS["ddp1"]), tmp_path)
    before = (log_dir / "metrics.jsonl").read_bytes()
    refused = train(log_dir, expect=2)
    assert "3 checkpoints of another run" in refused.stderr and (log_dir / "metrics.jsonl").read_bytes() == before
    for step in (5, 10, 12):
        flip(log_dir / name(step) / "rank_00000.safetensors")
    refused = train(log_dir, expect=2, resume="auto")
    assert "none of the 3 checkpoints" in refused.stderr and (log_dir / "metrics.jsonl").read_bytes() == before
    # Without any checkpoint auto begins anew, replaces the log, and removes what was half done.
    for step in (5, 10):
        shutil.rmtree(log_dir / name(step))
    (log_dir / name(12)).rename(log_dir / (name(12) + ".new"))
    (log_dir / (name(5) + ".old")).mkdir()
    anew = train(log_dir, resume="auto")
    assert curve(anew) == curve(undisturbed(**GRIDS["ddp1"])) and checkpoints(log_dir) == []
    for flags, part in ((dict(resume=tmp_path / "nothing"), "nothing/manifest.json"), (dict(resume="newest"), "newest")):
        assert part in train(tmp_path / "none", expect=2, **flags).stderr


# ---------------------------------------------------------------------------------------------------------------------
# What is kept

def test_kept(train, saved, tmp_path):
    train(tmp_path / "a", checkpoint_every=2, checkpoint_keep=1, checkpoint_major_every=4, steps=11)
    assert checkpoints(tmp_path / "a") == [name(4), name(8), name(11)]
    train(tmp_path / "b", checkpoint_every=1, steps=7, checkpoint_async=False)
    assert checkpoints(tmp_path / "b") == [name(6), name(7)]
    # A damaged one is not what is kept, however new.
    log_dir = copy_of(saved(**GRIDS["ddp1"]), tmp_path)
    flip(log_dir / name(12) / "rank_00000.safetensors")
    train(log_dir, resume="auto", checkpoint_every=1, checkpoint_keep=1, checkpoint_major_every=12, steps=11)
    assert checkpoints(log_dir) == [name(11)]


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))


def test_failure_does_not_end_the_run(train, undisturbed, tmp_path):
    expected = undisturbed(**GRIDS["ddp1"])
    for asynchronous in (True, False):
        log_dir = tmp_path / str(asynchronous)
        train(log_dir, checkpoint_every=4, steps=4, checkpoint_async=asynchronous)
        # A short write: no file may grow beyond 30 kB.
        run = train(log_dir, checkpoint_every=4, checkpoint_async=asynchronous, resume="auto", preexec=limit_files)
        assert curve(run) == curve(expected)
        for step in (8, 12):
            assert run.stderr.count(f"the checkpoint after step {step} was not saved: ") == 1
        assert run.summary["checkpoints"]["begun"] == 2 and run.summary["checkpoints"]["saved"] == 0
        assert "rank_00000.safetensors: writing at byte" in run.stderr and checkpoints(log_dir) == [name(4)]
        assert (log_dir / "latest").read_text() == name(4) + "\n"
    (log_dir / (name(8) + ".new")).write_text("in the way")  # a directory cannot be made
    run = train(log_dir, checkpoint_every=4, checkpoint_keep=1, resume="auto")
    assert "the checkpoint after step 8 was not saved: " in run.stderr and "step_00000008.new: cannot be made" in run.stderr
    assert checkpoints(log_dir)[-1] == name(12) and curve(run) == curve(expected)


# ---------------------------------------------------------------------------------------------------------------------
# Stopped and killed

def start(texts, log_dir, **flags):
    options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "log_dir": log_dir, "timeout": 60,
               **COMMON, **flags}
    return subprocess.Popen([str(PROGRAM), *words(options)], env=environment(), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def lines(log_dir):
    path = log_dir / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def descendants(pid):
    """All processes below one, itself last."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rsplit(")", 1)[1].split()[1])
    found = [pid]
    for at in found:
        found += [child for child, parent in parents.items() if parent == at]
    return found[::-1]


def gone(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=full),
                                    pytest.param(signal.SIGUSR1, marks=full)])
def test_signal_saves(train, undisturbed, texts, tmp_path, number):
    flags = dict(GRIDS["zero3x2"], checkpoint_every=1000000, val_every=100)
    process = start(texts, tmp_path / "log", **{**flags, "steps": 1000000})  # more than it can take before the signal
    wait_for(lambda: lines(tmp_path / "log") > 20)
    process.send_signal(number)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75, output[-2000:]
    (step,) = checkpoints(tmp_path / "log")
    flags["steps"] = int(step[5:]) + 10
    resumed = train(tmp_path / "log", resume="auto", **flags)
    assert f"after step {int(step[5:])}; changed: steps 1000000 -> {flags['steps']}" in resumed.stdout
    del flags["checkpoint_every"]
    assert curve(resumed) == curve(undisturbed(**flags))


def kill_and_resume(train, expected, texts, log_dir, kills, seed, **flags):
    """Kills all processes of a run, or one rank, at random moments, and starts it again until it is done. Returns how
    often a checkpoint was half written or half removed then."""
    draw = random.Random(seed)
    undone, torn = kills, 0
    while undone > 0:
        if (log_dir / "summary.json").exists():
            shutil.rmtree(log_dir)  # it was done: once more
        before, target = lines(log_dir), draw.randint(0, flags["steps"] // 3)
        process = start(texts, log_dir, resume="auto", **flags)
        # Counted in lines, so that the moment does not depend on how busy the machine is; then a little later.
        wait_for(lambda: process.poll() is not None or not before <= lines(log_dir) <= before + target)
        time.sleep(draw.uniform(0, 0.05))
        family = descendants(process.pid)
        victims = family if draw.random() < 0.6 else [draw.choice(family)]
        for pid in victims:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        output = process.communicate(timeout=90)[0]
        wait_for(lambda: all(gone(pid) for pid in family))
        assert "cannot be used" not in output, output[-3000:]
        torn += any(not path.endswith(tuple("0123456789")) for path in checkpoints(log_dir)) if log_dir.exists() else 0
        if process.returncode != 0:
            undone -= 1
    resumed = train(log_dir, resume="auto", **flags)
    assert "cannot be used" not in resumed.stderr
    assert curve(resumed) == curve(expected)
    assert all(path[-8:].isdigit() for path in checkpoints(log_dir))
    return torn


KILLS = dict(checkpoint_every=2, checkpoint_keep=2, checkpoint_major_every=6, steps=60, val_every=7)


@pytest.mark.parametrize("grid,kills", [("zero3x2", 4), pytest.param("zero1x4", 50, marks=full),
                                        pytest.param("zero3x4", 50, marks=full),
                                        pytest.param("tp2dp2", 50, marks=full)])
def test_kills(train, undisturbed, texts, tmp_path, grid, kills):
    flags = GRIDS.get(grid) or dict(strategy=grid[:5], nproc=4, micro_batch=1)
    flags = {**flags, **KILLS, "steps": 60 if kills < 10 else 400}
    plain = {key: value for key, value in flags.items() if not key.startswith("checkpoint")}
    torn = kill_and_resume(train, undisturbed(**plain), texts, tmp_path / "log", kills, grid, **flags)
    assert torn > 0 or kills < 10  # some of fifty moments are within a save
