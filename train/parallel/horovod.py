"""horovod: the gradients are averaged by Horovod; all else (data, evaluation, checkpoints, stopping) goes the usual way.

Horovod has a gloo of its own, beside torch's, which carries what keeps the ranks in step. Whoever started the ranks, they have
met already when Horovod starts: rank 0 serves what its ranks meet by, for as long as that takes. horovodrun brings its own.
"""

import contextlib
import importlib.util
import os
import socket
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from train.config import Config
from train.errors import ConfigError, JoinError
from train.group.group import BEHIND_OURS_S, Group
from train.group.network import address_of

INSTALL = "`make horovod` builds and installs it; ddp, the recommended way, needs nothing."


def load_horovod() -> Any:
    """horovod.torch. Raises ConfigError where it is not installed, or was built for another torch."""
    if importlib.util.find_spec("horovod") is None:
        raise ConfigError(f"parallel horovod needs Horovod, which is not installed here. {INSTALL}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of 2023, for the Pythons since
            import horovod.torch as horovod
    except ImportError as error:
        raise ConfigError(f"Horovod is installed, but not for torch {torch.__version__} ({error}). {INSTALL}") from None
    return horovod


@contextlib.contextmanager
def running(config: Config, group: Group) -> Iterator[None]:
    """Horovod, for the length of the block; nothing with other ways. Raises ConfigError and JoinError.

    It is ended after success only: a rank that fails leaves at once, as from torch's group.
    """
    if config.parallel != "horovod":
        yield
        return
    horovod = load_horovod()
    if group.device.type != "cpu" and not horovod.cuda_built():
        raise ConfigError(f"Horovod was built for CPUs here, got device {group.device}. Set --device cpu, or use ddp.")
    group.watch.enter("setup", config.setup_timeout_s)
    # One tensor at a time: which ones it puts together depends on the moment, and with it, for three ranks or more, the order
    # of the sums. A number of your own is kept.
    os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # that a peer went is said by us, with its name
    longest_s = max(config.setup_timeout_s, config.step_timeout_s, config.eval_timeout_s, config.save_timeout_s)
    os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(int(longest_s + BEHIND_OURS_S))  # as torch's group has it
    with _meeting_place(group):
        try:
            horovod.init()
        except (RuntimeError, ValueError) as error:
            raise JoinError(f"all ranks reached each other, but Horovod could not connect them: {error}") from None
        assert (horovod.rank(), horovod.size()) == (group.rank, group.world_size)
        group.barrier()
    yield
    group.barrier()
    horovod.shutdown()


@contextlib.contextmanager
def _meeting_place(group: Group) -> Iterator[None]:
    """Rank 0 serves the store by which Horovod's ranks find each other, at the address where gloo reached it."""
    if group.world_size == 1 or group.launch.has_horovod_rendezvous:
        yield
        return
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    server = None
    if group.is_rank0:
        host = address_of(interface) if interface else socket.gethostbyname(socket.gethostname())
        server = RendezvousHTTPServer((host, 0), RendezvousHandler, False)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = group.broadcast(server.server_address if server else None)
    place = {"RENDEZVOUS_ADDR": host, "RENDEZVOUS_PORT": port, "IFACE": interface}
    os.environ |= {f"HOROVOD_GLOO_{name}": str(value) for name, value in place.items() if value}
    # Each as on a node of its own: Horovod does nothing else with nodes that this program asks for
    own = {"HOSTNAME": f"rank-{group.rank}", "RANK": group.rank, "SIZE": group.world_size, "LOCAL_RANK": 0, "LOCAL_SIZE": 1,
           "CROSS_RANK": group.rank, "CROSS_SIZE": group.world_size, "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo"}
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in own.items()}
    yield
    if server is not None:
        server.shutdown()
        server.server_close()


def distribute(
    optimizer: torch.optim.Optimizer, model: nn.Module, config: Config, group: Group
) -> torch.optim.Optimizer:
    """The optimizer, with gradients that are averaged over the ranks before its step; rank 0's weights and state on all. With
    other ways it is returned as it is. After the warm-up, whose gradients are nobody's."""
    if config.parallel != "horovod":
        return optimizer
    horovod = load_horovod()
    state = optimizer.state_dict()
    distributed = horovod.DistributedOptimizer(
        optimizer,
        named_parameters=[(name, p) for name, p in model.named_parameters() if p.requires_grad],
        compression=horovod.Compression.fp16 if config.compress == "fp16" else horovod.Compression.none,
        backward_passes_per_step=config.accumulate,
    )
    distributed.load_state_dict(state)  # it begins with an empty one
    horovod.broadcast_parameters(model.state_dict(), root_rank=0)
    if state["state"]:
        # Not without any: to have something to send it takes a step with gradients of zero, which decays the weights
        horovod.broadcast_optimizer_state(distributed, root_rank=0)
    assert isinstance(distributed, torch.optim.Optimizer)
    return distributed


@contextlib.contextmanager
def averaged(optimizer: torch.optim.Optimizer, group: Group) -> Iterator[None]:
    """Around all that uses the gradients of a step: they are whole from here on. Nothing with other ways."""
    if not hasattr(optimizer, "skip_synchronize"):
        yield
        return
    group.watch.wait_for_others(True)
    optimizer.synchronize()  # type: ignore[attr-defined]
    group.watch.wait_for_others(False)
    with optimizer.skip_synchronize():
        yield
