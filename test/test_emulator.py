"""The emulator (cpu/emulator.h): what it makes of the device language and of streams, and that it catches what it is
for: every bug planted in test/emulator/bugs.cu, by an abort, by results that depend on the order of threads, or by a
sanitizer, while the correct twin of each passes all of them; missing waits, by results that depend on the policy of
streams."""
import concurrent.futures
import os
import re
import shutil
import subprocess

import pytest

from conftest import MPI_ENV, ROOT, environment

SOURCES = {"language": ["language.cu", "language_second.cu"], "bugs": ["bugs.cu"], "streams": ["streams.cu"],
           "collectives": ["collectives.cu"]}
# Of the kernels, and of emulator.cpp, which ThreadSanitizer must not see into.
VARIANTS = {"plain": ([], []),
            "address": (["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"],) * 2,
            "thread": (["-fsanitize=thread"], ["-DEMULATOR_TSAN"])}
FLAGS = ["-std=c++17", "-D_GNU_SOURCE", "-DTRAIN_GPT_EMULATOR", "-O1", "-g", "-march=native", "-fno-strict-aliasing",
         "-fopenmp", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Ikernels", "-Icpu", "-I."]
ORDERS = [{"TRAIN_GPT_THREADS": order}
          for order in ("ascending", "descending", "random:1", "random:2", "random:3", "random:4")]
ORDERS += [{"TRAIN_GPT_CP_ASYNC": "eager"}, {"TRAIN_GPT_EMULATOR_WORKERS": "3"}]
POLICIES = ["eager", "latest", "random:1", "random:2", "random:3", "random:4", "random:5"]

# What each bug is caught by: what the emulator says,
ABORTS = {
    "misaligned_load": "not aligned", "misaligned_store": "not aligned", "misaligned_copy": "not aligned",
    "early_return": "wait at __syncthreads\\(\\), but 28 have ended",
    "barrier_in_a_branch": "met at different __syncthreads", "barrier_against_shuffle": "no thread of the block can go on",
    "shuffle_with_ended_lanes": "lane 18 has ended, but lane 0 waits for it", "shuffle_from_an_absent_lane": "lane 20, which takes no part",
    "mask_without_the_lane": "takes part in an operation of lanes 0000ff00",
    "different_shuffles": "met at different operations"}
# results that differ, or NaN,
DIFFERENCES = ["missing_barrier", "missing_barrier_of_a_sum", "missing_barrier_before_reuse", "missing_syncwarp",
               "missing_copy_wait", "missing_copy_commit", "wrong_group_count", "unset_shared"]
# AddressSanitizer's reports, and ThreadSanitizer's, with blocks ordered or not.
ADDRESSES = ["past_the_end", "read_past_the_end", "vector_over_the_end", "past_dynamic_shared", "past_static_shared"]
RACES = ["missing_barrier", "missing_barrier_of_a_sum", "missing_barrier_before_reuse", "missing_syncwarp",
         "missing_copy_wait", "missing_copy_commit", "wrong_group_count"]
RACES_OF_BLOCKS = ["race_between_blocks", "race_between_two_threads", "race_after_a_barrier"]


def compile_all(jobs):
    def compile_one(job):
        process = subprocess.run(job, cwd=ROOT, capture_output=True, text=True, errors="replace")
        assert process.returncode == 0, " ".join(map(str, job)) + "\n" + process.stderr[-4000:]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, jobs))


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Every program in every variant, as a folder: programs / variant / name."""
    folder = tmp_path_factory.mktemp("emulator")
    mpi = [subprocess.run(["pkg-config", f"--{what}", "ompi-c"], capture_output=True, text=True).stdout.split()
           for what in ("cflags", "libs")]
    objects, links = [], []
    for variant, (kernel_flags, emulator_flags) in VARIANTS.items():
        (folder / variant).mkdir()
        emulator = folder / variant / "emulator.o"
        objects.append(["g++", *FLAGS, *emulator_flags, "-c", "-o", emulator, "cpu/emulator.cpp"])
        for name, sources in SOURCES.items():
            if name == "collectives" and variant != "plain":
                continue  # MPI is not made for sanitizers
            links.append(["g++", *FLAGS, *kernel_flags, *mpi[0], "-o", folder / variant / name, "-x", "c++",
                          *(f"test/emulator/{source}" for source in sources), "-x", "none", emulator,
                          *(mpi[1] if name == "collectives" else []), "-lpthread"])
    compile_all(objects)
    compile_all(links)
    return folder


# ThreadSanitizer wants the addresses that programs had before kernels scattered them more widely.
UNSCATTERED = ["setarch", "-R"] if shutil.which("setarch") and subprocess.run(
    ["setarch", "-R", "true"], capture_output=True).returncode == 0 else []


def run(program, *arguments, **env):
    sanitizers = {"ASAN_OPTIONS": "detect_leaks=0", "TSAN_OPTIONS": "atexit_sleep_ms=0"}
    prefix = UNSCATTERED if program.parent.name == "thread" else []
    return subprocess.run([*prefix, program, *arguments], env=environment(sanitizers | env), timeout=120,
                          capture_output=True, text=True, errors="replace")


def output(program, *arguments, **env):
    process = run(program, *arguments, **env)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    return process.stdout


# ---------------------------------------------------------------------------------------------------------------------
# The device language

@pytest.mark.parametrize("settings", ORDERS, ids=lambda settings: "".join(settings.values()))
def test_language(programs, settings):
    assert output(programs / "plain/language", **settings) == "passed\n"


@pytest.mark.parametrize("variant", ["address", "thread"])
def test_language_under_sanitizers(programs, variant):
    for settings in [{"TRAIN_GPT_THREADS": "random:9"}, {"TRAIN_GPT_BLOCKS": "unordered"}]:
        assert output(programs / variant / "language", **settings) == "passed\n"


@pytest.mark.parametrize("name", ["THREADS", "CP_ASYNC", "BLOCKS", "STREAMS", "EMULATOR_WORKERS"])
def test_settings_are_checked(programs, name):
    process = run(programs / "plain/bugs", **{f"TRAIN_GPT_{name}": "0x"})
    assert process.returncode == 2 and f"TRAIN_GPT_{name}=0x" in process.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Planted bugs

@pytest.fixture(scope="module")
def twins(programs):
    """What the correct twins print: the same in every order, under every sanitizer."""
    printed = output(programs / "plain/bugs")
    assert "NaN" not in printed
    return printed


def test_every_bug_is_tried(twins):
    names = {line.split()[0] for line in twins.splitlines()}
    assert names == {*ABORTS, *DIFFERENCES, *ADDRESSES, *RACES, *RACES_OF_BLOCKS} and len(names) >= 20


@pytest.mark.parametrize("settings", ORDERS, ids=lambda settings: "".join(settings.values()))
def test_twins(programs, twins, settings):
    assert output(programs / "plain/bugs", **settings) == twins


@pytest.mark.parametrize("variant", ["address", "thread"])
def test_twins_under_sanitizers(programs, twins, variant):
    for settings in [*ORDERS[:4], {"TRAIN_GPT_BLOCKS": "unordered"},
                     {"TRAIN_GPT_BLOCKS": "unordered", "TRAIN_GPT_THREADS": "random:5"}]:
        assert output(programs / variant / "bugs", **settings) == twins


@pytest.mark.parametrize("name,says", ABORTS.items())
def test_aborts(programs, name, says):
    for settings in ORDERS:
        process = run(programs / "plain/bugs", name, **settings)
        assert process.returncode == -6, f"{settings}: {process.returncode}"
        # Another order may see another side of it first.
        assert re.search(says, process.stderr) or settings != ORDERS[0], process.stderr
        assert "chosen->bug" in process.stderr and re.search(r"launched at test/emulator/bugs.cu:\d+", process.stderr)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_orders_differ(programs, name):
    printed = {output(programs / "plain/bugs", name, **settings) for settings in ORDERS}
    assert len(printed) > 1 or all("NaN" in text for text in printed), printed


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses(programs, name):
    process = run(programs / "address/bugs", name)
    assert process.returncode != 0 and "AddressSanitizer" in process.stderr, process.stderr
    assert name in process.stderr


@pytest.mark.parametrize("name,blocks", [(name, "ordered") for name in RACES] +
                         [(name, "unordered") for name in RACES_OF_BLOCKS])
def test_races(programs, name, blocks):
    process = run(programs / "thread/bugs", name, TRAIN_GPT_BLOCKS=blocks)
    assert process.returncode != 0 and "WARNING: ThreadSanitizer: data race" in process.stderr, process.stderr
    assert re.search(rf"{name}.*bugs.cu:\d+", process.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# Streams

@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_promises(programs, policy, variant):
    assert output(programs / variant / "streams", "promises", TRAIN_GPT_STREAMS=policy) == "passed\n"


def test_latest_does_no_more_than_it_must(programs):
    assert output(programs / "plain/streams", "latest") == "passed\n"


@pytest.mark.parametrize("policy", POLICIES[:3])
def test_a_stuck_program_is_told_where(programs, policy):
    process = run(programs / "plain/streams", "stuck", TRAIN_GPT_STREAMS=policy)
    assert process.returncode == -6
    assert "stream 2, of 2 items: wait for an event" in process.stderr
    assert "waits for item 1 of stream 1, which has finished 0 of 0" in process.stderr


@pytest.mark.parametrize("missing", ["nothing", "upload", "written", "reduced", "download"])
def test_missing_waits_show(programs, missing):
    losses = {output(programs / "plain/streams", "step", missing, TRAIN_GPT_STREAMS=policy) for policy in POLICIES}
    assert (len(losses) == 1) == (missing == "nothing"), losses
    assert missing != "nothing" or "nan" not in losses.pop()


@pytest.mark.parametrize("missing,policy", [("nothing", policy) for policy in POLICIES[:5]] +
                         [("ready", "random:1"), ("done", "random:1"), ("done", "latest")])
def test_collectives(programs, missing, policy):
    process = subprocess.run(["mpirun", "-n", "2", "--oversubscribe", "--bind-to", "none", "-x", "OMP_NUM_THREADS=1",
                              "-x", f"TRAIN_GPT_STREAMS={policy}", programs / "plain/collectives", missing],
                             env=environment(MPI_ENV), timeout=120, capture_output=True, text=True, errors="replace")
    assert process.stdout.count("passed" if missing == "nothing" else "wrong sums") == 2, process.stdout + process.stderr
