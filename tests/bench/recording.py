"""Record `make up` on two nodes, one of which is killed, as a picture that moves: docker/kill.svg.

    python tests/bench/recording.py [--output docker/kill.svg]      # as root; make image comes first

The lines are those that `make up` prints, each at the time at which it came. Left out is what comes before the first
line of a rank: the image, the containers. A second terminal's command stands between them, marked with a $.
"""

import argparse
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ARGS = "--epochs 3 --name recording --fresh --report-every-s 1"
KILL_AFTER = "epoch 1:"
COMMAND = "$ kill -9 $(docker inspect -f '{{.State.Pid}}' rankup-node1-1)     # node 1, by root in a second terminal"
COLUMNS, ROWS = 118, 24
CHARACTER, LINE = 7.2, 17.0  # pixels, of a fixed-width font of 12 pixels
MARGIN = 12.0
HOLD_S = 6.0  # the end stays for so long before the picture begins anew

Line = tuple[float, str]  # seconds since the first one, and the text


def record() -> list[Line]:
    """Run the job, kill node 1's first process once, and return what was printed. Raises AssertionError if it fails."""
    lines: list[Line] = []
    began_s = 0.0

    def kill() -> None:
        inspect = ["docker", "inspect", "-f", "{{.State.Pid}}", "rankup-node1-1"]
        pid = int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
        lines.append((time.monotonic() - began_s, COMMAND))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(1.5, kill)  # in the middle of the second epoch
    job = subprocess.Popen(
        ["make", "up"], cwd=ROOT, env={**os.environ, "ARGS": ARGS}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert job.stdout is not None
    for text in job.stdout:
        if not lines and not text.startswith("[node"):
            continue
        began_s = began_s or time.monotonic()
        lines.append((time.monotonic() - began_s, text.rstrip()))
        if KILL_AFTER in text:
            killer.start()
    assert job.wait() == 0, "\n".join(text for _, text in lines)
    assert COMMAND in (text for _, text in lines)
    return lines


def draw(lines: Sequence[Line]) -> str:
    """The lines as an animated SVG, which shows its last screen where nothing may move."""
    cut = [(at_s, text if len(text) <= COLUMNS else f"{text[: COLUMNS - 3]}...") for at_s, text in lines]
    whole_s = cut[-1][0] + HOLD_S
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    styles, texts, scrolled = [], [], []
    for number, (at_s, text) in enumerate(cut):
        percent = 100 * at_s / whole_s
        moved = LINE * max(0, number + 1 - ROWS)
        scrolled.append(f"{percent:.2f}%{{transform:translateY({-moved:g}px)}}")
        if number < ROWS:  # later ones come into sight by the scrolling
            styles.append(f"@keyframes l{number}{{0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}}}")
        name = f' style="animation-name:l{number}"' if number < ROWS else ""
        kind = _kind(text)
        texts.append(f'<text class="{kind}"{name} y="{LINE * (number + 0.75):g}">{escape(text)}</text>')
    last = LINE * max(0, len(cut) - ROWS)
    scrolled.append(f"100%{{transform:translateY({-last:g}px)}}")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img">',
        "<title>make up on two nodes; node 1 is killed, comes back, and the run goes on</title>",
        "<style>",
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#c9d1d9}",
        ".typed{fill:#7ee787;font-weight:bold}.lost{fill:#ff7b72}.back{fill:#7ee787}",
        f"#all{{transform:translateY({-last:g}px)}}",
        "@media (prefers-reduced-motion:no-preference){",
        f"text,#all{{animation:{whole_s:.2f}s step-end infinite}}#all{{animation-name:scroll}}",
        f"@keyframes scroll{{{''.join(scrolled)}}}",
        *styles,
        "}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="6" fill="#0d1117"/>',
        f'<svg x="{MARGIN:g}" y="{MARGIN:g}" width="{COLUMNS * CHARACTER:g}" height="{ROWS * LINE:g}"><g id="all">',
        *texts,
        "</g></svg></svg>",
        "",
    ])


def _kind(text: str) -> str:
    if text.startswith("$ "):
        return "typed"
    if re.search(r"lost a peer|suspected|killed|\b137\b", text):
        return "lost"
    return "back" if re.search(r"resumed|rescued|digest", text) else "said"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "docker" / "kill.svg", help="the picture to write")
    output = parser.parse_args().output
    lines = record()
    output.write_text(draw(lines), encoding="utf-8")
    print(f"{output}: {len(lines)} lines, {lines[-1][0]:.0f} s, {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
