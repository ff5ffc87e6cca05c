"""The number of threads is what OpenMP grants: fewer than wanted are slower, and nothing of the work is left undone."""
import os
import re

import pytest

CORES = len(os.sched_getaffinity(0))
MODEL = dict(n_layer=2, n_embd=64, micro_batch=4, precision="fp32", steps=3)


@pytest.mark.parametrize("env,threads", [
    ({"OMP_THREAD_LIMIT": "1"}, 1),
    ({"OMP_NUM_THREADS": "8", "OMP_THREAD_LIMIT": "3"}, 3),
    ({"OMP_NUM_THREADS": str(CORES + 1), "OMP_DYNAMIC": "true"}, CORES + 1),
    ({"OMP_NUM_THREADS": "2", "OMP_MAX_ACTIVE_LEVELS": "0"}, 2),
])
def test_threads_are_those_that_come(train, env, threads):
    limited, plain = train(**MODEL, env=env), train(**MODEL, env={"OMP_NUM_THREADS": str(threads)})
    for run in (limited, plain):
        assert re.search(rf"\b{threads} threads? a rank", run.stdout)
    assert limited.summary["params_hash"] == plain.summary["params_hash"]
