"""Whole runs of the program: what a run writes, and the contracts that hold for every run."""
import json
import math
import os
import signal
import subprocess
import time

import pytest

from conftest import MPI_ENV, PROGRAM, environment, run_program

SMALL = dict(n_layer=2, n_head=2, n_embd=32, context_length=24, micro_batch=4)


def relative(a, b):
    assert len(a) == len(b)
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def timeless(metrics):
    return [{key: value for key, value in line.items() if key not in ("step_ms", "tokens_per_second", "mfu")}
            for line in metrics]


def test_a_run_writes_what_it_should(train):
    run = train(**SMALL, val_every=10, sample_every=10, sample_tokens=30)
    assert [line["step"] for line in run.steps] == list(range(1, 21))
    assert [line["step"] for line in run.metrics if "val_loss" in line] == [0, 10, 20]
    for line in run.steps:
        assert set(line) == {"step", "loss", "grad_norm", "lr", "step_ms", "tokens_per_second", "mfu"}
    summary = run.summary
    assert summary["parameters"] == (256 + 24) * 32 + 2 * (12 * 32 * 32 + 13 * 32) + 2 * 32
    assert summary["steps"] == 20 and summary["tokens"] == 20 * 4 * 24
    assert summary["final_train_loss"] == run.losses[-1]
    assert summary["final_val_loss"] == [line["val_loss"] for line in run.metrics if "val_loss" in line][-1]
    assert len(summary["params_hash"]) == 16
    assert summary["step_ms"]["min"] <= summary["step_ms"]["median"] <= summary["step_ms"]["max"]
    assert run.stdout.count("--- sample") == 2
    assert run.losses[-1] < run.losses[0] and abs(run.losses[0] - math.log(256)) < 0.2


def test_without_a_log_directory_nothing_is_written(tmp_path, texts):
    process = run_program("--train-data", texts / "train.txt", "--steps", 2, "--n-embd", 32, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_resolved_configuration_is_the_same_run(train, tmp_path):
    first = train(**SMALL, precision="bf16", dropout=0.1, nproc=2, tokens_per_step=4 * 24 * 4)
    again = tmp_path / "again"
    process = run_program(first.log_dir / "config.json", "--log-dir", again)
    assert process.returncode == 0, process.stderr
    assert json.loads((again / "summary.json").read_text())["params_hash"] == first.summary["params_hash"]
    lines = (again / "metrics.jsonl").read_text().splitlines()
    assert timeless(json.loads(line) for line in lines) == timeless(first.metrics)


@pytest.mark.parametrize("precision,gradients", [("fp32", "auto"), ("bf16", "auto"), ("bf16", "fp32")])
def test_two_runs_are_the_same_run(train, precision, gradients):
    flags = dict(SMALL, precision=precision, gradient_dtype=gradients, nproc=2, steps=5)
    one, two = train(**flags), train(**flags)
    assert one.summary["params_hash"] == two.summary["params_hash"]
    assert timeless(one.metrics) == timeless(two.metrics)
    assert train(**flags, seed=2).summary["params_hash"] != one.summary["params_hash"]


@pytest.mark.parametrize("precision,gradients", [("fp32", "auto"), ("bf16", "auto")])
def test_overlap_changes_no_bit(train, precision, gradients):
    flags = dict(SMALL, precision=precision, gradient_dtype=gradients, nproc=3, steps=5)
    assert train(**flags, overlap=False).summary["params_hash"] == train(**flags).summary["params_hash"]


def test_ranks_and_micro_batches_agree(train):
    """Contract 2: any split of the global batch gives the same curve. 5e-6 is fp32's summation noise over 20 steps."""
    flags = dict(SMALL, precision="fp32", tokens_per_step=24 * 24)
    del flags["micro_batch"]
    reference = train(**flags, micro_batch=24)
    for nproc, micro_batch in [(1, 6), (2, 12), (2, 3), (3, 8), (3, 2), (4, 6), (4, 1)]:
        run = train(**flags, micro_batch=micro_batch, nproc=nproc)
        assert relative(run.losses, reference.losses) < 5e-6
        assert relative(run.norms, reference.norms) < 5e-5


def test_dropout_does_not_depend_on_the_split(train):
    flags = dict(SMALL, precision="fp32", tokens_per_step=24 * 12, dropout=0.3)
    del flags["micro_batch"]
    reference = train(**flags, micro_batch=12)
    for nproc, micro_batch in [(1, 3), (2, 6), (3, 2)]:
        assert relative(train(**flags, micro_batch=micro_batch, nproc=nproc).losses, reference.losses) < 5e-6
    plain = train(**dict(flags, dropout=0.0), micro_batch=12)
    assert relative(plain.losses, reference.losses) > 1e-3


def test_classifier_chunks_agree(train):
    flags = dict(SMALL, precision="fp32")
    reference = train(**flags)
    for chunks in (2, 5, 96):
        run = train(**flags, classifier_chunks=chunks)
        assert relative(run.losses, reference.losses) < 5e-6
        assert run.summary["memory_bytes"]["activations"] < reference.summary["memory_bytes"]["activations"]


@pytest.mark.parametrize("nproc", [1, 2, 3, 4])
@pytest.mark.parametrize("precision,gradients,bytes_each", [("bf16", "auto", 16), ("fp32", "auto", 16), ("bf16", "fp32", 18)])
def test_memory_and_communication_are_exact(train, nproc, precision, gradients, bytes_each):
    run = train(**SMALL, precision=precision, gradient_dtype=gradients, nproc=nproc, steps=2,
                tokens_per_step=2 * nproc * 4 * 24)
    summary = run.summary
    padded, memory = summary["padded_parameters"], summary["memory_bytes"]
    assert padded % (64 * nproc) == 0 and padded >= summary["parameters"]
    assert memory["parameters"] + memory["gradients"] + memory["optimizer"] == bytes_each * padded
    assert memory == summary["memory_planned"]
    assert memory["peak"] == sum(memory[key] for key in memory if key != "peak")
    gradient_bytes = padded * (2 if precision == "bf16" and gradients == "auto" else 4)
    counted = summary["communication_per_step"]
    assert counted == summary["communication_planned"]
    # Gradients are reduced once a step, on the last of the two micro-batches: 2(N-1)/N of their bytes.
    assert counted["all_reduce"]["bus_bytes"] * nproc == 2 * (nproc - 1) * gradient_bytes
    assert counted["all_reduce"]["payload_bytes"] == (gradient_bytes if nproc > 1 else 0)
    assert counted["reduce_scatter"]["calls"] == counted["all_gather"]["calls"] == 0
    assert counted["all_ranks"]["all_reduce"]["bus_bytes"] == nproc * counted["all_reduce"]["bus_bytes"]


def test_validation_covers_the_whole_split_once(train):
    """The mean loss does not depend on how windows fall into batches, and the ragged end is counted."""
    flags = dict(SMALL, precision="fp32", steps=1, val_every=1)
    del flags["micro_batch"]
    values = [train(**flags, micro_batch=micro_batch, nproc=nproc, tokens_per_step=24 * 24).summary["final_val_loss"]
              for nproc, micro_batch in [(1, 24), (1, 8), (2, 3), (3, 8)]]
    assert max(values) / min(values) - 1 < 2e-6


def test_a_diverged_run_stops_and_says_why(train):
    run = train(**SMALL, precision="fp32", learning_rate=1000.0, warmup_steps=0, grad_clip=0, weight_decay=100.0,
                min_learning_rate=1000.0, steps=200, max_bad_steps=3, expect=1, nproc=2)
    assert run.stderr.count("diverged") == 1 and "learning_rate" in run.stderr
    bad = [loss is None or norm is None for loss, norm in zip(run.losses, run.norms)]
    assert bad[-3:] == [True] * 3 and not any(all(bad[i:i + 3]) for i in range(len(bad) - 3))
    assert not (run.log_dir / "summary.json").exists()


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_stops_after_the_step(tmp_path, texts, nproc, number):
    log_dir = tmp_path / "log"
    process = subprocess.Popen([str(PROGRAM), "--train-data", str(texts / "train.txt"), "--log-dir", str(log_dir),
                                "--steps", "1000000", "--nproc", str(nproc), "--n-embd", "32"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    metrics, deadline = log_dir / "metrics.jsonl", time.time() + 60
    while time.time() < deadline and not (metrics.exists() and metrics.stat().st_size > 0):
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "stopped by a signal" in out
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert json.loads((log_dir / "summary.json").read_text())["steps"] == steps[-1]


def test_a_locked_log_directory_is_refused(tmp_path, texts):
    log_dir = tmp_path / "log"
    arguments = ["--train-data", str(texts / "train.txt"), "--log-dir", str(log_dir), "--n-embd", "32"]
    first = subprocess.Popen([str(PROGRAM), *arguments, "--steps", "1000000"], stdout=subprocess.DEVNULL,
                             env=environment())
    try:
        deadline = time.time() + 60
        while time.time() < deadline and not (log_dir / "metrics.jsonl").exists():
            time.sleep(0.05)
        before = (log_dir / "config.json").read_bytes()
        second = run_program(*arguments, "--steps", "3")
        assert second.returncode == 2 and "another run" in second.stderr
        assert (log_dir / "config.json").read_bytes() == before
    finally:
        first.kill()
        first.wait()


def test_killing_one_rank_ends_the_job(tmp_path, texts):
    log_dir = tmp_path / "log"
    process = subprocess.Popen([str(PROGRAM), "--train-data", str(texts / "train.txt"), "--log-dir", str(log_dir),
                                "--steps", "1000000", "--nproc", "3", "--n-embd", "32"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    deadline = time.time() + 60
    while time.time() < deadline and not (log_dir / "metrics.jsonl").exists():
        time.sleep(0.05)
    ranks = ranks_of(process.pid)
    assert len(ranks) == 3
    os.kill(ranks[1], signal.SIGKILL)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1, err
    assert "signal 9" in err, err
    deadline = time.time() + 10  # the others end with mpirun, or by their link to it
    while time.time() < deadline and ranks_alive(ranks):
        time.sleep(0.1)
    assert ranks_alive(ranks) == []


def ranks_of(launcher):
    """The processes below a launcher that run the program."""
    parents = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    text = file.read()
            except OSError:
                continue
            name, rest = text[text.index("(") + 1:text.rindex(")")], text[text.rindex(")") + 2:].split()
            parents[int(entry)] = (int(rest[1]), name)

    def below(pid):
        while pid in parents:
            pid = parents[pid][0]
            if pid == launcher:
                return True
        return False

    return sorted(pid for pid, (_, name) in parents.items() if name == "train_gpt" and below(pid))


def ranks_alive(pids):
    alive = []
    for pid in pids:
        try:
            os.kill(pid, 0)
            alive.append(pid)
        except ProcessLookupError:
            pass
    return alive


def test_a_stop_does_not_wait_for_validation(tmp_path):
    """A validation of a million tokens takes many seconds here: the stop comes first."""
    (tmp_path / "text.txt").write_bytes(b"all work and no play " * 50000)
    log_dir = tmp_path / "log"
    process = subprocess.Popen([str(PROGRAM), "--train-data", str(tmp_path / "text.txt"), "--val-data",
                                str(tmp_path / "text.txt"), "--log-dir", str(log_dir), "--steps", "5", "--val-every", "1",
                                "--micro-batch", "1", "--precision", "fp32"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    deadline = time.time() + 60
    while time.time() < deadline and not (log_dir / "metrics.jsonl").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    asked = time.time()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert time.time() - asked < 5
    assert "validation loss" not in out


def test_closed_standard_streams(tmp_path, texts):
    """The numbers of closed streams must not be taken by files, which would then receive what is printed."""
    log_dir = tmp_path / "log"
    command = f'"{PROGRAM}" --train-data "{texts}/train.txt" --steps 2 --n-embd 32 --log-dir "{log_dir}" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", command], env=environment(), timeout=60).returncode == 0
    for line in (log_dir / "metrics.jsonl").read_text().splitlines():
        json.loads(line)


def test_nobody_reads_the_progress(tmp_path, texts):
    log_dir = tmp_path / "log"
    command = (f'"{PROGRAM}" --train-data "{texts}/train.txt" --steps 30 --log-every 1 --n-embd 32 --log-dir "{log_dir}" | '
               "head -n 1")
    subprocess.run(["sh", "-c", command], env=environment(), timeout=60, stdout=subprocess.DEVNULL, check=True)
    assert json.loads((log_dir / "summary.json").read_text())["steps"] == 30


def test_a_file_that_one_rank_sees_differently(tmp_path):
    """Ranks in folders of their own, one with a short text: the message names the file, and comes once."""
    for rank, length in enumerate([100000, 100]):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "text.txt").write_bytes(b"a" * length)
    command = ["mpirun", "--oversubscribe", "-q"]
    for rank in range(2):
        command += ([":"] if rank else []) + ["-n", "1", "--wdir", str(tmp_path / str(rank)), str(PROGRAM), "--train-data",
                                              "text.txt", "--steps", "3", "--n-embd", "32"]
    process = subprocess.run(command, env=environment(MPI_ENV), capture_output=True, text=True, timeout=60)
    assert process.returncode == 2, process.stderr
    assert process.stderr.count("train_gpt: error: text.txt") == 1


def test_hello(tmp_path):
    process = run_program(cwd=tmp_path)
    assert process.returncode == 0 and "quickstart.sh" in process.stdout and process.stderr == ""
    process = run_program("--help")
    assert process.returncode == 0 and "--learning-rate" in process.stdout


def test_a_stalled_rank_ends_the_job_in_time(tmp_path, texts):
    log_dir = tmp_path / "log"
    process = subprocess.Popen([str(PROGRAM), "--train-data", str(texts / "train.txt"), "--log-dir", str(log_dir),
                                "--steps", "1000000", "--nproc", "2", "--n-embd", "32", "--timeout", "2"],
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment())
    deadline = time.time() + 60
    while time.time() < deadline and not (log_dir / "metrics.jsonl").exists():
        time.sleep(0.05)
    ranks = ranks_of(process.pid)
    os.kill(ranks[1], signal.SIGSTOP)
    stalled = time.time()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1, err
    assert time.time() - stalled < 2 + 5
    assert "rank 0 of 2" in err and "waited" in err, err
    deadline = time.time() + 5
    while time.time() < deadline and ranks_alive(ranks):
        time.sleep(0.1)
    assert ranks_alive(ranks) == []
