"""The readers of files that others wrote, under clang's libFuzzer and sanitizers: a few seconds each; with --full 60
seconds each, or as many as FUZZ_SECONDS says."""
import os
import re
import shutil
import subprocess

import pytest

from conftest import ROOT, environment

TARGETS = sorted(path.stem for path in (ROOT / "test/fuzz").glob("fuzz_*.c"))
QUICK_SECONDS, FULL_SECONDS = 3, int(os.environ.get("FUZZ_SECONDS", "60"))


@pytest.fixture(scope="session")
def fuzz_targets(tmp_path_factory):
    """Builds the targets, where clang and its libFuzzer are installed."""
    probe = tmp_path_factory.mktemp("probe")
    (probe / "probe.c").write_text("int LLVMFuzzerTestOneInput(const char *d, unsigned long n) { return d == 0 && n; }\n")
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    if subprocess.run(["clang", "-fsanitize=fuzzer,address", "probe.c", "-o", "probe"], cwd=probe,
                      capture_output=True).returncode != 0:
        pytest.skip("clang is installed without libFuzzer (Debian: libclang-rt-14-dev or the like)")
    process = subprocess.run(["make", "-s", "-f", "test/fuzz/rules.mk", "fuzz"], cwd=ROOT, capture_output=True, text=True,
                             env=environment(), timeout=600)
    assert process.returncode == 0, process.stderr[-4000:]
    return ROOT / "build/fuzz"


def fuzz(binary, folder, seconds, seed):
    target = binary.name.removeprefix("fuzz_")
    found = folder / "found"
    found.mkdir()
    corpora = [ROOT / "test/fuzz/corpus" / target] + ([ROOT / "configs"] if target == "config" else [])
    process = subprocess.run([str(word) for word in [
        binary, found, *corpora, f"-max_total_time={seconds}", f"-seed={seed}", "-max_len=4096", "-rss_limit_mb=2048",
        "-timeout=60", f"-artifact_prefix={folder}/", "-print_final_stats=1"]], capture_output=True, text=True,
        errors="replace", env=environment({"TMPDIR": str(folder)}), timeout=seconds + 300)
    assert process.returncode == 0, process.stderr[-6000:]
    # It ran, beyond the seeds, and learnt something from them.
    executed = int(re.search(r"number_of_executed_units: (\d+)", process.stderr)[1])
    assert executed > 100, process.stderr[-2000:]
    assert any(found.iterdir())


@pytest.mark.parametrize("target", TARGETS)
def test_fuzz_shortly(fuzz_targets, tmp_path, target):
    fuzz(fuzz_targets / target, tmp_path, QUICK_SECONDS, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_fuzz(fuzz_targets, tmp_path, target):
    fuzz(fuzz_targets / target, tmp_path, FULL_SECONDS, seed=0)  # 0: another one every time


def test_seeds_are_what_the_script_makes(tmp_path):
    subprocess.run(["/usr/bin/python3", str(ROOT / "test/fuzz/make_corpus.py"), str(tmp_path)], check=True)
    made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    corpus = ROOT / "test/fuzz/corpus"
    assert made == {path.relative_to(corpus): path.read_bytes() for path in corpus.rglob("*") if path.is_file()}
