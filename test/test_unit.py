"""Runs the unit tests written in C (test/unit), each on its own, those of the collectives on several ranks."""
import pathlib
import subprocess

import pytest

from conftest import MPI_ENV, ROOT, environment

BINARIES = sorted(path for path in (ROOT / "build/cpu/test").glob("test_*") if path.suffix == "")
ALONE = [path for path in BINARIES if not path.name.startswith("test_nccl")]
SOURCES = sorted((ROOT / "test/unit").glob("test_*.c"))


def run(command):
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True, errors="replace",
                             env=environment(MPI_ENV | {"GOMP_SPINCOUNT": "500"}), timeout=600)  # as the program sets it
    assert process.returncode == 0, process.stdout[-8000:] + process.stderr[-8000:]
    assert "[  PASSED  ]" in process.stdout + process.stderr


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_every_source_is_built(source):
    assert any(path.name.startswith(source.stem) for path in BINARIES)


@pytest.mark.parametrize("binary", ALONE, ids=lambda path: path.name)
def test_unit(binary):
    run([binary])


@pytest.mark.parametrize("shared_memory", ["1", "0"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_collectives(ranks, shared_memory):
    binary = ROOT / "build/cpu/test/test_nccl"
    if ranks == 1:
        run([binary])
        return
    run(["mpirun", "-n", ranks, "--oversubscribe", "--bind-to", "none", "-x", f"TRAIN_GPT_SHARED_MEMORY={shared_memory}",
         "-x", "OMP_NUM_THREADS=1", binary])
