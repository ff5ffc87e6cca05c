"""configs/ and the figures that they publish: the formulas, the plan and runs say the same; reproduce.sh, ladder.sh."""
import importlib.util
import itertools
import json
import subprocess

import pytest

from conftest import ROOT, environment, run_program

specification = importlib.util.spec_from_file_location("expected", ROOT / "dev/expected.py")
formulas = importlib.util.module_from_spec(specification)
specification.loader.exec_module(formulas)

CONFIGS = {path.name: json.loads(path.read_text()) for path in sorted((ROOT / "configs").glob("*.json"))}
PUBLISHING = {name: config for name, config in CONFIGS.items() if config.get("published", {}).get("cases")}
CASES = [(name, number) for name, config in PUBLISHING.items() for number in range(len(config["published"]["cases"]))]
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "send", "recv", "scalars")


def script(name, *arguments, timeout=300):
    return subprocess.run(["bash", str(ROOT / "scripts" / name), *map(str, arguments)], env=environment(),
                          timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def planned(config, tmp_path, ranks, flags):
    words = [f"--{key.replace('_', '-')}={str(value).lower() if isinstance(value, bool) else value}"
             for key, value in flags.items()]
    process = run_program(config, "--plan", "--world-size", ranks, "--plan-json", tmp_path / "plan.json", *words)
    assert process.returncode == 0, process.stderr
    return json.loads((tmp_path / "plan.json").read_text())


def assert_plan_is(plan, memory, communication):
    """The plan of one strategy has these bytes and these collectives, and no others."""
    got = plan["memory_bytes"]
    state = got["parameters"] + got["gradients"] + got["optimizer"]
    assert dict(got, model_state=state, peak_less_workspace=got["peak"] - got["workspace"]).items() >= memory.items()
    nothing = {"calls": 0, "payload_bytes": 0, "bus_bytes": 0}
    assert plan["communication_per_step"] == {kind: communication.get(kind, nothing) for kind in KINDS}


def test_there_is_a_configuration_of_every_size():
    assert set(PUBLISHING) >= {"ladder.json", "gpt2_124M.json", "gpt2_1558M.json", "gpt3_6.7B.json", "gpt3_13B.json",
                               "gpt3_175B.json"}
    for config in PUBLISHING.values():
        assert set(config["published"]["cases"][0]["expected"]) == {"ddp", "zero1", "zero2", "zero3"}


@pytest.mark.parametrize("name", PUBLISHING)
def test_configurations_publish_what_the_formulas_give(name):
    assert formulas.differences(PUBLISHING[name]) == []


@pytest.mark.parametrize("name,number", CASES)
def test_model_state_and_volume_are_those_of_the_table(name, number):
    """16, 4 + 12/N, 2 + 14/N and 16/N bytes a parameter; 2S, 2S, and 3S less wpe's gather in backward."""
    case = PUBLISHING[name]["published"]["cases"][number]
    run = formulas.Run(PUBLISHING[name], case.get("flags", {}), case["world_size"])
    if run.param_bytes == 4:
        assert name == "gpt2_124M.json" and case["world_size"] == 1
        return
    padded, wpe, n, group = sum(formulas.units(run)), formulas.units(run)[1], run.ranks, run.shard_group
    state = {"ddp": 16 * padded, "zero1": 4 * padded + 12 * padded // n, "zero2": 2 * padded + 14 * padded // n,
             "zero3": 16 * padded // group}
    for strategy, expected in case["expected"].items():
        assert expected["memory_bytes"]["model_state"] == state[strategy]
        bus = {kind: count["bus_bytes"] for kind, count in expected["communication_per_step"].items()}
        micro = run.micro_batches
        if strategy == "ddp":
            assert bus.get("all_reduce", 0) * n == 2 * 2 * padded * (n - 1)
        elif strategy == "zero3":
            inside = micro * (3 * padded - wpe)
            assert (bus["reduce_scatter"] + bus["all_gather"]) * group == 2 * inside * (group - 1)
            assert bus.get("all_reduce", 0) * (n // group) == 2 * (2 * padded // group) * (n // group - 1)
        else:
            passes = 1 + (micro if strategy == "zero2" else 1)
            assert (bus["reduce_scatter"] + bus["all_gather"]) * n == passes * 2 * padded * (n - 1)


OPTIONS = [
    dict(precision="fp32"),
    dict(precision="bf16", gradient_dtype="fp32", tokens_per_step=0, recompute="full"),
    dict(precision="bf16", master_weights=False, dropout=0.1, classifier_chunks=3),
    dict(precision="bf16", prefetch=0, n_embd=33, n_head=3, vocab_size=1000),
    dict(precision="bf16", prefetch=3, micro_batch=1, n_layer=2),
    dict(precision="bf16", prefetch=9, micro_batch=1, n_layer=1, context_length=300, sequence_length=10),
    dict(precision="fp32", reshard_after_forward=False, prefetch=2, n_layer=5),
]


@pytest.mark.parametrize("options,ranks,micro_batches", itertools.product(OPTIONS, [2, 3, 7, 64], [1, 3]))
def test_the_plan_is_what_the_formulas_give(tmp_path, options, ranks, micro_batches):
    """Two derivations of the same bytes and collectives, over options, ranks that divide nothing, and micro-batches."""
    shape = dict(n_layer=4, n_head=4, n_embd=64, context_length=24, vocab_size=256, micro_batch=2)
    flags = {**shape, **options}
    tokens = flags["micro_batch"] * flags.get("sequence_length", flags["context_length"])
    flags["tokens_per_step"] = tokens * ranks * micro_batches
    plan = planned(ROOT / "configs/ladder.json", tmp_path, ranks, flags)
    run = formulas.Run(CONFIGS["ladder.json"], flags, ranks)
    assert plan["parameters"] == formulas.parameters(run)
    assert plan["padded_parameters"] == sum(formulas.units(run))
    for strategy in formulas.SHARDED:
        assert_plan_is(plan[strategy], formulas.memory(run, strategy), formulas.communication(run, strategy))


@pytest.mark.parametrize("ranks,group", [(4, 2), (6, 3), (6, 1), (12, 4)])
def test_the_plan_of_groups_is_what_the_formulas_give(tmp_path, ranks, group):
    flags = dict(strategy="zero3", shard_group=group, micro_batch=1, tokens_per_step=64 * ranks * 2)
    plan = planned(ROOT / "configs/ladder.json", tmp_path, ranks, flags)
    run = formulas.Run(CONFIGS["ladder.json"], flags, ranks)
    assert_plan_is(plan["zero3"], formulas.memory(run, "zero3"), formulas.communication(run, "zero3"))


def test_reproduce_plans_every_configuration():
    process = script("reproduce.sh", "--plan-only")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "every byte and every collective is as published" in process.stdout
    for name, config in PUBLISHING.items():
        assert process.stdout.count(f"configs/{name}: ") >= len(config["published"]["cases"])


def test_reproduce_runs_the_small_one():
    process = script("reproduce.sh", "--steps", 2, ROOT / "configs/ladder.json")
    assert process.returncode == 0, process.stdout + process.stderr
    assert "7 strategies run, 0 only planned" in process.stdout
    assert process.stdout.count("measured") == 2 * 7


def changed(tmp_path, change):
    config = json.loads((ROOT / "configs/ladder.json").read_text())
    change(config, config["published"])
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("plan_only", [True, False])
def test_reproduce_names_a_wrong_byte_and_a_wrong_collective(tmp_path, plan_only):
    def change(config, published):
        published["cases"] = [published["cases"][2]]
        expected = published["cases"][0]["expected"]
        expected["zero2"]["memory_bytes"]["gradients"] += 1
        del expected["zero3"]["communication_per_step"]["all_gather"]

    path = changed(tmp_path, change)
    process = script("reproduce.sh", *["--plan-only"] * plan_only, "--steps", 2, path)
    assert process.returncode == 1
    found = [line for line in process.stdout.splitlines() if line.startswith("NOT REPRODUCED")]
    assert len(found) == 4 * (1 if plan_only else 2)  # a byte; calls, payload and bus bytes
    for what in ["planned"] if plan_only else ["planned", "measured"]:
        for message in [f"zero2, {what}: memory_bytes.gradients: expected 417409 bytes, got 417408",
                        f"zero3, {what}: communication_per_step.all_gather.calls: expected 0, got 52"]:
            assert any(message in line for line in found), message
    assert f"{len(found)} differences" in process.stdout


def test_reproduce_judges_figures_of_others_and_names_runs_that_fail(tmp_path):
    def change(config, published):
        what = {"what": "zero3.model_state_bytes", "unit": "GB", "world_size": 64, "flags": {"plan_parameters": 7.5e9}}
        published["figures"] = [{**what, "value": value, "tolerance": tolerance, "source": source, "note": ""}
                                for value, tolerance, source in [(1.88, 0.01, "good"), (1.86, 0.01, "off"),
                                                                 (99, None, "unjudged")]]
        published["cases"] = [published["cases"][1]]
        published["cases"][0]["flags"]["shard_group"] = 3

    process = script("reproduce.sh", changed(tmp_path, change))
    assert process.returncode == 1
    found = [line for line in process.stdout.splitlines() if line.startswith("NOT REPRODUCED")]
    assert len(found) == 2 and "off has 1.86 GB, tolerance 0.01; planned 1.875" in found[0]
    assert "exit code 2" in found[1] and "shard_group" in found[1]


def test_a_file_without_figures_is_not_reproduced():
    process = script("reproduce.sh", ROOT / "configs/quickstart.json")
    assert process.returncode == 1 and "has no published.cases" in process.stdout


def rungs(stdout):
    """The ladder's rows by name: the cells after it."""
    names = ["ddp", "zero1", "zero2", "zero3, groups of 2", "zero3"]
    rows = {}
    for line in stdout.splitlines():
        name = next((name for name in names if line.startswith(name)), None)
        if name:
            rows[name] = line[len(name):].split()
    return rows


def test_the_ladder():
    process = script("ladder.sh", "--steps", 3)
    assert process.returncode == 0, process.stdout + process.stderr
    rows = rungs(process.stdout)
    assert len(rows) == 5
    for name, bytes_a_parameter, sent in [("ddp", "16.0000", "2.0000"), ("zero1", "7.0000", "2.0000"),
                                          ("zero2", "5.5000", "2.0000"), ("zero3", "4.0000", "2.9902"),
                                          ("zero3, groups of 2", "8.0000", "2.9902+1.00")]:
        assert rows[name][2:4] == [bytes_a_parameter] * 2 and rows[name][6:8] == [sent] * 2
    whole = [rows[name] for name in ("ddp", "zero1", "zero2", "zero3")]
    assert len({row[-1] for row in whole}) == 1 and len(whole[0][-1]) == 16
    assert len({row[-2] for row in whole}) == 1


@pytest.mark.full
def test_the_ladder_sees_parameters_that_differ(tmp_path):
    """With several micro-batches zero2 and zero3 sum in another order: other bits than ddp's."""
    process = script("ladder.sh", "--steps", 20, changed(tmp_path, lambda config, published: config["batch"].update(
        micro_batch=1, tokens_per_step=1024)))
    assert process.returncode == 1 and "the strategies end with different parameters" in process.stdout


@pytest.mark.full
def test_reproduce_everything():
    process = script("reproduce.sh", timeout=1800)
    assert process.returncode == 0, process.stdout + process.stderr
