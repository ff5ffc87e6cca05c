"""Every CUDA kernel, run by the emulator, against the CPU's operation (test/kernels): values, what is written and what
is not, the same bits in any order of threads, bytes of memory moved; and under sanitizers."""
import concurrent.futures
import os
import re
import subprocess

import pytest

from conftest import ROOT, environment

full = pytest.mark.full
PRECISIONS = ["fp32", "bf16", "bf16_gradfp32"]
KERNELS = ROOT / "build" / "emulator" / "kernels"
SANITIZERS = {"plain": {},
              "asan": {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"},
              "tsan": {"TSAN_OPTIONS": "halt_on_error=1"}}

# Build, precision, arguments, environment. Sanitizers see one run; under ThreadSanitizer, in a second, blocks are not
# ordered one after the other, so that races between them show.
QUICK = [("plain", "fp32", ["--set", "quick"], {}),
         ("plain", "bf16", ["--set", "quick"], {}),
         ("plain", "bf16_gradfp32", ["--set", "quick"], {}),
         ("asan", "bf16", ["--set", "small", "--runs", "1"], {}),
         ("tsan", "bf16", ["--set", "small", "--runs", "1"], {"TRAIN_GPT_BLOCKS": "ordered"}),
         ("tsan", "bf16", ["--set", "small", "--runs", "1"], {"TRAIN_GPT_BLOCKS": "unordered"})]


def name_of(run):
    build, precision, arguments, extra = run
    return "-".join([build, precision, arguments[1], *extra.values()])


def program(build, precision):
    return KERNELS / ("test_kernels_" + ("" if build == "plain" else build + "_") + precision)


def make(targets):
    targets = sorted({str(target.relative_to(ROOT)) for target in targets})
    subprocess.run(["make", "-C", ROOT, f"-j{os.cpu_count()}", "DEVICE=emulator", *targets], check=True,
                   stdout=subprocess.DEVNULL)


def start(path, build, arguments, extra, threads):
    """One OS thread where several programs run at a time, or all cores; under a sanitizer always one, as it does not see
    how OpenMP orders the CPU's operations."""
    env = environment({"OMP_NUM_THREADS": str(threads if build == "plain" else 1), **SANITIZERS[build], **extra})
    return subprocess.run([path, *arguments], env=env, capture_output=True, text=True, errors="replace", timeout=3600)


def check(process):
    output = process.stdout[-6000:] + process.stderr[-6000:]
    failures = "\n".join(re.findall(r"^FAIL.*\n(?: .*\n)*", process.stdout, re.M))
    assert process.returncode == 0, failures + output
    assert re.search(r"^[1-9]\d* passed, 0 failed$", process.stdout, re.M), output


@pytest.fixture(scope="module")
def quick():
    """All quick runs, as many at a time as there are cores."""
    make(program(build, precision) for build, precision, _, _ in QUICK)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {name_of(run): pool.submit(start, program(*run[:2]), run[0], run[2], run[3], 1) for run in QUICK}


@pytest.mark.parametrize("name", map(name_of, QUICK))
def test_quick(quick, name):
    check(quick[name].result())


@full
@pytest.mark.parametrize("precision", PRECISIONS)
def test_all_shapes(precision):
    make([program("plain", precision)])
    check(start(program("plain", precision), "plain", ["--set", "full", "--runs", "3"], {}, os.cpu_count()))


@full
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("precision", PRECISIONS)
def test_other_inputs(precision, seed):
    make([program("plain", precision)])
    check(start(program("plain", precision), "plain", ["--set", "small", "--seed", str(seed), "--runs", "10"], {},
                os.cpu_count()))


@full
@pytest.mark.parametrize("extra", [{"TRAIN_GPT_CP_ASYNC": "eager"}, {"TRAIN_GPT_EMULATOR_WORKERS": "5"}],
                         ids=lambda extra: "-".join(*extra.items()))
def test_other_schedules(extra):
    make([program("plain", "bf16")])
    check(start(program("plain", "bf16"), "plain", ["--set", "small"], extra, 1))


@full
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("build,extra", [("asan", {}), ("tsan", {"TRAIN_GPT_BLOCKS": "ordered"}),
                                         ("tsan", {"TRAIN_GPT_BLOCKS": "unordered"})])
def test_sanitizers(precision, build, extra):
    make([program(build, precision)])
    check(start(program(build, precision), build, ["--set", "quick", "--largest", "1e6", "--runs", "2"], extra, 1))


@full
def test_the_harness_itself():
    """The CPU's operations against themselves: nothing differs."""
    make([program("plain", "bf16")])
    process = start(program("plain", "bf16"), "plain", ["--set", "quick", "--against-itself", "--runs", "1"], {}, 1)
    check(process)
    errors = re.findall(r" (\d\.\de[+-]\d\d)(?= )", process.stdout)
    assert len(errors) > 200 and set(errors) == {"0.0e+00"}
