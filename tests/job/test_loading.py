"""Batches that are loaded again, or on the training's own random state, are those of an undisturbed run, or one line
says that they are not."""

import signal
from pathlib import Path

import pytest

from tests.job.test_loop import ran, said
from tests.rigs.fork_server import Forks

# Everything that draws random numbers to load a batch in the training's process, and code outside of steps that draws
# them too. `seen` holds all that was drawn for steps
DRAWS = """
import os, random, numpy, torch, rankup
from torch.utils.data import DataLoader, IterableDataset

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return random.random() + numpy.random.rand() + torch.rand(()).item() + index

class Stream(IterableDataset):
    def __iter__(self):
        return (torch.rand(()).item() + index for index in range(12))

class Lazy:  # a sampler that draws while the workers already load
    def __len__(self):
        return 12
    def __iter__(self):
        return (random.randrange(1000) for _ in range(12))

def collate(samples):
    return torch.tensor(samples) + torch.rand(len(samples))

job, seen = rankup.init('run'), []
job.track(seen=seen)
loader = KIND
for epoch in job.epochs(int(os.environ.get('EPOCHS', '2'))):
    order = torch.randperm(100).tolist()  # a user's own order of this epoch
    for part in (0, 1):  # two passes
        more = torch.rand(()).item()
        for x in job.batches(loader if part == 0 else [1.0, 2.0]):
            with job.step():
                seen.append(torch.as_tensor(x).double().sum().item() + order[job.step_number] + more)
            if os.environ.get('DIE') == f'{epoch}:{part}':
                job.save(wait=True)
                os.kill(os.getpid(), 9)
            if job.step_number % 3:
                torch.rand(3), random.random(), numpy.random.rand()  # an evaluation inside the epoch
    own = torch.rand(()).item()
    for x in DataLoader(Noise(), batch_size=6, shuffle=True):  # a plain evaluation
        own += torch.rand(()).item()
    with job.change():
        seen.append(own)
print('seen', seen)
job.finish()
"""
KINDS = {
    "samples": "DataLoader(Noise(), batch_size=4, shuffle=True)",
    "collate": "DataLoader(range(12), batch_size=4, collate_fn=collate)",
    "samples one by one": "DataLoader(Noise(), batch_size=None, sampler=torch.utils.data.RandomSampler(range(3)))",
    "stream": "DataLoader(Stream(), batch_size=4)",
    "drawn while workers load": "DataLoader(range(1000), batch_size=None, sampler=Lazy(), num_workers=1)",
}


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_batches_depend_on_nothing_that_was_drawn_before(forks: Forks, tmp_path: Path, kind: str) -> None:
    """The runs resume after an epoch, inside the first pass of an epoch, and inside its second pass."""
    text = DRAWS.replace("KIND", KINDS[kind])
    whole = said(ran(forks, tmp_path, text), "seen")
    for how in ({"EPOCHS": "1"}, {"DIE": "1:0"}, {"DIE": "1:1"}):
        (tmp_path / "run").rename(tmp_path / f"before {how}")
        ran(forks, tmp_path, text, **how, code=-signal.SIGKILL if "DIE" in how else 0)
        assert said(ran(forks, tmp_path, text), "seen") == whole, how


def test_steps_resume_with_the_random_numbers_that_an_evaluation_does_not_change(forks: Forks, tmp_path: Path) -> None:
    text = (
        "import os, torch, rankup\njob, seen = rankup.init('run', save_every_steps=1), []\njob.track(seen=seen)\n"
        "for step in job.steps(6):\n    x = torch.rand(()).item()\n    with job.step():\n        seen.append(x)\n"
        "    if step == 3 and 'DIE' in os.environ:\n        job.run.saver.wait()\n        os.kill(os.getpid(), 9)\n"
        "    if step == 3:\n        torch.rand(3)\nprint('seen', seen)\njob.finish()\n"
    )
    whole = said(ran(forks, tmp_path, text), "seen")
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, DIE="1", code=-signal.SIGKILL)
    assert said(ran(forks, tmp_path, text), "seen") == whole


# Loaders that a resume reads again. `KIND` is a loader; a rank writes the samples of its finished steps to a file
READ = """
import os, random, signal, time, torch, rankup
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from tests.rigs.faulting_workload import stop_is_known

class Numbers(Dataset):
    def __init__(self):
        self.own = random.SystemRandom()
    def __len__(self):
        return int(os.environ.get('SAMPLES', '96'))
    def __getitem__(self, index):
        return {'id': index, 'x': self.own.random() if 'OWN' in os.environ else 0.0}

class Stream(IterableDataset):
    def __init__(self, own, text=False):
        self.own, self.epoch, self.text = own, 0, text
    def set_epoch(self, epoch):
        self.epoch = epoch
    def __iter__(self):
        order = [*range(96)][job.rank :: job.world_size] if 'ALL' not in os.environ else [*range(96)]
        (self.own or random.Random(self.epoch)).shuffle(order)
        yield from ((str(n), n) for n in order) if self.text else order

class Shares(BatchSampler):  # splits among ranks in its own way
    def __init__(self):
        self.rank, self.num_replicas = job.rank, job.world_size
    def __iter__(self):
        return iter([[n, n + 1] for n in range(self.rank * 2, 96, 2 * self.num_replicas)])

class Shuffled:
    def __iter__(self):
        return iter(random.Random(os.urandom(8)).sample(range(96), 96))

job = rankup.init('run', log_every_steps=1000)
job.track(count={'n': 0})
numbers = Numbers()
stop = job.step_number + int(os.environ.get('STOP', '-99'))
with open(f'seen-{job.rank}-{os.getpid()}', 'w') as seen:
    for epoch in job.epochs(int(os.environ.get('EPOCHS', '1'))):
        for batch in job.batches(KIND, any_order='ANY' in os.environ):
            ids = batch['id'] if isinstance(batch, dict) else batch[1] if isinstance(batch, list) else batch
            with job.step():
                pass
            print(*torch.as_tensor(ids).flatten().tolist(), file=seen, flush=True)
            job.gather(0)  # otherwise a rank may be many steps ahead when the ranks agree on the step to stop at
            if job.step_number == stop and job.is_main:
                os.kill(os.getpid(), signal.SIGTERM)
                while not stop_is_known(job.group.stop):
                    time.sleep(0.001)
job.finish()
"""
OWN_ORDER = {
    "stream": "DataLoader(Stream(random.SystemRandom()), batch_size=4)",
    "stream with workers": "DataLoader(Stream(random.SystemRandom()), batch_size=4, num_workers=1)",
    "stream of texts": "DataLoader(Stream(random.SystemRandom(), text=True), batch_size=4)",
    "iterable": "Shuffled()",
    "list": "random.Random(os.urandom(8)).sample(range(96), 96)",
}


def samples(folder: Path) -> list[int]:
    """Return the samples of all finished steps, of all ranks."""
    return sorted(int(number) for path in folder.glob("seen-*") for number in path.read_text().split())


@pytest.mark.parametrize("kind", OWN_ORDER)
def test_loader_with_another_order_after_a_resume_is_refused(forks: Forks, tmp_path: Path, kind: str) -> None:
    """It goes on if the order does not matter."""
    text = READ.replace("KIND", OWN_ORDER[kind])
    ran(forks, tmp_path, text, STOP="5", code=143)
    output = ran(forks, tmp_path, text, code=2)
    assert "must give the same batches again after a resume, got other ones" in output
    ran(forks, tmp_path, text, ANY="1")


def test_workers_get_the_same_batches_on_all_ranks_after_a_resume(forks: Forks, tmp_path: Path) -> None:
    """All ranks load again the batch by which the rank that wrote the copy checks its loader."""
    text = """
import os, random, torch, rankup
from torch.utils.data import DataLoader, Dataset
class Draws(Dataset):
    own = random.Random(0)  # each worker has one
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return self.own.random()
job = rankup.init('run')
job.track(count={'n': 0})
for epoch in job.epochs(1):
    for x in job.batches(DataLoader(Draws(), batch_size=4, num_workers=2)):
        with job.step():
            pass
        print(f'drawn-{job.rank}-{job.step_number}', x.tolist())
        if job.step_number == 1 and 'DIE' in os.environ:
            job.save(wait=True)
            os.kill(os.getpid(), 9)
job.finish()
"""
    whole = ran(forks, tmp_path, text, ranks=2)
    (tmp_path / "run").rename(tmp_path / "whole")
    ran(forks, tmp_path, text, ranks=2, DIE="1", code=-signal.SIGKILL)
    output = ran(forks, tmp_path, text, ranks=2)
    for last in ("drawn-0-6", "drawn-1-6"):
        assert said(output, last) == said(whole, last)


@pytest.mark.parametrize(("kind", "why"), [
    (OWN_ORDER["stream"], "must give the same batches again after a resume, got other ones"),
    (f"{OWN_ORDER['stream with workers'][:-1]}, persistent_workers=True)", "must give the same batches again"),
    (OWN_ORDER["iterable"], "must give the same batches again after a resume, got other ones"),
    ("DataLoader(numbers, batch_size=4)", "Numbers gives another batch when it loads one again"),
    ("DataLoader(numbers, batch_size=4, shuffle=True)", "Numbers gives another batch when it loads one again"),
])
def test_loader_that_draws_on_its_own_is_noticed_after_an_epoch(
    forks: Forks, tmp_path: Path, kind: str, why: str
) -> None:
    """A resume at the end of an epoch loads no batch again that an earlier attempt loaded."""
    text = READ.replace("KIND", kind)
    ran(forks, tmp_path, text, OWN="1")
    assert why in ran(forks, tmp_path, text, OWN="1", EPOCHS="2", code=0 if "numbers" in kind else 2)


@pytest.mark.parametrize("kind", [
    "DataLoader(Stream(None), batch_size=4)", "DataLoader(Stream(None), batch_size=4, num_workers=1)", "[1, 2, 3]",
    "DataLoader(numbers, batch_size=4, shuffle=True, num_workers=1)", "DataLoader(numbers, batch_size=4, shuffle=True)",
])
def test_loader_that_draws_from_seeded_numbers_is_not_blamed_after_an_epoch(
    forks: Forks, tmp_path: Path, kind: str
) -> None:
    text = READ.replace("KIND", kind)
    ran(forks, tmp_path, text, ranks=2)
    output = ran(forks, tmp_path, text, ranks=2, EPOCHS="2")
    assert "again" not in output.replace("rankup.init again", "")


def test_loader_with_fewer_batches_after_a_resume_is_refused(forks: Forks, tmp_path: Path) -> None:
    ran(forks, tmp_path, READ.replace("KIND", "[1, 2, 3, 4, 5, 6, 7]"), STOP="6", code=143)
    output = ran(forks, tmp_path, READ.replace("KIND", "[1, 2, 3, 4, 5]"), code=2)
    assert "list must give the same batches again after a resume, got other ones" in output


def test_samples_with_a_generator_of_their_own_are_reported_after_a_resume(forks: Forks, tmp_path: Path) -> None:
    text = READ.replace("KIND", "DataLoader(numbers, batch_size=4)")
    ran(forks, tmp_path, text, STOP="18", code=143, OWN="1")
    output = ran(forks, tmp_path, text, OWN="1")
    assert "Numbers gives another batch when it loads one again, so a resume changes the weights" in output


SPLIT = "DataLoader(numbers, batch_size=2, sampler=DistributedSampler(numbers, job.world_size, job.rank, seed=3))"


@pytest.mark.parametrize("kind", [
    SPLIT, "DataLoader(Stream(None), batch_size=2)", "DataLoader(Stream(None, text=True), batch_size=2)",
    "DataLoader(numbers, batch_size=4, shuffle=True)", "DataLoader(numbers, batch_size=4, shuffle=True, num_workers=1)",
])
def test_ranks_see_each_sample_once_over_a_stop(forks: Forks, tmp_path: Path, kind: str) -> None:
    text = READ.replace("KIND", kind)
    ran(forks, tmp_path, text, ranks=2, STOP="5", code=143)
    output = ran(forks, tmp_path, text, ranks=2)
    assert samples(tmp_path) == [*range(96)]
    assert "again, got other" not in output
    assert "gives another batch" not in output


@pytest.mark.parametrize("ranks", [(2, 4, 2), (4, 2, 3), (1, 3, 1), (3, 2, 2)])
def test_distributed_sampler_gives_each_sample_once_while_ranks_come_and_go(
    forks: Forks, tmp_path: Path, ranks: tuple[int, int, int]
) -> None:
    first, second, third = ranks
    text = READ.replace("KIND", SPLIT)
    ran(forks, tmp_path, text, ranks=first, STOP="3", code=143, SAMPLES="95")
    ran(forks, tmp_path, text, ranks=second, STOP="2", code=143, SAMPLES="95")
    ran(forks, tmp_path, text, ranks=third, SAMPLES="95")
    seen = samples(tmp_path)
    assert {*seen} == {*range(95)}
    assert len(seen) - 95 < third  # torch's sampler fills up the last turn


@pytest.mark.parametrize(("kind", "why"), [
    ("DataLoader(numbers, batch_sampler=Shares())", "must be split by torch's DistributedSampler to go on with 3"),
    ("DataLoader(Stream(None), batch_size=2)", "must give every rank the same batches to go on with 3 ranks"),
    ("DataLoader(numbers, batch_size=None, sampler=DistributedSampler(numbers, job.world_size, job.rank))",
     "must give every rank the same batches to go on with 3 ranks"),
])
def test_loader_that_splits_by_itself_is_refused_with_other_ranks(
    forks: Forks, tmp_path: Path, kind: str, why: str
) -> None:
    text = READ.replace("KIND", kind)
    ran(forks, tmp_path, text, ranks=2, STOP="4", code=143)
    assert why in ran(forks, tmp_path, text, ranks=3, code=2)


def test_loader_that_gives_all_ranks_the_same_goes_on_with_other_ranks(forks: Forks, tmp_path: Path) -> None:
    text = READ.replace("KIND", "DataLoader(Stream(None), batch_size=2)")
    ran(forks, tmp_path, text, ranks=2, STOP="4", ALL="1", code=143)
    ran(forks, tmp_path, text, ranks=3, ALL="1")


# Generators that a loader owns and that live on across epochs. `KIND` is a loader
OWNED = """
import functools, os, random, numpy, torch, rankup
from torch.utils.data import DataLoader, Dataset, IterableDataset

in_module = numpy.random.default_rng(0)
in_variable = {'of the module': random.Random(0)}

class Crop:
    __slots__ = ('rng',)
    def __init__(self, rng):
        self.rng = rng
    def __call__(self, x):
        return x + self.rng.random()

class Draw:
    def __init__(self, draw):
        self.draw = draw
    def __call__(self, x):
        return x + self.draw()

class Compose:
    def __init__(self, transforms):
        self.transforms = transforms
    def __call__(self, x):
        for each in self.transforms:
            x = each(x)
        return x

class Samples(Dataset):
    def __init__(self, transform=float):
        self.transform, self.big = transform, list(range(100000))
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return self.transform(index)

class FromModule(Samples):
    def __getitem__(self, index):
        return index + in_module.random() + in_variable['of the module'].random()

class Stream(IterableDataset):
    def __init__(self, rng):
        self.rng = rng
    def __iter__(self):
        order = [float(n) for n in range(24)]
        self.rng.shuffle(order)
        for n in order:
            yield n + self.rng.random()

class Noisy(IterableDataset):  # with the global numbers
    def __iter__(self):
        return (n + random.random() + torch.rand(()).item() for n in range(24))

class Shuffled:
    def __init__(self):
        self.rng = random.Random(3)
    def __iter__(self):
        return iter(self.rng.sample(range(24), 6))

class Order:
    def __init__(self, rng):
        self.rng = rng
    def __len__(self):
        return 24
    def __iter__(self):
        return iter(self.rng.permutation(24).tolist())

def collate(samples, rng):
    return torch.tensor(samples) + rng.random()

def mixed(rng):
    return lambda samples: torch.tensor(samples) + torch.rand((), generator=rng)

def begun(loader):  # to learn a shape, say; its workers may live on
    next(iter(loader))
    return loader

def seed_worker(worker):
    torch.utils.data.get_worker_info().dataset.rng = random.Random(worker)

job, seen = rankup.init('run'), []
job.track(seen=seen)
both = numpy.random.RandomState(5)
MORE = dict(WORKERS, batch_size=4)
loader = KIND
for epoch in job.epochs(int(os.environ.get('EPOCHS', '3'))):
    for x in job.batches(loader):
        with job.step():
            seen.append(torch.as_tensor(x).double().sum().item())
        if os.environ.get('DIE') == f'{epoch}:{len(seen) % 6}':
            job.save(wait=True)
            os.kill(os.getpid(), 9)
        if len(seen) % 6 == 3:
            both.rand(), in_module.random()  # code of the loop draws from the same generators
            for x in job.eval_batches(DataLoader(loader.dataset, 4) if hasattr(loader, 'dataset') else loader):
                both.rand()
print('seen', seen)
job.finish()
"""
OWNED_KINDS = {
    "stream": "DataLoader(Stream(random.Random(0)), **MORE)",
    "stream without a seed": "DataLoader(Stream(random.Random()), **MORE)",
    "iterable": "Shuffled()",
    "transforms": "DataLoader(Samples(Compose([functools.partial(Crop(numpy.random.default_rng(1)))])), **MORE)",
    "collate function": "DataLoader(Samples(), collate_fn=functools.partial(collate, rng=random.Random(1)), **MORE)",
    "closure": "DataLoader(Samples(), collate_fn=mixed(torch.Generator()), **MORE)",
    "sampler": "DataLoader(Samples(), sampler=Order(numpy.random.RandomState(4)), **MORE)",
    "sampler and transform with one": "DataLoader(Samples(Draw(both.rand)), "
                                      "sampler=Order(both), **MORE)",
    "module": "DataLoader(FromModule(), **MORE)",
}
WORKERS = {"0": "num_workers=0", "2": "num_workers=2", "persistent": "num_workers=2, persistent_workers=True"}
CASES = [
    *((kind, "0") for kind in OWNED_KINDS),
    *((kind, "2") for kind in ("stream", "transforms", "collate function", "sampler", "module")),
    *((kind, "persistent") for kind in (
        "stream", "transforms", "collate function", "seeded by workers", "global", "begun before"
    )),
]
OWNED_KINDS |= {
    "seeded by workers": "DataLoader(Stream(random.Random(0)), worker_init_fn=seed_worker, **MORE)",
    "global": "DataLoader(Noisy(), **MORE)",
    "begun before": "begun(DataLoader(Noisy(), **MORE))",
}


@pytest.mark.parametrize(("kind", "workers"), CASES)
def test_loader_with_generators_of_its_own_resumes_exactly(
    forks: Forks, tmp_path: Path, kind: str, workers: str
) -> None:
    """The runs resume at the end of an epoch, and inside one."""
    text = OWNED.replace("KIND", OWNED_KINDS[kind]).replace("WORKERS", WORKERS[workers])
    whole = said(ran(forks, tmp_path, text), "seen")
    for how in ({"EPOCHS": "1"}, {"DIE": "1:4"}):
        (tmp_path / "run").rename(tmp_path / f"before {how}")
        ran(forks, tmp_path, text, **how, code=-signal.SIGKILL if "DIE" in how else 0)
        assert said(ran(forks, tmp_path, text), "seen") == whole, how


SHARED = """
import random, torch, rankup
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

class Shared(IterableDataset):
    def __init__(self):
        self.order, self.noise = random.Random(0), random.Random(job.rank)
    def __iter__(self):
        order = [*range(24)]
        self.order.shuffle(order)
        return ((n, self.noise.random()) for n in order[job.rank :: job.world_size])

class Late(IterableDataset):
    rng = None
    def __iter__(self):
        self.rng = self.rng or random.Random(0)
        return iter(self.rng.sample(range(24), 24))

class Opened(Dataset):
    file = None
    def __len__(self):
        return 24
    def __getitem__(self, index):
        return self.file[index]

def open_file(worker):
    get_worker_info().dataset.file = [*range(100, 124)]

job = rankup.init('run')
for epoch in job.epochs(2):
    for batch in job.batches(loader := KIND if epoch == 0 else loader):
        with job.step():
            print('ids', *batch[0].tolist() if isinstance(batch, list) else torch.as_tensor(batch).reshape(-1).tolist())
            print('noise', *batch[-1].tolist() if isinstance(batch, list) else ())
job.finish()
"""


def test_ranks_share_the_generators_that_they_have_seeded_equally(forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, SHARED.replace("KIND", "DataLoader(Shared(), batch_size=4)"), ranks=3)
    ids, noise = ([word for line in output.splitlines() if line.startswith(what) for word in line.split()[1:]]
                  for what in ("ids ", "noise "))
    assert sorted(map(int, ids)) == sorted([*range(24)] * 2)  # all ranks split one order, in both epochs
    assert len({*noise}) == 48
    assert output.count("Shared: rankup seeds dataset.noise, dataset.order from the run's seed, the epoch") == 1


def test_generator_that_a_pass_makes_is_reported(forks: Forks, tmp_path: Path) -> None:
    output = ran(forks, tmp_path, SHARED.replace("KIND", "DataLoader(Late(), batch_size=4)"))
    assert output.count("Late made the generator dataset.rng during a pass, so a resume changes its numbers") == 1


def test_worker_may_set_attributes_of_its_data_set(forks: Forks, tmp_path: Path) -> None:
    loader = "DataLoader(Opened(), batch_size=4, num_workers=1, worker_init_fn=open_file)"
    output = ran(forks, tmp_path, SHARED.replace("KIND", loader))
    assert sum(line.startswith("ids 1") for line in output.splitlines()) == 12


LEFT = """
import rankup
job = rankup.init('run')
for epoch in job.epochs(3):
    passes = job.batches([*range(9)])
    for i, x in enumerate(LOOP):
        with job.step():
            pass
        if BREAK:
            break
job.finish()
"""


@pytest.mark.parametrize(("loop", "where", "said_so"), [
    ("passes", "i == 4", True), ("passes", "epoch == 2 and i == 4", False),
    ("zip(job.batches([*range(5)]), passes)", "False", False), ("passes", "i == 8 and epoch == 2", False),
])
def test_pass_that_a_loop_leaves_is_reported(
    forks: Forks, tmp_path: Path, loop: str, where: str, said_so: bool
) -> None:
    """A resumed loop counts its batches from 0, and would leave its pass later. The last pass does no harm."""
    output = ran(forks, tmp_path, LEFT.replace("LOOP", loop).replace("BREAK", where))
    assert output.count("the loop left its last pass after 5 batches") == said_so


@pytest.mark.parametrize(("data", "says"), [
    ("torch.utils.data.Subset(range(24), [*range(24)][job.rank :: job.world_size])", "dataset.indices of Subset"),
    ("torch.utils.data.TensorDataset(torch.arange(24)[job.rank :: 2])", "dataset.tensors of TensorDataset"),
    ("torch.utils.data.Subset(torch.utils.data.Subset(range(24), range(24)), [*range(12)])", ""),
])
def test_data_that_the_script_has_split_are_reported(forks: Forks, tmp_path: Path, data: str, says: str) -> None:
    output = ran(forks, tmp_path, SHARED.replace("KIND", f"DataLoader({data}, batch_size=4)"), ranks=2)
    assert output.count(f"{says} differs between ranks") == (1 if says else 0)


# Code that fetches ahead, and code that only looks like it ------------------------------------------------------------

AHEAD = """
import queue, threading, rankup

def ahead(batches, most=1):
    waiting = []
    for batch in batches:
        waiting.append(batch)
        if len(waiting) > most:
            yield waiting.pop(0)
    yield from waiting

def threaded(batches):
    fetched = queue.Queue(2)
    def fetch():
        try:
            for batch in batches:
                fetched.put(batch)
        except BaseException as error:
            fetched.put(error)
    threading.Thread(target=fetch, daemon=True).start()
    for _ in range(9):
        if isinstance(found := fetched.get(), BaseException):
            raise found
        yield found

job = rankup.init('run')
batches = job.batches([1] * LENGTH)
for n, _ in enumerate(KIND):
    if EACH and n % 2 == 0:
        continue
    with job.step():
        pass
job.finish()
"""


@pytest.mark.parametrize(("kind", "each", "length", "says"), [
    ("ahead(batches)", 0, 9, True), ("ahead(batches, 3)", 0, 9, True), ("ahead(batches)", 1, 9, True),
    ("ahead(batches)", 0, 2, True), ("ahead(batches, 3)", 0, 2, True), ("ahead(batches, 2)", 1, 4, True),
    ("batches", 0, 9, False), ("batches", 1, 9, False), ("zip(batches, job.batches([2] * 9))", 0, 9, False),
    ("batches", 1, 4, False), ("job.batches([1] * 2, prefetch=1)", 0, 2, False),
])
def test_batches_that_are_fetched_ahead_are_reported(
    forks: Forks, tmp_path: Path, kind: str, each: int, length: int, says: bool
) -> None:
    text = AHEAD.replace("KIND", kind).replace("EACH", str(each)).replace("LENGTH", str(length))
    output = ran(forks, tmp_path, text)
    assert output.count("a stop loses batches that code fetches ahead or takes before the loop") == says, output


def test_batches_that_a_thread_fetches_are_refused(forks: Forks, tmp_path: Path) -> None:
    text = AHEAD.replace("KIND", "threaded(batches)").replace("EACH", "0").replace("LENGTH", "9")
    output = ran(forks, tmp_path, text, code=2)
    assert "batches: they must be read in the thread that called rankup.init" in output


def test_slow_loader_is_read_again_without_a_limit(forks: Forks, tmp_path: Path) -> None:
    """On rank 0 reading again takes longer than a step may take; the other rank waits that long."""
    text = (
        "import os, signal, time, rankup\nfrom tests.rigs.faulting_workload import stop_is_known\n"
        "job, again = rankup.init('run', step_timeout_s=6), 'STOP' not in os.environ\njob.track(count={'n': 0})\n"
        "class Slow:\n    def __iter__(self):\n        for n in range(40):\n"
        "            time.sleep(0.5 if again and n < 18 and job.is_main else 0)\n            yield n\n"
        "for epoch in job.epochs(1):\n    for x in job.batches(Slow()):\n        with job.step():\n            pass\n"
        "        job.gather(x)\n        if x == 17 and not again and job.is_main:\n"
        "            os.kill(os.getpid(), signal.SIGTERM)\n            while not stop_is_known(job.group.stop):\n"
        "                time.sleep(0.001)\njob.finish()\n"
    )
    ran(forks, tmp_path, text, ranks=2, STOP="1", code=143)
    assert "batches  loading again the " in ran(forks, tmp_path, text, ranks=2)
