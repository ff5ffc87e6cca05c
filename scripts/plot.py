#!/usr/bin/env python3
"""Draws a trace (--trace STEP, LOG_DIR/trace.json) as a picture: what each rank's streams did when.

    python3 scripts/plot.py LOG_DIR/trace.json OUT.svg [--streams]

One line a rank with the passes of micro-batches through its stages: forward light, backward dark, later stages of a rank
in another hue; white is idle. --streams adds a line for each other stream that was used. Only the standard library is
used.
"""
import argparse
import json
import re
import sys

WIDTH, LEFT, TOP, ROW, GAP = 1000, 150, 34, 22, 6
HUES = [("#9ecbff", "#2166ac"), ("#b7e3a8", "#2d7d2d"), ("#ffd59e", "#b35806"), ("#dcc6f0", "#6a3d9a")]


def read(path):
    """Names of tracks by (rank, track), and spans."""
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    tracks = {(event["pid"], event["tid"]): event["args"]["name"] for event in events
              if event["ph"] == "M" and event["name"] == "thread_name"}
    return tracks, [event for event in events if event["ph"] == "X"]


def draw(tracks, spans, streams):
    ranks = sorted({span["pid"] for span in spans})
    used = {(span["pid"], span["tid"]) for span in spans}
    begin, end = min(span["ts"] for span in spans), max(span["ts"] + span["dur"] for span in spans)
    scale = (WIDTH - LEFT - 20) / (end - begin)
    out, y = [], TOP

    def rectangle(span, fill, y, text=""):
        x, width = LEFT + (span["ts"] - begin) * scale, max(span["dur"] * scale, 0.3)
        out.append(f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{ROW}" fill="{fill}" stroke="#fff" '
                   f'stroke-width="0.5"><title>{span["name"]}: {span["dur"] / 1e3:.3f} ms</title></rect>')
        if text and width > 7 * len(text):
            color = "#fff" if text[0] == "B" else "#000"
            out.append(f'<text x="{x + width / 2:.2f}" y="{y + 15}" font-size="10" text-anchor="middle" '
                       f'fill="{color}">{text}</text>')

    for rank in ranks:
        items, stages = [], set()
        for span in spans:
            found = re.fullmatch(r"([FB])(\d+), stage (\d+)", span["name"])
            if found and span["pid"] == rank:
                items.append((span, *found.groups()))
                stages.add(int(found.group(3)))
        stages = sorted(stages)
        label = f"rank {rank}, stage " + ", ".join(map(str, stages)) if stages else f"rank {rank}"
        out.append(f'<text x="{LEFT - 8}" y="{y + 15}" font-size="12" text-anchor="end">{label}</text>')
        out.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH - LEFT - 20}" height="{ROW}" fill="#f4f4f4"/>')
        for span, kind, micro, stage in items:
            light, dark = HUES[stages.index(int(stage)) % len(HUES)]
            rectangle(span, light if kind == "F" else dark, y, f"{kind}{micro}")
        if not items:
            for span in spans:
                if span["pid"] == rank and span["tid"] == 0:
                    rectangle(span, HUES[0][0], y)
        y += ROW + GAP
        for pid, track in sorted(used) if streams else []:
            if pid != rank or track == 0:
                continue
            out.append(f'<text x="{LEFT - 8}" y="{y + 15}" font-size="10" text-anchor="end" fill="#666">'
                       f'{tracks[pid, track]}</text>')
            for span in spans:
                if (span["pid"], span["tid"]) == (pid, track):
                    rectangle(span, "#c9c9c9", y)
            y += ROW + GAP
    total = (end - begin) / 1e3
    for i in range(5):
        x = LEFT + (WIDTH - LEFT - 20) * i / 4
        out.append(f'<text x="{x:.1f}" y="{y + 14}" font-size="11" text-anchor="middle">{total * i / 4:.1f} ms</text>')
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y + 24}" '
            f'viewBox="0 0 {WIDTH} {y + 24}" font-family="sans-serif">\n'
            f'<rect width="100%" height="100%" fill="#fff"/>\n'
            f'<text x="{LEFT}" y="20" font-size="13">F forward, B backward of a micro-batch; grey: idle</text>\n')
    return head + "\n".join(out) + "\n</svg>\n"


def main():
    parser = argparse.ArgumentParser(prog="plot.py")
    parser.add_argument("trace")
    parser.add_argument("out")
    parser.add_argument("--streams", action="store_true")
    arguments = parser.parse_args()
    try:
        tracks, spans = read(arguments.trace)
        if not spans:
            raise ValueError("holds no events")
        with open(arguments.out, "w") as file:
            file.write(draw(tracks, spans, arguments.streams))
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"plot.py: error: {arguments.trace}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
