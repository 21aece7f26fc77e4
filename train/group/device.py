"""Which device this rank uses, and which backend of torch moves bytes between the ranks' devices."""

import torch
import torch.distributed as dist

from rankup.errors import LaunchError


def pick_device(wanted: str, local_rank: int, *, distributed: bool) -> torch.device:
    """The device of this rank: "auto" takes the accelerator if there is one, else the CPU.

    CUDA numbers devices in the order of CUDA_VISIBLE_DEVICES. Raises LaunchError where there is none to take.
    """
    if wanted == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        # Apple's mps has no backend that reduces over ranks.
        wanted = "cpu" if found is None or (found.type == "mps" and distributed) else found.type
    kind, _, index = wanted.partition(":")
    if kind == "cpu":
        return torch.device("cpu")
    module = getattr(torch, kind, None)
    count = int(module.device_count()) if module is not None and hasattr(module, "device_count") else 0
    if count == 0:
        raise LaunchError(f'device must be one this machine has, got "{wanted}". Use --device auto or cpu.')
    number = int(index) if index else local_rank
    if number >= count:
        # Slurm's --gpus-per-task=1 shows each task one device, numbered 0. Two ranks on one device are found later.
        if count > 1 or index:
            raise LaunchError(
                f"local rank {local_rank} must have a device of its own, got {count} visible {kind} devices. Start at "
                f"most {count} processes on this node, or look at CUDA_VISIBLE_DEVICES."
            )
        number = 0
    device = torch.device(kind, number)
    torch.accelerator.set_device_index(number)
    return device


def pick_backend(wanted: str, device: torch.device) -> str:
    """gloo for host memory always, beside the device's own: flags and checkpoints travel without the device."""
    if device.type == "cpu":
        return "gloo"
    own = wanted if wanted != "auto" else dist.get_default_backend_for_device(device)
    return "gloo" if own == "gloo" else f"cpu:gloo,{device.type}:{own}"
