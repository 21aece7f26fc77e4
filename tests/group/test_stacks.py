"""The place of a thread, in a few words. tests/observe/test_stacks.py tests the files with stacks."""

import subprocess
import sys

import pytest

from rankup.group.stop import compare, in_phase, location_in

TORCH = "/usr/lib/python3/dist-packages/torch"


@pytest.mark.parametrize(("stack", "where"), [
    (
        [f'"{TORCH}/distributed/distributed_c10d.py", line 2810 in all_reduce',
         f'"{TORCH}/distributed/c10d_logger.py", line 83 in wrapper', '"/me/train.py", line 40 in main'],
        "all_reduce (train.py:40 main)",
    ),
    (  # torch's functions call each other: name the one that the program called
        [f'"{TORCH}/distributed/distributed_c10d.py", line 900 in _store_based_barrier',
         f'"{TORCH}/distributed/distributed_c10d.py", line 1700 in init_process_group',
         '"/me/train.py", line 3 in <module>'],
        "init_process_group (train.py:3 <module>)",
    ),
    (
        [f'"{TORCH}/utils/data/dataloader.py", line 741 in __next__',
         '"/me/rankup/loop/workers.py", line 57 in __next__', '"/me/train.py", line 40 in main'],
        "data: next of a DataLoader (train.py:40 main)",
    ),
    (['"/venv/lib/python3.12/site-packages/train/loop.py", line 8 in step'], "loop.py:8 step"),  # installed
])
def test_place_names_the_called_function_and_its_caller(stack: list[str], where: str) -> None:
    frames = "".join(f"  File {frame}\n" for frame in stack)
    other = 'Thread 0x7f00 (most recent call first):\n  File "/me/other.py", line 1 in look\n'
    text = f"{other}\nCurrent thread 0x7f01 (most recent call first):\n{frames}"
    assert location_in(text, "") == location_in(text, "0x7f01") == where
    assert location_in(text, "0x7f02") is None


LOOKS = """
import contextlib, gc, sys, threading, time
from rankup.group.stop import own_location

@contextlib.contextmanager
def inner():
    yield

def busy(depth):
    with inner():
        return depth and busy(depth - 1)

def look():
    global over
    for _ in range(100):
        own_location()
    over = True

over, watcher = False, threading.Thread(target=look)
gc.callbacks.append(lambda *_: threading.current_thread() is watcher and time.sleep(0.0001))
gc.set_threshold(1)
sys.setswitchinterval(1e-5)
watcher.start()
while not over and watcher.is_alive():
    busy(30)
sys.exit(not over)
"""


STARTS = """
import ctypes, sys, threading
from rankup.group.stop import own_location

function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: 0)
start, join = ctypes.CDLL(None).pthread_create, ctypes.CDLL(None).pthread_join
over = False

def start_in_c():
    thread = ctypes.c_ulong()
    while not over:
        start(ctypes.byref(thread), None, function, None)
        join(thread, None)

starters = [threading.Thread(target=start_in_c) for _ in range(3)]
for each in starters:
    each.start()
for _ in range(10_000):
    own_location()
over = True
"""


@pytest.mark.parametrize("beside", [LOOKS, STARTS], ids=["garbage is collected", "threads start in C"])
def test_own_place_is_found_while(beside: str) -> None:
    """Python 3.11 could read a frame or thread that was no longer or not yet valid, or hang forever."""
    done = subprocess.run([sys.executable, "-c", beside], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_ranks_in_the_same_place_share_a_line() -> None:
    assert compare({0: "a", 1: "a", 2: "b", 3: "a"}) == ["ranks 0-1, 3: a", "rank 2: b"]
    assert (in_phase("step", 412), in_phase("save", 412), in_phase("", 0)) == (" of step 413", " in save", "")
