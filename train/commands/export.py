"""The command `export`: the weights of a checkpoint, plain or sharded, in one file."""

import io
from pathlib import Path

import torch

from rankup.errors import UserError
from rankup.places.files import write_atomically

from ..config.options import ExportOptions
from ..run import weights
from .checkpoint_model import read_checkpoint
from .context import Context


def export(context: Context, options: ExportOptions) -> None:
    """Write a state dict that `load_state_dict` of the plain module takes, for `torch.load` with weights_only=True.

    Raises UserError.
    """
    output = Path(options.output)
    checkpoint = read_checkpoint(options.checkpoint, context)
    model = checkpoint.tracked["model"]
    buffer = io.BytesIO()
    torch.save(model, buffer)
    try:
        write_atomically(output, buffer.getvalue())
    except OSError as error:
        raise UserError(f"--output must be a file that can be written, got {output}: {error.strerror}.") from None
    size = f"{len(model)} tensors, {buffer.tell() / 1e6:.1f} MB"
    digest = weights.digest(model)[:16]
    context.log.info(f"{output}: the weights of step {checkpoint.step}, {size}, digest {digest}")
