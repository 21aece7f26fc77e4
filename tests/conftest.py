"""Rules for all tests: a clean environment, no skipped tests in CI, and no process left behind."""

import ctypes
import gc
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from filelock import FileLock

from rankup.places.files import read_json
from tests.rigs import kubepods, own_venv, slurm_cluster
from tests.rigs.containers import clean_environment, docker, why_not
from tests.rigs.fork_server import Forks
from tests.rigs.jobs import FOREIGN, ROOT, environ_of
from tests.rigs.object_store import S3

IN_CI = os.environ.get("CI") == "true"
# These tests build and kill containers, which takes a quarter of an hour, 20 GB of disk and root
ENGINE_WANTED = bool(os.environ.get("RANKUP_ENGINE"))
# A test whose module or fixtures use one of these names may start a process
STARTERS = {
    "mutants", "subprocess", "multiprocessing", "mp", "forks", "Forks", "jobs", "Job", "start", "run", "ended",
    "s3", "S3", "image", "pods", "cluster", "Cluster", "docker", "Project", "namespaces",
}
# pytest-xdist's workers run the tests; the process that started the workers runs none
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
# Children inherit this variable, so that processes still alive at the end can be found, whatever started them
SESSION = "PYTEST_SESSION_OF_CHILDREN"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pure", action="store_true", help="only the tests that start no process: seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Prepare this process and its children: no launcher's variables, warnings are errors, one thread, one locale."""
    gc.disable()  # as rankup does: collections during the imports would find nothing to free
    keep = {"RANKUP_RUNS", "RANKUP_SEED"}
    if config.getoption("numprocesses", None) and not IS_WORKER:  # the workers also read RANKUP_ENGINE, and remove it
        keep.add("RANKUP_ENGINE")
    for name in [name for name in os.environ if FOREIGN.match(name) and name not in keep]:
        del os.environ[name]
    os.environ |= {"PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    # Precompiled headers only speed up later compilations. They cost more than the few compilations of the tests
    os.environ["TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"] = "0"
    if not IS_WORKER:
        os.environ[SESSION] = secrets.token_hex(8)
    # A shell starts its background jobs with Ctrl-C ignored. Children inherit that, and a shell can't undo it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup does the same to SIGHUP. A Python handler is not inherited: children get the default back, while the tests
    # themselves survive the end of their terminal
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda number, frame: None)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist's hook, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("pure"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_pure(item)])
        items[:] = [item for item in items if _is_pure(item)]
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))

    # Run the longest tests first, and files that start neither ranks nor a store last, so that all workers end at about
    # the same time. Tests in containers come after others, because CI builds the image meanwhile
    def place(item: pytest.Item) -> int:
        starts = {"Forks", "start", "S3"} & vars(getattr(item, "module", None) or object).keys()
        in_containers = {"image", "pods"} & {*getattr(item, "fixturenames", ())}
        order = (_group(item).startswith("slurm"), "tests/promises/" in item.nodeid, in_containers, starts, True)
        return next(number for number, here in enumerate(order) if here)

    items.sort(key=place)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    gc.freeze()
    gc.enable()


def _is_pure(item: pytest.Item) -> bool:
    """Return whether the test's file imports nothing that starts a process."""
    names = vars(getattr(item, "module", None) or object).keys()
    return not STARTERS & (names | {*getattr(item, "fixturenames", ())})


def _group(item: pytest.Item) -> str:
    """Return the test's group. One worker runs a group in order: its tests share a Slurm or a file's fixtures."""
    file = item.nodeid.split("::")[0]
    if {"cluster", "three"} & {*getattr(item, "fixturenames", ())}:
        return "slurm-ends" if file.endswith("/test_slurm_ends.py") else "slurm"
    return "loaded" if "loaded" in getattr(item, "fixturenames", ()) else file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """In CI count a skipped test as failed, unless it needs a GPU: a skipped test tests nothing, and nobody notices."""
    report: pytest.TestReport = yield  # type: ignore[assignment, misc]
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not item.get_closest_marker("gpu"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}. Have .ci/run install what the test needs."
    return report  # type: ignore[return-value]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    """Treat a file that skips itself on import the same way."""
    report: pytest.CollectReport = yield  # type: ignore[assignment, misc]
    if IN_CI and report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"skipped in CI: {report.longrepr}. Have .ci/run install what the tests need."
    return report  # type: ignore[return-value]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a process that the tests started is still running and does not end soon."""
    if IS_WORKER:
        return
    left = psutil.wait_procs(list(_children_left()), timeout=60)[1]
    if left:
        lines = "\n".join(f"  {process}" for process in left)
        print(f"\nprocesses left behind by the tests:\n{lines}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _children_left() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            ours = environ_of(process.pid).get(SESSION) == os.environ[SESSION]
            if ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


@pytest.fixture(scope="module", autouse=True)
def inherits_no_orphans() -> Iterator[None]:
    """Give up what an agent's code in this process has asked for. Otherwise it would inherit orphans of later tests,
    which it does not reap, and they would seem to run for ever."""
    yield
    ctypes.CDLL(None).prctl(36, 0, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


@pytest.fixture(scope="session", autouse=True)
def no_rescues_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the rescued copies of this session's jobs, which jobs that a test kills for good leave behind."""
    yield
    ours = str(tmp_path_factory.getbasetemp())
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        for state in place.glob(f"rankup-{os.getuid()}/*/step-*/state.json"):
            if read_json(state).get("config", {}).get("run_dir", "").startswith(ours):
                shutil.rmtree(state.parents[1], ignore_errors=True)


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Starts ranks in a third of a second; see tests/rigs/fork_server.py."""
    server = Forks(tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Like `forks`, from a process that has also imported the Trainers, which is slow. Their warnings are no errors."""
    packages = {"transformers": "transformers.trainer", "lightning": "lightning", "accelerate": "accelerate"}
    more = [module for package, module in packages.items() if find_spec(package)]
    server = Forks(tmp_path_factory.mktemp("loaded"), more=more, env={"PYTHONWARNINGS": "default"})
    yield server
    server.close()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], str]], str]:
    """`once(name, compute)` returns `compute()`, which only one of the test processes computes."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if IS_WORKER else base) / "once"
    folder.mkdir(exist_ok=True)

    def value(name: str, compute: Callable[[], str]) -> str:
        with FileLock(folder / f"{name}.lock"):
            if not (folder / name).exists():
                (folder / name).write_text(compute())
            return (folder / name).read_text()

    return value


@pytest.fixture(scope="session")
def wheel(once: Callable[[str, Callable[[], str]], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rankup's wheel, beside the folder `source` with the files from which it was built."""
    def build() -> str:
        folder = tmp_path_factory.mktemp("wheel")
        return str(own_venv.wheel(folder, source=own_venv.source(folder / "source")))

    return Path(once("wheel", build))


@pytest.fixture(scope="session")
def s3() -> Iterator[S3]:
    """A real S3 server."""
    for package in ("s3fs", "moto", "flask_cors"):
        pytest.importorskip(package)
    server = S3()
    yield server
    server.close()


@pytest.fixture(scope="session")
def image(once: Callable[[str, Callable[[], str]], str]) -> str:
    """The name of the image with this checkout's files, built if necessary. Skips unless RANKUP_ENGINE is set."""
    if not ENGINE_WANTED:
        pytest.skip("containers take a quarter of an hour and root: make engine runs these tests")
    if reason := why_not():
        pytest.skip(reason)
    name = "rankup:runtime"
    if not IN_CI and not docker("images", "-q", name).strip():
        pytest.skip(f"no image {name} here: make image builds it, a quarter of an hour and 12 GB the first time")

    def build() -> str:
        words, output = [ROOT / "docker" / "image.sh"], subprocess.PIPE
        with FileLock(Path(tempfile.gettempdir()) / "rankup-image.lock"):  # CI may be building the image
            done = subprocess.run(words, env=clean_environment(), text=True, stdout=output, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout
        return name

    return once("image", build)


@pytest.fixture(scope="session")
def slurm() -> Iterator[slurm_cluster.Cluster]:
    """A real Slurm of two nodes, started by slurm/local.sh."""
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    made = slurm_cluster.Cluster()
    try:
        made.local("up")
        yield made
    finally:
        made.close()


@pytest.fixture
def cluster(slurm: slurm_cluster.Cluster) -> Iterator[slurm_cluster.Cluster]:
    """The Slurm of two nodes. Before and after the test wait until nothing runs on any node."""
    slurm.idle()
    yield slurm
    slurm.idle()


@pytest.fixture
def pods(tmp_path: Path, image: str) -> Iterator[Callable[..., kubepods.Cluster]]:
    """A function that makes a kubepods.Cluster. Its containers and networks are always removed."""
    made: list[kubepods.Cluster] = []

    def make(what: str, settings: Sequence[str] = ()) -> kubepods.Cluster:
        made.append(kubepods.Cluster(tmp_path / f"cluster-{len(made)}", what, settings))
        return made[-1]

    yield make
    for cluster in made:
        cluster.remove()
