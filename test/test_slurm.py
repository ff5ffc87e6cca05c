"""scripts/slurm/train_gpt.sbatch on a real SLURM: munge, slurmctld and a slurmd a node, on this machine (test/slurm/).

The nodes can send 20 Mbit/s each. That is how a tiny model takes a known time at least, on however fast a machine.
"""
import math
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from conftest import PROGRAM, ROOT, Run, environment, run_program

full = pytest.mark.full
SCRIPT = ROOT / "scripts/slurm/train_gpt.sbatch"
NEEDED = ("slurmctld", "slurmd", "sbatch", "munged", "unshare", "nsenter", "ip", "tc")
RATE_BYTES = 20e6 / 8  # a second, that a node can send
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

CONFIG = """{
 "model": {"n_layer": 2, "n_head": 2, "n_embd": 32, "context_length": 32, "vocab_size": 257, "dropout": 0.1},
 "data": {"train_data": "%(train)s", "val_data": "%(val)s"},
 "batch": {"micro_batch": 2}, "parallel": {"strategy": "zero1"}, "numerics": {"precision": "fp32"},
 "optimizer": {"learning_rate": 3e-4, "min_learning_rate": 3e-5, "warmup_steps": 10},
 "run": {"steps": 100, "val_every": 40, "val_steps": 2, "timeout": 60}}
"""


def why_not():
    """Why no SLURM can be started here; None if one can."""
    if os.geteuid() != 0:
        return "only root can start SLURM's daemons"
    missing = [name for name in NEEDED if shutil.which(name, path=environment()["PATH"] + ":/usr/sbin:/sbin") is None]
    if missing:
        return f"not installed: {', '.join(missing)} (scripts/install.sh slurm)"
    probe = ("ip link add nodes type bridge && ip link add to1 type veth peer name to2 && ip link set lo up &&"
             "tc qdisc add dev to1 root tbf rate 1mbit burst 64kb latency 50ms && mount -t tmpfs tmpfs /dev/shm")
    process = subprocess.run(["unshare", "--pid", "--fork", "--mount", "--net", "--uts", "--ipc", "sh", "-c", probe],
                             capture_output=True, text=True)
    return f"no namespaces, bridges or rate limits here: {process.stderr.strip()}" if process.returncode else None


class Cluster:
    """A SLURM cluster that ends with this object, or with this process."""

    def __init__(self, folder, nodes, **settings):
        self.folder = folder
        self.env = environment({"SLURM_CONF": str(folder / "slurm.conf"),
                                **{f"CLUSTER_{key.upper()}": str(value) for key, value in settings.items()}})
        self.env["PATH"] += ":/usr/sbin:/sbin"
        self.begin = time.monotonic()
        # `cat` reads from this process, so the cluster's first process ends when this one does.
        self.process = subprocess.Popen(["bash", str(ROOT / "test/slurm/cluster.sh"), str(folder), str(nodes), "cat"],
                                        stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.env)
        while not (folder / "pid").exists():
            assert self.process.poll() is None, self.process.stderr.read()
            time.sleep(0.05)
        self.pid = int((folder / "pid").read_text())
        self.names = os.readlink(f"/proc/{self.pid}/ns/pid")

    def processes(self, word=""):
        """Those of the cluster whose command line has the word, by the numbers that they have outside."""
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(path / "ns/pid") == self.names and word in (path / "cmdline").read_text():
                    found.append(int(path.name))
            except OSError:
                pass  # it has ended
        return found

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)
        assert self.processes() == []

    def run(self, *command, cwd=ROOT, env=None):
        enter = ["nsenter", "-t", str(self.pid), "-m", "-p", "-n", "-u", "-i", "-r", f"--wd={cwd}"]
        process = subprocess.run([*enter, *map(str, command)], env={**self.env, **(env or {})}, capture_output=True,
                                 text=True, timeout=60)
        assert process.returncode == 0, process.stderr
        return process.stdout

    def submit(self, options, *arguments, output, cwd=ROOT, env=None):
        return int(self.run("sbatch", "--parsable", f"--output={output}", *options, SCRIPT, *arguments, cwd=cwd,
                            env=env))

    def job(self, number):
        text = self.run("scontrol", "-o", "show", "job", number)
        return {key: re.search(rf"\b{key}=(\S*)", text)[1] for key in ("JobState", "ExitCode", "Restarts", "NodeList")}

    def wait(self, number, output, timeout=240):
        deadline = time.monotonic() + timeout
        while (job := self.job(number))["JobState"] not in ENDED:
            assert time.monotonic() < deadline, f"{job}\n{text_of(output)}"
            time.sleep(0.2)
        return job

    def wait_for(self, condition, output, timeout=120):
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, text_of(output)
            time.sleep(0.05)


def text_of(path):
    return path.read_text() if path.exists() else ""


@pytest.fixture(scope="module")
def start():
    """start(folder, nodes, setting=value, ...): a cluster, taken down after the last test."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    clusters = []

    def run(folder, nodes, **settings):
        folder.mkdir()
        clusters.append(Cluster(folder, nodes, **settings))
        return clusters[-1]

    yield run
    for cluster in clusters:
        cluster.close()


@pytest.fixture(scope="module")
def cluster(start, tmp_path_factory):
    return start(tmp_path_factory.mktemp("slurm") / "cluster", 2, rate="20mbit", cpus=8)


@pytest.fixture(scope="module")
def config(texts, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "tiny.json"
    path.write_text(CONFIG % {"train": texts / "train.txt", "val": texts / "val.txt"})
    return path


@pytest.fixture(scope="module")
def undisturbed(config, tmp_path_factory):
    """undisturbed(steps): what the run of four ranks of this machine wrote, without SLURM, in one go."""
    made = {}

    def run(steps):
        if steps not in made:
            log_dir = tmp_path_factory.mktemp("undisturbed") / "log"
            process = run_program(config, "--nproc", 4, "--steps", steps, "--log-dir", log_dir)
            assert process.returncode == 0, process.stderr
            made[steps] = Run(process, log_dir)
        return made[steps]

    return run


class Log:
    """What a job's run left."""

    def __init__(self, log_dir):
        self.log_dir = log_dir

    summary, metrics = Run.summary, Run.metrics


def curve(run):
    keys = ("step", "loss", "grad_norm", "lr", "val_loss")
    return [{key: line[key] for key in keys if key in line} for line in run.metrics], run.summary["params_hash"]


TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")

LIMITED_STEPS = 120


@pytest.fixture(scope="module")
def limited(cluster, config, tmp_path_factory):
    """A job that meets its time limit, submitted: its number, output and log directory. Other tests run meanwhile.

    SLURM looks at time limits every 30 seconds, and signals up to that much early. With a limit of a minute the first
    look after the job's start does: so that it comes in the middle, the job is to begin 13 seconds before one. In a
    step each of the four ranks sends the two of the other node their quarters of its gradients, then its quarter of the
    parameters to both: a node sends 0.32 MB, which takes 0.13 s, and all steps take 15 s or more. How much more does
    not matter: the job is signalled and requeued until they are done.
    """
    folder = tmp_path_factory.mktemp("limited")
    output, log_dir = folder / "job.out", folder / "log"
    delay = 17 - (time.monotonic() - cluster.begin) % 30
    begin = () if 0 <= delay < 1 else (f"--begin=now+{math.floor(delay % 30)}",)
    number = cluster.submit([*TWO_BY_TWO, *begin, "--time=1", "--signal=B:USR1@55"], config, "--steps", LIMITED_STEPS,
                            "--log-dir", log_dir, "--checkpoint-every", 1000, output=output)
    return number, output, log_dir


# A program that says what it was given, and does what its flags ask for. As train_gpt it writes to the log directory.
STAND_IN = r"""#!/usr/bin/env bash
log_dir='' words=("$@")
while [ $# -gt 0 ]; do
  case $1 in --log-dir) log_dir=$2 ;; --stand_in_*) declare "${1#--stand_in_}=$2" ;; esac
  shift
done
echo "task $SLURM_PROCID sees ${CUDA_VISIBLE_DEVICES:-no GPU}; ${words[*]}"
if [ "${save:-no}" = yes ]; then mkdir -p "$log_dir"; echo step_00000001 >"$log_dir/latest"; fi
exit "${code:-0}"
"""


@pytest.fixture
def stand_in(tmp_path):
    path = tmp_path / "stand_in"
    path.write_text(STAND_IN)
    path.chmod(0o755)
    return {"TRAIN_GPT": str(path)}


@pytest.mark.usefixtures("limited")
def test_tasks_see_the_gpus_that_were_asked_for(cluster, stand_in, tmp_path):
    jobs = []
    for name, options in (("node", ("--gpus-per-node=2",)), ("task", ("--gpus-per-task=1", "--cpus-per-task=2")),
                          ("none", ())):
        output = tmp_path / f"{name}.out"
        jobs.append((cluster.submit([*TWO_BY_TWO, *options], "--x", output=output, env=stand_in), name, output))
    for job, name, output in jobs:
        assert cluster.wait(job, output)["JobState"] == "COMPLETED", text_of(output)
        tasks = sorted(re.findall(r"task (\d) sees (.*); ", text_of(output)))
        gpus = {"node": ["0,1"] * 4, "task": ["0", "1"] * 2, "none": ["no GPU"] * 4}[name]
        assert tasks == [(str(r), gpus[r]) for r in range(4)], text_of(output)
        # Only where a node binds tasks to cores would it show in them.
        assert ("--cpus-per-task=2" in re.search("^srun .*", text_of(output), re.M)[0]) == (name == "task")
        assert "they meet at node1:" in text_of(output)


def test_what_the_script_adds(cluster, stand_in, tmp_path):
    (tmp_path / "plain.json").write_text('{"run": {"steps": 3}}')
    (tmp_path / "full.json").write_text('{"run": {"log_dir": "logs/a b"},\n"checkpoint":\n {"checkpoint_every" : 7 ,'
                                        ' "resume": "some/step_00000003"}}')
    cases = (
        ((), ["plain.json"], "plain.json --log-dir runs/plain --checkpoint-every 200 --resume auto"),
        (("-J", "big"), ["plain.json", "--seed", "1"],
         "plain.json --log-dir runs/big --checkpoint-every 200 --resume auto --seed 1"),
        ((), ["full.json"], "full.json"),
        ((), ["plain.json", "--log-dir=x", "--checkpoint-every", "5", "--resume", "y"],
         "plain.json --log-dir=x --checkpoint-every 5 --resume y"),
        ((), ["--preset", "gpt2-124M"],
         "--log-dir runs/train_gpt --checkpoint-every 200 --resume auto --preset gpt2-124M"),
    )
    outputs = [tmp_path / f"{i}.out" for i in range(len(cases))]
    jobs = [cluster.submit(options, *arguments, output=output, cwd=tmp_path, env=stand_in)
            for output, (options, arguments, _) in zip(outputs, cases)]
    for job, output, (_, _, expected) in zip(jobs, outputs, cases):
        assert cluster.wait(job, output)["JobState"] == "COMPLETED", text_of(output)
        assert re.search("; (.*)", text_of(output).split("\ntask 0")[1])[1] == expected


def test_what_is_requeued(cluster, stand_in, tmp_path):
    cases = (
        # exit code, whether it saves, the restarts that are allowed: how the job ends, after how many restarts
        (2, True, 10, "FAILED", "2:0", 0),
        (1, False, 10, "FAILED", "1:0", 0),
        (75, False, 0, "FAILED", "75:0", 0),
        (1, True, 0, "FAILED", "1:0", 0),
        (1, True, 1, "FAILED", "1:0", 1),
    )
    outputs = [tmp_path / f"{i}.out" for i in range(len(cases))]
    jobs = [cluster.submit((), "--log-dir", tmp_path / f"log{i}", "--stand_in_code", code, "--stand_in_save",
                           "yes" if save else "no", output=outputs[i],
                           env={**stand_in, "TRAIN_GPT_RESTARTS": str(allowed)})
            for i, (code, save, allowed, *_) in enumerate(cases)]
    for job, output, (*_, state, code, restarts) in zip(jobs, outputs, cases):
        found = cluster.wait(job, output)
        assert [found[key] for key in ("JobState", "ExitCode", "Restarts")] == [state, code, str(restarts)], found
    # What has been requeued is told to go on from its own checkpoints, whatever it was to begin with.
    starts = re.findall("^srun .*", text_of(outputs[4]), re.M)
    assert [line.count("--resume auto") for line in starts] == [1, 2]


def test_bad_input_ends_the_job(cluster, config, tmp_path):
    output = tmp_path / "job.out"
    job = cluster.wait(cluster.submit(TWO_BY_TWO, config, "--n-layer", "0", "--log-dir", tmp_path / "log",
                                      output=output), output)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    errors = [line for line in text_of(output).splitlines() if line.startswith("train_gpt: error:")]
    assert len(errors) == 1 and "n_layer" in errors[0], text_of(output)
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("how, state", [((), "CANCELLED"), (("--signal=TERM", "--batch"), "FAILED")])
def test_a_job_that_is_cancelled_saves_and_ends(cluster, config, tmp_path, how, state):
    output, log_dir = tmp_path / "job.out", tmp_path / "log"
    number = cluster.submit(TWO_BY_TWO, config, "--steps", 100000, "--log-dir", log_dir, output=output)
    cluster.wait_for(lambda: "step  " in text_of(output), output)
    cluster.run("scancel", *how, number)
    job = cluster.wait(number, output)
    cluster.wait_for(lambda: cluster.processes(str(log_dir)) == [], output)
    assert (job["JobState"], cluster.job(number)["Restarts"]) == (state, "0")
    stopped = re.search(r"stopped by a signal after step (\d+)", text_of(output))
    assert (log_dir / "latest").read_text().strip() == f"step_{int(stopped[1]):08d}"


def test_a_run_goes_on_after_the_time_limit(cluster, limited, undisturbed):
    number, output, log_dir = limited
    expected = undisturbed(LIMITED_STEPS)
    job = cluster.wait(number, output)
    text = text_of(output)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0"), text
    # As often as SLURM has asked, and each part begins where the one before was stopped. (On a machine that is so slow
    # that it is asked before the ranks listen, nothing is saved, and the part is begun again.)
    stopped = [int(step) for step in re.findall(r"stopped by a signal after step (\d+) of", text)]
    resumed = [int(step) for step in re.findall(r"^resumed .* after step (\d+);", text, re.M)]
    assert 1 <= len(stopped) <= int(job["Restarts"]) and stopped == sorted(set(resumed)), text
    assert 0 < stopped[0] < LIMITED_STEPS
    assert text.count("SIGUSR1: the ranks are to save") == int(job["Restarts"])
    assert curve(Log(log_dir)) == curve(expected)


def ranks(cluster, log_dir):
    """The ranks' process numbers: srun and the script have the same words on their command lines."""
    found = []
    for pid in cluster.processes(str(log_dir)):
        try:
            if os.readlink(f"/proc/{pid}/exe") == str(PROGRAM):
                found.append(pid)
        except OSError:
            pass  # it has ended
    return found


@full
def test_a_run_goes_on_after_a_rank_was_killed(cluster, config, undisturbed, tmp_path):
    output, log_dir, steps = tmp_path / "job.out", tmp_path / "log", 60
    number = cluster.submit(TWO_BY_TWO, config, "--steps", steps, "--log-dir", log_dir, "--checkpoint-every", 10,
                            output=output)
    cluster.wait_for((log_dir / "latest").exists, output)
    os.kill(random.choice(ranks(cluster, log_dir)), signal.SIGKILL)
    job = cluster.wait(number, output)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), text_of(output)
    assert curve(Log(log_dir)) == curve(undisturbed(steps))


@full
@pytest.mark.parametrize("lost", ["of the script", "of other ranks"])
def test_a_run_goes_on_after_a_node_was_lost(start, config, undisturbed, tmp_path, lost):
    cluster = start(tmp_path / "cluster", 3, rate="20mbit", cpus=2, timeout=5)
    output, log_dir, steps = tmp_path / "job.out", tmp_path / "log", 60
    number = cluster.submit(TWO_BY_TWO, config, "--steps", steps, "--log-dir", log_dir, "--checkpoint-every", 10,
                            output=output)
    cluster.wait_for((log_dir / "latest").exists, output)
    node = "node1" if lost == "of the script" else "node2"
    daemon, = cluster.processes(f"slurmd\0-D\0-c\0-N\0{node}\0")
    network = os.readlink(f"/proc/{daemon}/ns/net")
    for pid in cluster.processes():
        try:
            if os.readlink(f"/proc/{pid}/ns/net") == network:
                os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended
    job = cluster.wait(number, output)
    assert (job["JobState"], job["ExitCode"]) == ("COMPLETED", "0:0") and int(job["Restarts"]) >= 1, text_of(output)
    assert node not in cluster.run("scontrol", "show", "hostnames", job["NodeList"]).split()
    assert curve(Log(log_dir)) == curve(undisturbed(steps))


@full
def test_the_network_is_what_limits_a_step(cluster, config, tmp_path):
    """Each node holds two of four ranks. Whatever the order, half of the gradients' sums have to be completed with what
    the other node has, and each node needs the half of the parameters that the other has: once in a step under zero1,
    twice under zero3."""
    times = {}
    for strategy in ("zero1", "zero3"):
        output, log_dir = tmp_path / f"{strategy}.out", tmp_path / strategy
        number = cluster.submit(TWO_BY_TWO, config, "--steps", 40, "--strategy", strategy, "--val-every", 0,
                                "--log-dir", log_dir, output=output)
        assert cluster.wait(number, output)["JobState"] == "COMPLETED", text_of(output)
        summary = Log(log_dir).summary
        counted = summary["communication_per_step"]
        halves = sum(counted[kind]["payload_bytes"] for kind in ("reduce_scatter", "all_gather")) / 2
        times[strategy] = summary["step_ms"]["median"] / 1e3
        assert times[strategy] > halves / RATE_BYTES, summary
    assert times["zero3"] > 1.2 * times["zero1"], times  # 3 units of traffic instead of 2
