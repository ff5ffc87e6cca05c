"""Faults: a rank that stalls, dies or is cut off ends the run within --timeout + 5 s, and the message leads to it.

What must be gone is found by a mark in the environment, which all processes of a run inherit, wherever they run.
"""
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import time
import uuid

import pytest

from conftest import MPI_ENV, PROGRAM, ROOT, environment

full = pytest.mark.full
MARK = "FAULTS_TEST_RUN"
TIMEOUT, PROMISE = 5, 5  # seconds: the option, and within how many after it all is over
HOST = re.escape(socket.gethostname())
UNIT = r"(?:wte|wpe|block \d+|lnf|stage boundary|loss and norm|all ranks)"
SMALL = dict(n_layer=2, n_embd=32, n_head=2, micro_batch=2, sequence_length=32, tokens_per_step=768, steps=1000000,
             val_every=0, precision="fp32", timeout=TIMEOUT)


def words(flags):
    return [word for key, value in flags.items()
            for word in ("--" + key.replace("_", "-"), str(value).lower() if isinstance(value, bool) else str(value))]


class Job:
    """A run that is under way. All that belongs to it ends with the `with` block, come what may."""

    def __init__(self, command, log_dir, env=None):
        self.mark, self.log_dir = uuid.uuid4().hex, log_dir
        self.out, self.err = log_dir.parent / "stdout", log_dir.parent / "stderr"
        with open(self.out, "w") as out, open(self.err, "w") as err:  # files: nobody has to read them
            self.process = subprocess.Popen([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=out,
                                            stderr=err, env=environment({**(env or {}), MARK: self.mark}),
                                            start_new_session=True)

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        for pid in self.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()

    def alive(self):
        """Processes of the run that have not ended."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    pass  # it has ended (a zombie has no environment)
        return found

    def ranks(self):
        """Process ids by rank."""
        found = {}
        for pid in self.alive():
            try:
                text = pathlib.Path(f"/proc/{pid}/environ").read_bytes()
                program = os.readlink(f"/proc/{pid}/exe")
            except OSError:
                continue
            number = re.search(rb"(?:^|\0)OMPI_COMM_WORLD_RANK=(\d+)\0", text)
            if number and pathlib.Path(program).name in ("train_gpt", "test_nccl"):
                found[int(number[1])] = pid
        return found

    def steps(self):
        path = self.log_dir / "metrics.jsonl"
        return path.read_text().count('"loss"') if path.exists() else 0

    def wait_until(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < end, self.out.read_text()[-2000:] + self.err.read_text()[-2000:]
            time.sleep(0.01)

    def ends(self, within):
        """Waits until nothing of the run is left; returns its exit code, its errors, and after how many seconds."""
        begin = time.monotonic()
        while self.process.poll() is None or self.alive():
            assert time.monotonic() < begin + within, f"{self.alive()} remain: {self.err.read_text()}"
            time.sleep(0.05)
        return self.process.returncode, self.err.read_text(), time.monotonic() - begin


@pytest.fixture
def start(tmp_path, texts):
    """start(flag=value, ...): starts a run and returns when it has done some steps."""
    def begin(env=None, steps=3, **flags):
        log_dir = tmp_path / "log"
        flags = {"train_data": texts / "train.txt", "log_dir": log_dir, **SMALL, **flags}
        job = Job([PROGRAM, *words(flags)], log_dir, env)
        try:
            job.wait_until(lambda: job.steps() >= steps)
        except BaseException:
            job.__exit__()
            raise
        return job

    return begin


def culprit(error, ranks, rank, phase="step", host=HOST):
    """What a rank that gave up says: itself, unit, phase and step, and at the end of the line whom it waited for."""
    said = re.search(rf"^train_gpt: rank (\d+) of {ranks} on \S+ failed: {UNIT}, {phase} (\d+): [a-z -]+ of [\d.]+ "
                     rf"(?:bytes|MB): waited \d+ s for (.*) \(", error, re.M)
    assert said, error
    assert int(said[1]) != rank
    names = said[3].split("; in the end for ")[-1]  # those that wait for others, and the one that does not
    assert re.search(rf"\brank {rank} on {host}(?:,|$)", names), error
    return said


# ---------------------------------------------------------------------------------------------------------------------
# Stalled

STALLS = {
    "zero3": dict(nproc=3, strategy="zero3", stalled=2),
    "ddp": dict(nproc=2, strategy="ddp", stalled=0),
    "zero1": dict(nproc=4, strategy="zero1", stalled=3, micro_batch=1),
    "zero2": dict(nproc=3, strategy="zero2", stalled=1),
    "hybrid": dict(nproc=4, strategy="zero3", shard_group=2, stalled=1),
    "tensor": dict(nproc=4, tensor_parallel=2, stalled=3),
    "sequence": dict(nproc=2, tensor_parallel=2, sequence_parallel=True, stalled=1),
    "pipeline": dict(nproc=4, n_layer=4, pipeline_parallel=4, stalled=2),
    "all": dict(nproc=8, tensor_parallel=2, pipeline_parallel=2, strategy="zero1", stalled=5),
}


@pytest.mark.parametrize("shared_memory", [1, pytest.param(0, marks=full)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("zero3", "pipeline") else full)
                                  for name in STALLS])
def test_a_stalled_rank_is_named(start, name, shared_memory):
    flags = dict(STALLS[name])
    stalled = flags.pop("stalled")
    with start(env={"TRAIN_GPT_SHARED_MEMORY": str(shared_memory)}, **flags) as job:
        os.kill(job.ranks()[stalled], signal.SIGSTOP)
        code, error, _ = job.ends(TIMEOUT + PROMISE)
    assert code == 1, error
    culprit(error, flags["nproc"], stalled, "(?:step|evaluation after step|checkpoint after step)")
    assert error.count("\n") == 1, error  # one rank speaks for all


@full
@pytest.mark.parametrize("phase,flags", [
    ("evaluation after step", dict(val_every=1)),
    ("checkpoint after step", dict(checkpoint_every=1, checkpoint_async=False)),
    ("checkpoint after step", dict(checkpoint_every=1)),
])
def test_a_rank_stalls_beside_the_steps(start, texts, phase, flags):
    """In what takes most of the run's time. A checkpoint's files are written beside the next steps if it is
    asynchronous, so there the rank is only to be named."""
    with start(nproc=2, val_data=texts / "train.txt", n_embd=64, **flags) as job:
        time.sleep(0.1)
        os.kill(job.ranks()[1], signal.SIGSTOP)
        code, error, _ = job.ends(TIMEOUT + PROMISE)
    assert code == 1, error
    culprit(error, 2, 1, phase if "val_every" in flags else f"(?:{phase}|step|evaluation after step)")


@full
@pytest.mark.parametrize("shared_memory", [1, 0])
def test_a_suspended_job_goes_on(start, shared_memory):
    """A batch system may stop all ranks for longer than they would wait for one."""
    with start(env={"TRAIN_GPT_SHARED_MEMORY": str(shared_memory)}, nproc=3, strategy="zero3") as job:
        ranks = job.ranks().values()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in ranks:
                os.kill(pid, number)
            time.sleep(2 * TIMEOUT if number == signal.SIGSTOP else 0)
        before = job.steps()
        job.wait_until(lambda: job.steps() > before + 3)
        time.sleep(1)
        assert job.process.poll() is None and job.err.read_text() == ""


@pytest.mark.parametrize("how,shared_memory", [("collective", 1), pytest.param("message", 1, marks=full),
                                               pytest.param("collective", 0, marks=full)])
def test_who_waits_for_one_that_waits(tmp_path, how, shared_memory):
    """Three ranks in a row, of which the last stays away: the first, whose time is over first, names the last."""
    program = ROOT / "build/cpu/test/test_nccl"
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", 3, program, "stall", how]
    with Job(command, tmp_path / "log", MPI_ENV | {"TRAIN_GPT_SHARED_MEMORY": str(shared_memory)}) as job:
        code, error, _ = job.ends(30)
    kind = "send and receive" if how == "message" else "all-reduce"
    assert code == 1
    assert re.search(rf"the first pair, step 5: {kind} of 4 bytes: waited 3 s for rank 1 on {HOST}; in the end for "
                     rf"rank 2 on {HOST} \(", error), error
    assert error.count("train_gpt: rank") == 1


def test_a_rank_that_never_arrives(tmp_path, texts):
    flags = {"train_data": texts / "train.txt", **SMALL, "timeout": 3}
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", 1, PROGRAM, *words(flags),
               ":", "-n", 1, "sleep", 100]
    begin = time.monotonic()
    with Job(command, tmp_path / "log", MPI_ENV) as job:
        code, error, _ = job.ends(60)
    assert code == 1, error
    assert re.search(rf"rank 0 of 2 on {HOST} failed: has not met the other ranks within 3 s", error), error
    assert time.monotonic() - begin < 3 + PROMISE + 5  # to start mpirun and to build the run takes a moment, too


# ---------------------------------------------------------------------------------------------------------------------
# Killed

def test_a_killed_rank_is_named(start):
    with start(nproc=3, strategy="zero2") as job:
        os.kill(job.ranks()[1], signal.SIGKILL)
        code, error, _ = job.ends(TIMEOUT + PROMISE)
    assert code == 1
    assert error.endswith(f"train_gpt: rank 1 of 3 on {socket.gethostname()} was ended by signal 9 (Killed)\n")
    assert "failed" not in error and error.count("\n") <= 2  # another may say what it waited in if mpirun takes long


@pytest.mark.parametrize("victim", ["rank", "mpirun"])
def test_killed_under_mpirun(tmp_path, texts, victim):
    log_dir = tmp_path / "log"
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-n", 2, PROGRAM,
               *words({"train_data": texts / "train.txt", "log_dir": log_dir, **SMALL})]
    with Job(command, log_dir, MPI_ENV) as job:
        job.wait_until(lambda: job.steps() >= 3)
        os.kill(job.ranks()[1] if victim == "rank" else job.process.pid, signal.SIGKILL)
        code, error, _ = job.ends(TIMEOUT + PROMISE)
    assert code != 0
    if victim == "rank":  # in mpirun's words, which may break the line anywhere
        said = " ".join(error.split())
        assert re.search(rf"rank 1 with PID \d+ on node {HOST} exited on signal 9", said), error


def test_a_killed_launcher_takes_all_with_it(start):
    with start(nproc=3) as job:
        assert len(job.alive()) == 5  # the launcher, mpirun, and the ranks
        job.process.kill()
        job.ends(TIMEOUT + PROMISE)


# ---------------------------------------------------------------------------------------------------------------------
# Signals

@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=full),
                                    pytest.param(signal.SIGUSR1, marks=full)])
def test_a_signal_to_one_rank_stops_all(start, number):
    with start(nproc=3, strategy="zero1", checkpoint_every=1000000, timeout=60) as job:
        os.kill(job.ranks()[2], number)
        code, error, _ = job.ends(60)
        (saved,) = [path.name for path in job.log_dir.iterdir() if path.name.startswith("step_")]
        assert code == 75 and error == ""
        assert int(saved[5:]) == job.steps()
        assert f"stopped by a signal after step {job.steps()} of" in job.out.read_text()


# A stop is asked for in evaluation after every 16 passes; a pass of these takes a while.
SLOW = dict(n_layer=8, n_embd=256, n_head=4, micro_batch=8, sequence_length=64, tokens_per_step=1024)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=full)])
@pytest.mark.parametrize("during", ["collective", pytest.param("evaluation", marks=full),
                                    pytest.param("checkpoint", marks=full)])
def test_a_second_signal_ends_at_once(start, texts, during, number):
    """Whatever the ranks are doing. In a collective with a rank that is stopped, they would wait for a minute."""
    flags = {"collective": dict(), "evaluation": dict(SLOW, val_data=texts / "train.txt", val_every=1, val_steps=60),
             "checkpoint": dict(SLOW, checkpoint_every=1, checkpoint_async=False)}[during]
    with start(nproc=2, **flags, timeout=60, steps=1 if flags else 3) as job:
        if during == "collective":
            os.kill(job.ranks()[1], signal.SIGSTOP)
            time.sleep(0.5)
        job.process.send_signal(number)
        time.sleep(0.1)
        job.process.send_signal(number)
        code, error, _ = job.ends(10)
    assert code == 128 + number, error


# ---------------------------------------------------------------------------------------------------------------------
# Cut off

class Hosts:
    """Two network namespaces, `alpha` and `beta`, with a link between them."""

    def __init__(self, folder):
        self.names = {host: f"faults-{os.getpid()}-{host}" for host in ("alpha", "beta")}
        self.agent = folder / "agent.sh"  # what mpirun calls instead of ssh, with an address and a command
        self.agent.write_text("#!/bin/sh\nshift\n"
                              f"exec ip netns exec {self.names['beta']} unshare --uts sh -c "
                              "\"hostname beta; exec $*\"\n")
        self.agent.chmod(0o755)

    def __enter__(self):
        for name in self.names.values():
            self.ip("netns", "add", name)
        self.ip("-n", self.names["alpha"], "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns",
                self.names["beta"])
        for i, name in enumerate(self.names.values(), 1):
            self.ip("-n", name, "addr", "add", f"10.77.0.{i}/24", "dev", "link0")
            self.ip("-n", name, "link", "set", "lo", "up")
            self.ip("-n", name, "link", "set", "link0", "up")
        return self

    def __exit__(self, *unused):
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name])

    @staticmethod
    def ip(*arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def command(self, each, keepalive, *program):
        """mpirun on alpha, which starts `each` ranks there and on beta. keepalive: when it sees one is lost:
        seconds of silence, seconds between questions, questions."""
        options = {"plm_rsh_agent": self.agent, "btl": "self,vader,tcp", "btl_tcp_if_include": "10.77.0.0/24",
                   "oob_tcp_if_include": "10.77.0.0/24", "oob_tcp_keepalive_time": keepalive[0],
                   "oob_tcp_keepalive_intvl": keepalive[1], "oob_tcp_keepalive_probes": keepalive[2]}
        mpirun = ["mpirun", "--host", f"10.77.0.1:{each},10.77.0.2:{each}", "-n", 2 * each, "--bind-to", "none",
                  *[word for key, value in options.items() for word in ("--mca", key, value)], *program]
        return ["ip", "netns", "exec", self.names["alpha"], "unshare", "--uts", "sh", "-c",
                "hostname alpha; exec \"$@\"", "sh", *mpirun]


def can_make_hosts():
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "unshare", "hostname", "sysctl")):
        return False
    probe = f"faults-{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", probe])
    return made


@pytest.mark.parametrize("first,each,cut", [("deadline", 1, "beta"), ("mpirun", 2, "alpha"),
                                            pytest.param("deadline", 2, "alpha", marks=full),
                                            pytest.param("mpirun", 1, "beta", marks=full)])
def test_a_cut_link(tmp_path, texts, first, each, cut):
    """Two hosts, and the link between them goes down. Either mpirun notices that first, from its own connections, and
    ends the ranks, who say what they waited in; or the ranks' deadline comes first. mpirun's part of the time is the
    kernel's: it goes on sending into a dead connection for minutes unless net.ipv4.tcp_retries2 says otherwise."""
    if not can_make_hosts():
        pytest.skip("needs root, network namespaces, and iproute2, util-linux, hostname and procps")
    timeout = 20 if first == "mpirun" else TIMEOUT
    keepalive = (2, 1, 2) if first == "mpirun" else (60, 10, 3)
    log_dir = tmp_path / "log"
    flags = {"train_data": texts / "train.txt", "log_dir": log_dir, **SMALL, "strategy": "zero3", "timeout": timeout}
    with Hosts(tmp_path) as hosts:
        if first == "deadline":
            for name in hosts.names.values():
                hosts.ip("netns", "exec", name, "sysctl", "-q", "-w", "net.ipv4.tcp_retries2=2")
        with Job(hosts.command(each, keepalive, PROGRAM, *words(flags)), log_dir, MPI_ENV) as job:
            job.wait_until(lambda: job.steps() >= 3)
            assert len(job.alive()) == 2 * each + 2  # mpirun and its daemon on beta
            hosts.ip("-n", hosts.names[cut], "link", "set", "link0", "down")
            code, error, _ = job.ends(timeout + PROMISE)
    assert code != 0
    happened = "failed" if first == "deadline" else "was asked to stop while it waited"
    said = re.search(rf"^train_gpt: rank \d of {2 * each} on alpha {happened}: {UNIT}, step \d+: [a-z -]+ of [\d.]+ "
                     rf"(?:bytes|MB): waited \d+ s for (.*) \(", error, re.M)
    assert said, error
    names = said[1].split("; in the end for ")[-1]
    assert re.findall(r"on (\w+)", names) and set(re.findall(r"on (\w+)", names)) == {"beta"}, error
