#!/usr/bin/env bash
# Prepares English text to train on: OUT/train.txt and OUT/val.txt, the last tenth.
#
#   bash dev/data/english_text.sh OUT               the King James Bible, 4.2 MB, from the Debian package bible-kjv
#   bash dev/data/english_text.sh OUT --text FILE   a text file of yours
#
# Exit status 2: a package or a file is missing; the message says which.
set -euo pipefail
export LC_ALL=C # sizes are in bytes

fail() {
    echo "english_text.sh: $1" >&2
    exit 2
}

text=""
out="${1:-}"
[ -n "$out" ] && [ "${out#-}" = "$out" ] || fail "usage: english_text.sh OUT [--text FILE]"
if [ $# -gt 1 ]; then
    [ $# -eq 3 ] && [ "$2" = "--text" ] || fail "usage: english_text.sh OUT [--text FILE]"
    text="$3"
    [ -f "$text" ] && [ -r "$text" ] || fail "$text: is not a file that can be read"
fi

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

if [ -z "$text" ]; then
    bible="$(PATH="$PATH:/usr/bin:/usr/games" command -v bible)" ||
        fail "the text is in the package bible-kjv: apt-get install --no-install-recommends bible-kjv, or name a file with --text"
    text="$work/all.txt"
    # A line is "Ge1:1 In the beginning ...": the name goes, and an empty line parts the chapters.
    "$bible" -f gen1:1-rev22:21 </dev/null | sed -E -e '2,$s/^[^ ]+:1 /\n/' -e 's/^[^ ]+:[0-9]+ //' >"$text"
    [ "$(wc -c <"$text")" -gt 4000000 ] || fail "$bible did not print the whole text; name a file with --text"
fi

bytes="$(wc -c <"$text")"
[ "$bytes" -ge 10 ] || fail "$text: is too short: $bytes bytes"
split=$((bytes * 9 / 10))
# Not inside a UTF-8 character: its bytes after the first are 128 to 191.
for _ in 1 2 3; do
    byte="$(od -An -tu1 -j "$split" -N 1 "$text" | tr -d ' ')"
    if [ "${byte:-0}" -ge 128 ] && [ "${byte:-0}" -le 191 ]; then split=$((split + 1)); fi
done
head -c "$split" "$text" >"$work/train.txt"
tail -c "+$((split + 1))" "$text" >"$work/val.txt"
mkdir -p "$out"
mv -f "$work/train.txt" "$work/val.txt" "$out/"
echo "$out/train.txt: $split bytes; $out/val.txt: $((bytes - split)) bytes"
