"""Record `make up` on two nodes, one of which is killed, as an animated picture: docker/kill.svg.

    python bench/recording.py [--output docker/kill.svg]      # as root; make image comes first

The picture shows the lines of `make up`, without `[node0 r0/2]`, at their own times, from three seconds before the kill
to three seconds after the resume. Of the later lines only the most important are shown. A line that begins with $ is
the command of a second terminal. The picture follows the reader's color scheme, light or dark, and fits a phone.
"""

import argparse
import os
import re
import signal
import subprocess
import textwrap
import threading
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARGS = "--epochs 3 --name recording --fresh"
KILL_AFTER = "epoch 1:"
COMMAND = "$ kill -9 $(docker inspect -f '{{.State.Pid}}' rankup-node1-1)"
BEFORE_S, AFTER_S = 3.0, 3.0  # lines from this long before the kill to this long after the resume have their own times
LATER = re.compile(r"epoch \d|finished after|weights digest|^up: ")
LATER_S = 0.5  # between two later lines
UNSAID = re.compile(r"^(data|model|batch|ready|waiting|rank 0 of|the stacks|\[node1\]|node\d-1)")
COLUMNS, ROWS = 56, 19
CHARACTER, LINE = 7.2, 17.0  # pixels, of a fixed-width font of 12 pixels
MARGIN = 12.0
HOLD_S = 6.0  # the last screen stays for this time before the animation repeats

Line = tuple[float, str]  # seconds since the first one, and the text


def record() -> list[Line]:
    """Run the job, kill node 1's first process once, and return the printed lines. AssertionError if the job fails."""
    lines: list[Line] = []
    began_s = 0.0

    def kill() -> None:
        inspect = ["docker", "inspect", "-f", "{{.State.Pid}}", "rankup-node1-1"]
        pid = int(subprocess.run(inspect, capture_output=True, text=True, check=True).stdout)
        lines.append((time.monotonic() - began_s, COMMAND))
        os.kill(pid, signal.SIGKILL)

    killer = threading.Timer(1.5, kill)  # in the middle of the second epoch
    job = subprocess.Popen(["make", "up"], cwd=ROOT, env={**os.environ, "ARGS": ARGS}, text=True,
                           stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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


def abridged(lines: Sequence[Line]) -> list[Line]:
    """Return the lines to show. The docstring of this file describes them."""
    lines = [(at_s, text.removeprefix("[node0 r0/2] ")) for at_s, text in lines]
    killed_s = next(at_s for at_s, text in lines if text == COMMAND)
    resumed_s = next(at_s for at_s, text in lines if at_s > killed_s and text.startswith("resumed from"))
    from_s, to_s = killed_s - BEFORE_S, resumed_s + AFTER_S
    shown = [(at_s - from_s, text) for at_s, text in lines if from_s <= at_s <= to_s and not UNSAID.search(text)]
    later = ["...", *(text for at_s, text in lines if at_s > to_s and LATER.search(text))]
    return shown + [(to_s - from_s + LATER_S * (number + 1), text) for number, text in enumerate(later)]


def draw(lines: Sequence[Line]) -> str:
    """Return the wrapped lines as an animated SVG. Readers who turn animations off see its last screen."""
    cut = [(at_s, part, _kind(text)) for at_s, text in lines
           for part in textwrap.wrap(text, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)]
    whole_s = cut[-1][0] + HOLD_S
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, ROWS * LINE + 2 * MARGIN
    styles, texts, scrolled = [], [], []
    for number, (at_s, text, kind) in enumerate(cut):
        percent = 100 * at_s / whole_s
        moved = LINE * max(0, number + 1 - ROWS)
        scrolled.append(f"{percent:.2f}%{{transform:translateY({-moved:g}px)}}")
        if number < ROWS:  # scrolling shows later lines
            styles.append(f"@keyframes l{number}{{0%{{opacity:0}}{percent:.2f}%,100%{{opacity:1}}}}")
        name = f' style="animation-name:l{number}"' if number < ROWS else ""
        texts.append(f'<text class="{kind}"{name} y="{LINE * (number + 0.75):g}">{escape(text)}</text>')
    last = LINE * max(0, len(cut) - ROWS)
    scrolled.append(f"100%{{transform:translateY({-last:g}px)}}")
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="640" viewBox="0 0 {width:g} {height:g}" role="img">',
        "<title>make up on two nodes; node 1 is killed, comes back, and the run goes on</title>",
        "<style>",
        "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#c9d1d9}",
        "rect{fill:#0d1117;stroke:#3d444d}.typed{fill:#fff;font-weight:bold}.lost{fill:#ff7b72}.back{fill:#7ee787}",
        "@media (prefers-color-scheme:light){text{fill:#1f2328}rect{fill:#f6f8fa;stroke:#d1d9e0}",
        ".typed{fill:#000}.lost{fill:#cf222e}.back{fill:#116329}}",
        f"#all{{transform:translateY({-last:g}px)}}",
        "@media (prefers-reduced-motion:no-preference){",
        f"text,#all{{animation:{whole_s:.2f}s step-end infinite}}#all{{animation-name:scroll}}",
        f"@keyframes scroll{{{''.join(scrolled)}}}",
        *styles,
        "}</style>",
        f'<rect width="{width:g}" height="{height:g}" rx="6"/>',
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
    output.write_text(draw(abridged(lines)), encoding="utf-8")
    print(f"{output}: {len(lines)} lines, {lines[-1][0]:.0f} s, {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
