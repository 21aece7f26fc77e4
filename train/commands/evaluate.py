"""The command `evaluate`: a checkpoint on the test data, exactly, with any number of ranks."""

import json

from rankup.errors import Stopped

from ..config.options import EvaluateOptions
from ..run import weights
from ..run.evaluation import evaluate
from ..run.result import evaluation_table
from .checkpoint_model import open_checkpoint
from .context import Context


def evaluate_checkpoint(context: Context, options: EvaluateOptions) -> None:
    """Evaluate, print the table on rank 0, and write `evaluation.json` beside the run's other outputs.

    Raises Stopped if any rank was asked to stop, and what `open_checkpoint` raises.
    """
    with open_checkpoint(context, options.checkpoint) as opened:
        group, workload, checkpoint = opened.group, opened.workload, opened.checkpoint
        result = evaluate(opened.config, group, workload, workload.model)
        if result is None:
            raise Stopped(f"{context.stop.signal_name or 'another rank'}: evaluation stopped, nothing to save.")
        digest = weights.digest(workload.model.state_dict())
        text, details = workload.report(result.tables) if workload.report else ("", {})
        if group.is_rank0:
            outcome = {
                "checkpoint": str(checkpoint.path), "step": checkpoint.step, "metrics": result.metrics,
                "count": result.count, "digest": digest, "world_size": group.world_size, **details,
            }
            path = context.run_dir / "evaluation.json"
            path.write_text(json.dumps(outcome, indent=2) + "\n", encoding="utf-8")
            table = evaluation_table(result, step=checkpoint.step, digest=digest)
            context.log.info("\n".join(filter(None, [str(checkpoint.path), table, text])))
