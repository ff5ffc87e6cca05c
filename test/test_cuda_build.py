"""DEVICE=cuda where there is a CUDA toolkit: what builds, with and without NCCL and MPI, and what it says without a GPU.

The programs are built into build/cuda_*, so that ./train_gpt stays what it was. The quick part compiles one precision
for one architecture; entry points of the others are a stub.
"""
import os
import resource
import shutil
import socket
import subprocess

import pytest

from conftest import MPI_ENV, ROOT, environment

NVCC = shutil.which("nvcc") or ("/usr/local/cuda/bin/nvcc" if os.path.exists("/usr/local/cuda/bin/nvcc") else None)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="no nvcc here: DEVICE=cuda cannot be built")
without_gpu = pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="what is said where no GPU answers")
full = pytest.mark.full
CHECK = ROOT / "scripts" / "check_ptxas.sh"


def make(target, build, *options):
    command = ["make", "-C", ROOT, "-j2", "DEVICE=cuda", f"BUILD=build/{build}", *options, target]
    process = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1500,
                             env=environment())
    output = process.stdout + process.stderr
    assert process.returncode == 0, output[-6000:]
    assert "warning:" not in output and "warning #" not in output and "warning :" not in output, output[-6000:]
    return output


def run(binary, *arguments, env=None, before=()):
    return subprocess.run([*map(str, before), str(binary), *map(str, arguments)], env=environment(env), timeout=120,
                          stdin=subprocess.DEVNULL, capture_output=True, text=True)


def linked(binary):
    return subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def bare():
    """The program without NCCL and MPI, and what make said. In bf16 alone, for one architecture."""
    folder = ROOT / "build" / "cuda_bare"
    options = ["NCCL=0", "MPI=0", "CUDA_ARCHS=80"]
    (folder / "test").mkdir(parents=True, exist_ok=True)
    (folder / "others.c").write_text("int train_fp32(void) { return 99; }\nint train_bf16_gradfp32(void) { return 99; }\n")
    subprocess.run(["gcc", "-c", "-o", folder / "others.o", folder / "others.c"], check=True)
    objects = " ".join(f"build/cuda_bare/{name}.o" for name in ("main", "train_bf16", "others"))
    for name in ("main.o", "train_bf16.o"):
        (folder / name).unlink(missing_ok=True) # so that what is said of them is said now
    return folder / "train_gpt", make("build/cuda_bare/train_gpt", "cuda_bare", *options, f"OBJECTS={objects}")


@needs_nvcc
def test_one_rank_needs_neither_nccl_nor_mpi(bare):
    binary, output = bare
    assert "kernels for 1 architectures" in output and "spills" not in output
    assert "libcublasLt" in linked(binary)
    assert "libnccl" not in linked(binary) and "libmpi" not in linked(binary)


@needs_nvcc
def test_several_ranks_name_what_is_missing(bare, texts):
    process = run(bare[0], "--train-data", texts / "train.txt", "--nproc", 2)
    assert process.returncode == 2 and "2 ranks need NCCL, which" in process.stderr, process.stderr
    assert len(process.stderr.splitlines()) == 1
    process = run(bare[0], "--train-data", texts / "train.txt", env={"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0"})
    assert process.returncode == 2 and "3 ranks need NCCL, which" in process.stderr, process.stderr


@needs_nvcc
@without_gpu
def test_no_gpu_is_said_in_a_line(bare, texts, tmp_path):
    process = run(bare[0], "--train-data", texts / "train.txt", "--steps", 3, "--log-dir", tmp_path / "log")
    assert process.returncode == 2 and process.stdout == ""
    assert len(process.stderr.splitlines()) == 1
    assert "no GPU answers" in process.stderr and "make DEVICE=cpu" in process.stderr
    assert not (tmp_path / "log").exists()


@needs_nvcc
def test_what_needs_no_gpu(bare, tmp_path):
    for arguments, says in (((), "quickstart.sh"), (("--help",), "--learning-rate"),
                            (("--plan", "--preset", "gpt2-124M", "--world-size", 8), "zero3")):
        process = run(bare[0], *arguments)
        assert process.returncode == 0 and says in process.stdout and process.stderr == "", (arguments, process.stderr)
    assert run(bare[0], "--plan", "--precision", "fp32").returncode == 99 # the stub


@needs_nvcc
@without_gpu
def test_profiled_steps(bare, texts):
    process = run(bare[0], "--train-data", texts / "train.txt", "--profile-steps", "5:4")
    assert process.returncode == 2 and "--profile-steps" in process.stderr
    process = run(bare[0], "--train-data", texts / "train.txt", "--profile-steps", "4:5") # right, so the next is asked
    assert process.returncode == 2 and "no GPU answers" in process.stderr


# ---------------------------------------------------------------------------------------------------------------------
# The check of what ptxas reports

REPORT = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z11copy_kernelIfEvPT_' for 'sm_90'
ptxas info    : Function properties for _Z11copy_kernelIfEvPT_
    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {shared} bytes smem
ptxas info    : Compiling entry function '_Z10add_kernelPf' for 'sm_90'
ptxas info    : Function properties for _Z10add_kernelPf
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 364 bytes cmem[0]
"""


@pytest.mark.parametrize("stores,loads,shared,says", [
    (0, 0, 49152, None), (4, 0, 0, "spills registers"), (0, 8, 0, "spills registers"),
    (0, 0, 49153, "49153 bytes of static shared memory")])
def test_the_check_of_kernels(tmp_path, stores, loads, shared, says):
    report = tmp_path / "report"
    report.write_text(REPORT.format(stores=stores, loads=loads, shared=shared))
    process = subprocess.run(["bash", CHECK, report], capture_output=True, text=True)
    if says is None:
        assert process.returncode == 0, process.stderr
        assert process.stdout == ("2 kernels for 1 architectures: at most 168 registers (add_kernel), 49152 bytes of "
                                  "static shared memory; 1 with a stack frame\n")
    else:
        assert process.returncode == 1 and process.stdout == ""
        assert "sm_90 copy_kernel" in process.stderr and says in process.stderr
        assert len(process.stderr.splitlines()) == 1


def test_no_kernel_is_no_success(tmp_path):
    (tmp_path / "report").write_text("ptxas info    : 0 bytes gmem\n")
    process = subprocess.run(["bash", CHECK, tmp_path / "report"], capture_output=True, text=True)
    assert process.returncode == 1 and "no kernel is reported" in process.stderr


@needs_nvcc
def test_a_kernel_that_spills_is_not_built(tmp_path):
    """A real one: 64 values alive in a kernel that may have 32 registers."""
    source = tmp_path / "spill.cu"
    source.write_text("""
__global__ void __launch_bounds__(1024, 2) spilling_kernel(float *p, int n) {
    float a[64];
#pragma unroll
    for (int i = 0; i < 64; i++) a[i] = p[i * n];
    for (int k = 0; k < n; k++)
#pragma unroll
        for (int i = 0; i < 64; i++) a[i] = a[i] * a[(i + 7) % 64] + p[k];
#pragma unroll
    for (int i = 0; i < 64; i++) p[i * n] = a[i];
}
""")
    process = subprocess.run([NVCC, "-arch=sm_80", "-Xptxas", "-v", "-c", "-o", tmp_path / "spill.o", source],
                             capture_output=True, text=True, check=True)
    (tmp_path / "report").write_text(process.stderr)
    process = subprocess.run(["bash", CHECK, tmp_path / "report"], capture_output=True, text=True)
    assert process.returncode == 1 and "spilling_kernel spills registers" in process.stderr


# ---------------------------------------------------------------------------------------------------------------------
# Everything

@pytest.fixture(scope="module")
def whole():
    """All precisions and architectures, NCCL and MPI as found; and the processor time that it took."""
    shutil.rmtree(ROOT / "build" / "cuda_whole", ignore_errors=True)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    output = make("build/cuda_whole/train_gpt", "cuda_whole")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return ROOT / "build" / "cuda_whole" / "train_gpt", output, seconds


@full
@needs_nvcc
def test_all_architectures(whole):
    binary, output, seconds = whole
    assert output.count("kernels for 3 architectures") == 3
    for precision in ("fp32", "bf16", "bf16_gradfp32"):
        report = (binary.parent / f"train_{precision}.o.ptxas").read_text()
        assert all(f"for 'sm_{arch}'" in report for arch in (80, 90, 100))
    assert "arch=compute_100,code=compute_100" in output # PTX, which no ptxas reports
    print(f"{seconds:.0f} s of processor time")
    assert seconds < 2 * 120 # two minutes on two cores


def expect_no_gpu_once(code, errors):
    assert code == 2
    assert errors.count("no GPU answers") == 1 and "rank 0 on" in errors, errors


def run_ranks(binary, text):
    """Three ranks that nothing but these variables brings together: their one exit code, and all that they said."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [subprocess.Popen([binary, "--train-data", text, "--steps", "3", "--timeout", "60"],
                              env=environment({"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank),
                                               "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}),
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
             for rank in range(3)]
    errors = "".join(process.communicate(timeout=120)[1] for process in ranks)
    codes = {process.returncode for process in ranks}
    assert len(codes) == 1, errors
    return codes.pop(), errors


@full
@needs_nvcc
@without_gpu
def test_ranks_that_find_no_gpu_say_so_once(whole, texts):
    if "libnccl" not in linked(whole[0]):
        pytest.skip("no NCCL here")
    expect_no_gpu_once(*run_ranks(whole[0], texts / "train.txt"))
    if "libmpi" in linked(whole[0]):
        before = ["mpirun", "-q", "-n", 3, "--oversubscribe"]
        process = run(whole[0], "--train-data", texts / "train.txt", "--steps", 3, env=MPI_ENV, before=before)
        expect_no_gpu_once(process.returncode, process.stderr)


@full
@needs_nvcc
def test_without_nccl(texts):
    make("build/cuda_without_nccl/train_gpt", "cuda_without_nccl", "CUDA_ARCHS=90", "NCCL=0")
    binary = ROOT / "build" / "cuda_without_nccl" / "train_gpt"
    assert "libnccl" not in linked(binary) and "libmpi" not in linked(binary)
    process = run(binary, "--train-data", texts / "train.txt", "--nproc", 2)
    assert process.returncode == 2 and "2 ranks need NCCL, which" in process.stderr, process.stderr


@full
@needs_nvcc
@without_gpu
def test_without_mpi(texts):
    """Ranks meet all the same."""
    make("build/cuda_without_mpi/train_gpt", "cuda_without_mpi", "CUDA_ARCHS=90", "MPI=0")
    binary = ROOT / "build" / "cuda_without_mpi" / "train_gpt"
    if "NCCL ?= 0" in (binary.parent / "libraries.mk").read_text():
        pytest.skip("no NCCL here")
    assert "libnccl" in linked(binary) and "libmpi" not in linked(binary)
    expect_no_gpu_once(*run_ranks(binary, texts / "train.txt"))
    code, errors = run_ranks(binary, texts / "nothing.txt") # which rank 0 alone looks at
    assert code == 2 and errors.count("\n") == 1 and "nothing.txt" in errors, errors
    process = run(binary, "--train-data", texts / "train.txt", "--nproc", 2)
    assert process.returncode == 2 and "no GPU answers" in process.stderr, process.stderr
