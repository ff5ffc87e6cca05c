"""Events: with streams that pause at random nothing changes; without one of the waits it would.

Two builds for tests: `make delayed`, the program whose communication streams pause before each piece of work; and a
faulty one, the same with faults that the environment variable TEST_FAULT switches on: a wait of the compute stream that
is left out, or a rank that does something else than the others.

On the CPU the compute stream runs at the call, so a collective cannot run before the compute that it waits for: waits
of the communication stream for compute cannot be missed here, and are not tested here.
"""
import itertools
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, Run, environment
from test_zero import BRIEF, STRATEGIES, curve, words

full = pytest.mark.full
BUILD = ROOT / "build" / "cpu"
FAULT = '''
#include <stdlib.h>
static inline bool fault(const char *name) {
    const char *chosen = getenv("TEST_FAULT");
    return chosen != NULL && strcmp(chosen, name) == 0;
}
'''
# Rank 1 alone, in step 3: does not update its slice; or, after the step, holds another bit, has counted an update more,
# or believes that it has called another collective.
SKIPPED = '    if (fault("skipped") && zero->updates == 3 && zero->comm->rank == 1) return;\n'
CORRUPTED = '''    if (zero->updates == 3 && zero->comm->rank == 1) {
        const Unit *block = &zero->layout->units[zero->layout->chunks[0].first_unit + 1];
        cuda_check(cudaStreamSynchronize(zero->comm->stream));
        if (fault("parameter")) *(char *)(zero->params + zero_held(zero, block, zero->strategy->shard_params).at) ^= 1;
        if (fault("update")) zero->updates++;
        if (fault("collective")) zero->comm->sequence++;
    }
'''
INSERTIONS = [('#include "random.h"\n', FAULT),
              ("static inline void zero_update_unit(Zero *zero, const Unit *unit, AdamW *hyper) {\n", SKIPPED),
              ("    zero_update(zero, hyper);\n", CORRUPTED)]


@pytest.fixture(scope="module")
def delayed():
    subprocess.run(["make", "-C", ROOT, "-j2", "DEVICE=cpu", "delayed"], check=True, stdout=subprocess.DEVNULL)
    return BUILD / "delayed" / "train_gpt"


@pytest.fixture(scope="module")
def waits():
    """What the compute stream waits for in zero.h, in order."""
    return re.findall(r"zero_wait\(zero, zero->compute, (.*?)\);", (ROOT / "zero.h").read_text())


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    """The program with faults, in fp32, and its folder: the objects of the other precisions are those of the build."""
    subprocess.run(["make", "-C", ROOT, "-j2", "DEVICE=cpu", "train_gpt"], check=True, stdout=subprocess.DEVNULL)
    source = tmp_path_factory.mktemp("faulty")
    for path in [*ROOT.glob("*.h"), ROOT / "train_gpt.cu", ROOT / "Makefile"]:
        shutil.copy2(path, source)
    (source / "cpu").symlink_to(ROOT / "cpu")
    text = (source / "zero.h").read_text()
    number = iter(range(100))
    text = re.sub(r"zero_wait\(zero, zero->compute, .*?\);",
                  lambda match: f'if (!fault("wait {next(number)}")) {match.group()}', text)
    for mark, added in INSERTIONS:
        assert text.count(mark) == 1
        text = text.replace(mark, mark + added)
    (source / "zero.h").write_text(text)
    build = source / "build"
    build.mkdir()
    for name in ("main.o", "train_bf16.o", "train_bf16_gradfp32.o"):
        shutil.copy2(BUILD / name, build)
        os.utime(build / name)
    subprocess.run(["make", "-C", source, "DEVICE=cpu", "BUILD=build", "OPTIMIZE=-O1", "WARNINGS=",
                    "DEFINE_fp32=-DPRECISION_FP32 -DTRAIN_GPT_STREAM_DELAY", "build/train_gpt"],
                   check=True, stdout=subprocess.DEVNULL)
    return build / "train_gpt"


@pytest.fixture
def launch(tmp_path, texts):
    """launch(program, seed of the delays or None, fault or None, flag=value, ...)"""
    count = [0]

    def run(program, seed, fault=None, **flags):
        count[0] += 1
        options = {"train_data": texts / "train.txt", "val_data": texts / "val.txt", "val_every": 0, "timeout": 60,
                   "log_dir": tmp_path / f"log{count[0]}", **flags}
        extra = {} if seed is None else {"TRAIN_GPT_STREAM_DELAY": str(seed)}
        if fault is not None:
            extra["TEST_FAULT"] = fault
        process = subprocess.run([program, *map(str, words(options))], env=environment(extra), timeout=120,
                                 stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        return Run(process, options["log_dir"])

    return run


def done(run):
    assert run.code == 0, run.stderr[-4000:]
    return curve(run)


# Strategies and knobs under which every wait matters.
SETTINGS = [("ddp", {}), ("zero1", {}), ("zero2", {}), ("zero3", {}), ("zero3", {"prefetch": 3}),
            ("zero3", {"prefetch": 0}), ("zero3", {"reshard_after_forward": False}), ("zero3", {"shard_group": 1}),
            ("zero2", {"tokens_per_step": 3 * 2 * 2 * 24}), ("zero3", {"tokens_per_step": 3 * 2 * 2 * 24}),
            ("zero1", {"recompute": "full", "dropout": 0.1}), ("zero3", {"recompute": "full", "dropout": 0.1})]


@pytest.mark.parametrize("strategy,options", SETTINGS)
def test_delays_change_no_bit(delayed, launch, strategy, options):
    flags = dict(BRIEF, precision="fp32", strategy=strategy, nproc=2, **options)
    assert done(launch(delayed, 1, **flags)) == done(launch(delayed, None, **flags))


def test_delays_delay(delayed, launch):
    flags = dict(BRIEF, precision="fp32", strategy="zero3", nproc=2, steps=30)
    times = [launch(delayed, seed, **flags).summary["step_ms"]["median"] for seed in (None, 1)]
    assert times[1] > times[0] + 2  # some twenty pieces of work a step wait a quarter of a millisecond each


@full
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("nproc", [2, 3])
def test_a_hundred_delayed_runs(delayed, launch, nproc, precision):
    """25 here, with validations and samples in between; 100 over all parameters of this test."""
    references = {}
    for number in range(25):
        strategy, options = SETTINGS[number % len(SETTINGS)]
        if "tokens_per_step" in options:
            options = dict(options, tokens_per_step=3 * nproc * 2 * 24)
        flags = dict(BRIEF, precision=precision, strategy=strategy, nproc=nproc, val_every=2, val_steps=1,
                     sample_every=3, sample_tokens=5, **options)
        if number < len(SETTINGS):
            reference = done(launch(delayed, None, **flags))
            assert len(reference[1]) == 2
            references[number] = reference
        assert done(launch(delayed, 1000 * nproc + number, **flags)) == references[number % len(SETTINGS)], flags


def test_every_wait_is_needed(faulty, waits, launch):
    """Without any one of them the bits change, or the run dies, under some strategy and delay. The one wait that may be
    left out is that of --overlap false, which merely comes earlier than the others."""
    assert len(waits) >= 5
    references = {}
    for number, event in enumerate(waits):
        early = event == "event"
        caught = []
        for seed, strategy in itertools.product((1,) if early else (1, 2, 3), ("zero1", "zero3", "zero2", "ddp")):
            flags = dict(BRIEF, precision="fp32", strategy=strategy, nproc=2, overlap=not early)
            if (strategy, early) not in references:
                references[strategy, early] = done(launch(faulty, seed, **flags))
            run = launch(faulty, seed, f"wait {number}", **flags)
            if run.code != 0 or curve(run) != references[strategy, early]:
                caught.append((strategy, seed))
                break
        print(f"without the wait for {event}: {caught}")
        assert bool(caught) == (not early), f"the wait for {event}, number {number} in zero.h"


# ---------------------------------------------------------------------------------------------------------------------
# Replicas that differ

@pytest.mark.parametrize("strategy,nproc,fault,says", [
    ("ddp", 2, "parameter", "rank 1 differs from rank 0 in the parameters of block 1"),
    ("zero1", 3, "parameter", "rank 1 differs from rank 0 in the parameters of block 1"),
    ("zero2", 2, "parameter", "rank 1 differs from rank 0 in the parameters of block 1"),
    ("ddp", 3, "skipped", "rank 1 differs from rank 0 in the parameters of wte"),
    ("zero2", 2, "update", "rank 1 differs from rank 0 in the number of updates: 4, not 3"),
    ("zero3", 2, "collective", "rank 1 differs from rank 0 in its sequence of collectives")])
def test_a_difference_is_named(faulty, launch, strategy, nproc, fault, says):
    flags = dict(BRIEF, precision="fp32", strategy=strategy, nproc=nproc)
    run = launch(faulty, None, fault, **flags, check_replicas=1)
    assert run.code == 1
    assert len(run.stderr.splitlines()) == 1 and says in run.stderr and "after step 3" in run.stderr, run.stderr
    assert len(run.losses) == 3 and not (run.log_dir / "summary.json").exists()


def test_what_no_check_sees_is_seen_later(faulty, launch):
    flags = dict(BRIEF, precision="fp32", strategy="ddp", nproc=2)
    assert launch(faulty, None, "skipped", **flags).code == 0
    run = launch(faulty, None, "skipped", **flags, check_replicas=5)
    assert run.code == 1 and "after step 5" in run.stderr


def test_a_difference_between_groups_is_named(faulty, launch):
    """Rank 1 and rank 3 hold the same shards."""
    flags = dict(BRIEF, precision="fp32", strategy="zero3", nproc=4, check_replicas=1)
    run = launch(faulty, None, "parameter", **flags, shard_group=2)
    assert run.code == 1 and len(run.stderr.splitlines()) == 1, run.stderr
    assert "after step 3 rank 3 differs from rank 1 in the parameters of block 1" in run.stderr
    # In one group of all ranks nothing is held twice: there is nothing to compare.
    assert launch(faulty, None, "parameter", **flags).code == 0


@full
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_delayed_build_is_the_program(delayed, launch, strategy):
    flags = dict(BRIEF, precision="bf16", strategy=strategy, nproc=3)
    assert done(launch(delayed, 7, **flags)) == done(launch(ROOT / "train_gpt", None, **flags))
