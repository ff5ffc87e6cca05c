"""How the GPU program's ranks meet (kernels/cuda/bootstrap.h), without GPUs: the start of the program, compiled against a
stand-in for CUDA's runtime and NCCL, with MPI and without."""
import os
import re
import signal
import socket
import subprocess
import time

import pytest

from conftest import MPI_ENV, PROGRAM, ROOT, environment

FLAGS = ["-x", "c++", "-std=c++17", "-O1", "-g", "-fopenmp", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror",
         "-Itest/bootstrap", "-Ikernels/cuda", "-I."]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bootstrap")
    mpi = [subprocess.run(["pkg-config", f"--{what}", "ompi-c"], capture_output=True, text=True).stdout.split()
           for what in ("cflags", "libs")]
    running = []
    for name, cflags, libraries in (("tcp", ["-DTRAIN_GPT_MPI=0"], []),
                                    ("mpi", ["-DTRAIN_GPT_MPI=1", *mpi[0]], mpi[1] or ["-lmpi"])):
        command = ["g++", *FLAGS, *cflags, "-o", folder / name, "test/bootstrap/ranks.cu", "-x", "none", *libraries]
        running.append(subprocess.Popen(list(map(str, command)), cwd=ROOT, stderr=subprocess.PIPE, text=True))
    for process in running:
        errors = process.communicate(timeout=300)[1]
        assert process.returncode == 0, errors[-4000:]
    return {name: str(folder / name) for name in ("tcp", "mpi")}


def clean(extra):
    env = environment({"TEST_GPUS": "4", "TEST_TIMEOUT": "20", "TRAIN_GPT_JOB": f"{os.getpid()}"})
    for key in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        env.pop(key, None)
    env.update(extra)
    return {key: str(value) for key, value in env.items() if value is not None}


def free_port():
    """Of those that Linux does not give to outgoing connections."""
    for port in range(20000 + os.getpid() % 9000, 30000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def start(program, ranks, *arguments):
    """Processes with these variables each."""
    return [subprocess.Popen([program, *(arguments or ["end"])], env=clean(variables), stdin=subprocess.DEVNULL,
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for variables in ranks]


def finish(processes, timeout=60):
    results = []
    for process in processes:
        out, err = process.communicate(timeout=timeout)
        results.append((process.returncode, out, err))
    return results


def expect_met(outputs, gpus):
    """Every rank on its GPU, all with one identifier, which differs from that of any other run."""
    lines = sorted("".join(outputs).splitlines())
    found = [re.fullmatch(r"rank (\d+) of (\d+) on GPU (\d+): ([0-9a-f]{256})", line) for line in lines]
    assert all(found), lines
    assert [int(match[1]) for match in found] == list(range(len(gpus)))
    assert [int(match[3]) for match in found] == gpus
    assert {int(match[2]) for match in found} == {len(gpus)}
    identifiers = {match[4] for match in found}
    assert len(identifiers) == 1
    assert identifiers.isdisjoint(expect_met.seen)
    expect_met.seen |= identifiers


expect_met.seen = set()


def variables(count, port, **more):
    return [{"RANK": r, "WORLD_SIZE": count, "LOCAL_RANK": r, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": port, **more} for r in range(count)]


def slurm(count, nodes, mpi=None, **more):
    """As srun sets them, on so many nodes; mpi: the variable in which its plugin puts the rank."""
    each = count // nodes
    return [{"SLURM_JOB_ID": 100000 + os.getpid(), "SLURM_STEP_ID": 0, "SLURM_PROCID": r, "SLURM_STEP_NUM_TASKS": count,
             "SLURM_LOCALID": r % each, "SLURM_STEP_TASKS_PER_NODE": f"{each}(x{nodes})" if nodes > 1 else str(each),
             "SLURM_STEP_NODELIST": "localhost,elsewhere[01-03]", "TEST_NODE": r // each, "TRAIN_GPT_JOB": None,
             **({mpi: r} if mpi else {}), **more} for r in range(count)]


@pytest.mark.parametrize("build", ["tcp", "mpi"])
@pytest.mark.parametrize("how", ["variables", "torchrun", "srun", "srun --mpi=pmix", "srun, address given"])
def test_ranks_meet(programs, build, how):
    ranks, gpus = {
        "variables": (variables(3, free_port()), [0, 1, 2]),
        # Whose agent listens on MASTER_PORT.
        "torchrun": (variables(3, 1, TORCHELASTIC_RUN_ID=f"{build}{os.getpid()}", TORCHELASTIC_USE_AGENT_STORE="True",
                               TRAIN_GPT_JOB=None), [0, 1, 2]),
        "srun": (slurm(4, 2), [0, 1, 0, 1]),
        "srun --mpi=pmix": (slurm(3, 1, mpi="PMIX_RANK", SLURM_RESTART_COUNT=1), [0, 1, 2]),
        "srun, address given": (slurm(4, 2, SLURM_STEP_NODELIST="x[", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()),
                                [0, 1, 0, 1]),
    }[how]
    results = finish(start(programs[build], ranks))
    assert [result[0] for result in results] == [0] * len(ranks), results
    assert not any(result[2] for result in results), results
    expect_met([result[1] for result in results], gpus)


def test_nproc(programs):
    for build in ("tcp", "mpi"):
        process = start(programs[build], [{}], "end", "--nproc", "4")
        (code, out, err), = finish(process)
        assert code == 0 and err == "", err
        expect_met([out], [0, 1, 2, 3])
    (code, out, err), = finish(start(programs["tcp"], [{}], "end", "--nproc", "5"))
    assert code == 2 and out == "" and "5 ranks on a machine with 4 GPUs" in err and err.count("\n") == 1, err


def test_mpirun(programs):
    """Over MPI where it is there; over TCP where an address is given, or without MPI on one machine."""
    for build, extra in (("mpi", {}), ("mpi", {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}), ("tcp", {})):
        process = subprocess.run(["mpirun", "-q", "-n", "2", "--oversubscribe", programs[build], "end"],
                                 env=clean({**MPI_ENV, **extra}), capture_output=True, text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        expect_met([process.stdout], [0, 1])


def test_one_gpu_for_two_ranks(programs):
    """Also where each sees one GPU alone, as number 0. One line, and all ranks end with it."""
    results = finish(start(programs["tcp"], variables(3, free_port(), TEST_GPUS=1, TEST_GPU=7)))
    assert [result[0] for result in results] == [2, 2, 2], results
    assert "".join(result[1] for result in results) == ""
    assert "3 ranks on" in results[0][2] and "have taken 1 GPU, ranks 0 and 1 among them" in results[0][2], results
    assert results[0][2].count("\n") == 1 and results[1][2] == results[2][2] == "", results


def test_a_rank_without_a_gpu(programs):
    ranks = variables(3, free_port())
    ranks[2]["TEST_GPUS"] = 0
    results = finish(start(programs["tcp"], ranks))
    assert [result[0] for result in results] == [2, 2, 2], results
    assert re.fullmatch(r"train_gpt: error: rank 2 on \S+: no GPU answers: .*\n", results[0][2]), results
    assert results[1][2] == results[2][2] == "", results


def test_bad_input_that_rank_0_alone_sees(programs):
    results = finish(start(programs["tcp"], variables(3, free_port()), "bad"))
    assert [result[0] for result in results] == [2, 2, 2], results
    assert re.fullmatch(r"train_gpt: error: rank 0 on \S+: no such data\n", results[0][2]), results
    assert results[1][2] == results[2][2] == "", results
    (code, _, err), = finish(start(programs["tcp"], variables(3, free_port(), TEST_TIMEOUT=1)[:1], "bad"))
    assert code == 1 and "no such data" in err and err.count("\n") == 1, err # though the others do not come


def test_settings_without_sense(programs):
    """Said at once, and once."""
    for extra, says in (({"MASTER_PORT": "x"}, "MASTER_PORT is"), ({"MASTER_ADDR": None, "LOCAL_WORLD_SIZE": 1,
                                                                   "LOCAL_RANK": 0}, "MASTER_ADDR is not set"),
                        ({"RANK": 7}, "RANK is \"7\"")):
        ranks = [{**rank, **extra} for rank in variables(2, 1)]
        results = finish(start(programs["tcp"], ranks), timeout=20)
        assert [result[0] for result in results] == [2, 2], results
        errors = "".join(result[2] for result in results[:1])
        assert says in errors and errors.count("\n") == 1, results


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_what_ends_ranks(programs):
    """All at once, as each takes some seconds.

    With a launcher: a failing rank, a killed one, and a stop that is asked for: one line, and nobody is left. Without:
    ranks notice that one is lost, and say which. A rank that does not come is named, once; one of another job says so
    itself."""
    killed, stopped = start(programs["tcp"], [{}, {}], "train", "--nproc", "3")
    fails, = start(programs["tcp"], [{}], "1", "--nproc", "3")
    port = free_port()
    lost = start(programs["tcp"], variables(3, port, MASTER_ADDR="127.0.0.2"), "train")
    ranks = variables(4, port, MASTER_ADDR="127.0.0.3", TEST_TIMEOUT=2)
    ranks[3]["TRAIN_GPT_JOB"] = "another"
    waiting = start(programs["tcp"], [ranks[0], ranks[1], ranks[3]])

    for process in (killed, killed, killed, stopped, stopped, stopped, *lost):
        assert process.stdout.readline().startswith("rank ")
    pids = children(killed.pid)
    assert len(pids) == 3
    os.kill(pids[2], signal.SIGKILL)
    stopped.send_signal(signal.SIGTERM)
    lost[1].kill()
    begin = time.time()
    (code, _, err), = finish([killed])
    assert code == 1 and re.fullmatch(r"train_gpt: rank 2 of 3 on \S+ was ended by signal 9 \(Killed\)\n", err), err
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
    (code, _, err), = finish([fails])
    assert code == 1 and re.fullmatch(r"train_gpt: rank 1 of 3 on \S+ failed: out of luck \(.*\)\n", err), err
    (code, _, err), = finish([stopped])
    assert code == 75 and err == "", err

    results = finish(lost)
    assert time.time() - begin < 20
    assert [result[0] for result in results] == [1, -signal.SIGKILL, 1], results
    assert re.search(r"rank 0 of 3 on \S+ failed: rank 1 on \S+ is lost: its connection was closed", results[0][2])
    assert results[2][2] == "", results

    results = finish(waiting)
    assert [result[0] for result in results] == [1, 1, 1], results
    assert re.search(r"rank 0 of 4 on \S+ failed: ranks 2-3 of 4 did not come to 127.0.0.3:\d+ within 2 s; refused was "
                     r"a rank 3 on ", results[0][2]), results
    assert results[1][2] == "", results
    assert re.search(r"rank 3 of 4 on \S+ failed: rank 0 at \S+ refuses this rank: it is of another job", results[2][2])


@pytest.mark.full
def test_a_cut_link_ends_all(programs):
    """Between two machines, one of which has two ranks: both sides are gone in time, and say who the other was."""
    names = [f"train_gpt_{side}{os.getpid()}" for side in "ab"]
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "add", names[0]], capture_output=True).returncode != 0:
        pytest.skip("network namespaces cannot be made here")
    processes = []
    try:
        script = f"""ip netns add {names[1]}
            ip link add v0 netns {names[0]} type veth peer name v1 netns {names[1]}
            ip -n {names[0]} addr add 10.77.0.1/24 dev v0
            ip -n {names[1]} addr add 10.77.0.2/24 dev v1
            ip -n {names[0]} link set lo up
            ip -n {names[0]} link set v0 up
            ip -n {names[1]} link set v1 up"""
        subprocess.run(["sh", "-ec", script], check=True)
        ranks = [{**rank, "MASTER_ADDR": "10.77.0.1", "TEST_NODE": r // 2, "TEST_TIMEOUT": 5, "LOCAL_WORLD_SIZE": 2,
                  "LOCAL_RANK": r % 2} for r, rank in enumerate(variables(3, 23456))]
        processes = [subprocess.Popen(["ip", "netns", "exec", names[r // 2], programs["tcp"], "train"], env=clean(rank),
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
                     for r, rank in enumerate(ranks)]
        for process in processes:
            assert process.stdout.readline().startswith("rank ")
        subprocess.run(["ip", "-n", names[1], "link", "set", "v1", "down"], check=True)
        cut = time.time()
        results = finish(processes)
        assert time.time() - cut < 5 + 5
        assert [result[0] for result in results] == [1, 1, 1], results
        assert re.search(r"rank 0 of 3 on \S+ failed: rank 2 on \S+ is lost: nothing was heard", results[0][2]), results
        assert results[1][2] == "", results
        assert re.search(r"rank 2 of 3 on \S+ failed: rank 0 on \S+ is lost: nothing was heard", results[2][2]), results
    finally:
        for process in processes:
            process.kill()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.parametrize("ranks,says", [(slurm(2, 1), "srun without --mpi"), (variables(2, 1), "RANK and WORLD_SIZE")])
def test_cpus_need_mpi(texts, tmp_path, ranks, says):
    """Its collectives are MPI's: ranks that it does not know of say so, once, instead of training each by itself."""
    results = finish([subprocess.Popen([str(PROGRAM), "--train-data", str(texts / "train.txt"), "--log-dir",
                                        str(tmp_path / "log")], env=clean(rank), stdin=subprocess.DEVNULL,
                                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for rank in ranks])
    assert [result[0] for result in results] == [2, 2], results
    assert says in results[0][2] and "--mpi=pmix" in results[0][2] and results[0][2].count("\n") == 1, results
    assert results[1][2] == "" and results[0][1] == results[1][1] == "", results
    assert not (tmp_path / "log").exists()
