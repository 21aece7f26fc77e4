"""The method horovod: Horovod averages the gradients, over its own gloo. All else works as in other methods."""

import contextlib
import os
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from rankup import Group, JoinError, UserError

from ..config.settings import WEEK_S
from ..data import one_line
from .methods import Method

INSTALL = "`make horovod` builds and installs it; ddp, which is recommended, needs nothing."


def load_horovod() -> Any:
    """Return the module horovod.torch. Raises UserError if it is not installed or was built for another torch."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Horovod's release of 2023 uses features that newer Pythons deprecate
            import horovod.torch as horovod
    except ImportError as error:
        needed = f"Horovod built for torch {torch.__version__}"
        raise UserError(f"parallel horovod needs {needed}, got: {one_line(error)}. {INSTALL}") from None
    return horovod


class Horovod(Method):
    """Horovod's DistributedOptimizer over gloo. Each rank holds the whole model and optimizer state."""

    @contextlib.contextmanager
    def running(self) -> Iterator[Method]:
        """Run Horovod. Shut it down only after success: a failed rank leaves at once. Raises JoinError, UserError."""
        config, group, horovod = self.config, self.group, load_horovod()
        group.watch.enter("setup", config.setup_timeout_s)
        # 0 sends one tensor at a time. By default Horovod fuses the tensors that happen to be ready, and the sums of
        # three or more ranks differ from run to run. A value that the user has set stays.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
        os.environ.setdefault("HOROVOD_LOG_LEVEL", "fatal")  # rankup itself reports a lost peer, by its name
        os.environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(2 * WEEK_S)  # longer than any deadline of rankup
        with _rendezvous(group):
            try:
                horovod.init()
            except (RuntimeError, ValueError) as error:
                raise JoinError(f"all ranks reached each other, but Horovod could not connect them: {error}") from None
            assert (horovod.rank(), horovod.size()) == (group.rank, group.world_size)
            group.barrier()
        yield self
        group.barrier()
        horovod.shutdown()

    def wrap_optimizer(self, plain: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Wrap the optimizer in Horovod's, and give all ranks rank 0's weights. Afterwards backward sends gradients."""
        config, horovod = self.config, load_horovod()
        state = optimizer.state_dict()  # equal on all ranks: no need for Horovod's broadcast, which unpickles it
        distributed = horovod.DistributedOptimizer(
            optimizer,
            named_parameters=[(name, p) for name, p in plain.named_parameters() if p.requires_grad],
            compression=horovod.Compression.fp16 if config.compress == "fp16" else horovod.Compression.none,
            # Horovod counts the backward passes itself, so `micro_batch` has nothing to do
            backward_passes_per_step=config.accumulate,
        )
        distributed.load_state_dict(state)  # the new optimizer begins with an empty state
        horovod.broadcast_parameters(plain.state_dict(), root_rank=0)
        assert isinstance(distributed, torch.optim.Optimizer)
        return distributed

    def wait_for_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self.group.collective(optimizer.synchronize)  # type: ignore[attr-defined]

    def step(self, plain: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler) -> None:
        with optimizer.skip_synchronize():  # type: ignore[attr-defined]
            super().step(plain, optimizer, scaler)


@contextlib.contextmanager
def _rendezvous(group: Group) -> Iterator[None]:
    """Serve, on rank 0, the store through which Horovod's ranks find each other, on the host of torch's store. Under
    horovodrun nothing is needed: horovodrun serves that store."""
    if group.world_size == 1 or group.rank_env.launcher == "horovodrun":
        yield
        return
    from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

    server = None
    if group.is_rank0:
        server = RendezvousHTTPServer((group.store.host, 0), RendezvousHandler, False)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
    host, port = group.broadcast(server.server_address if server else None)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    # Tell Horovod that each rank is on its own node. It needs nodes only for operations that this method does not use
    own = {
        "GLOO_RENDEZVOUS_ADDR": host, "GLOO_RENDEZVOUS_PORT": port, "GLOO_IFACE": interface,
        "HOSTNAME": f"rank-{group.rank}", "RANK": group.rank, "SIZE": group.world_size, "LOCAL_RANK": 0,
        "LOCAL_SIZE": 1, "CROSS_RANK": group.rank, "CROSS_SIZE": group.world_size,
        "CONTROLLER": "gloo", "CPU_OPERATIONS": "gloo",
    }
    os.environ |= {f"HOROVOD_{name}": str(value) for name, value in own.items() if value != ""}
    yield
    if server is not None:
        server.shutdown()
        server.server_close()
