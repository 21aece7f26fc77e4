"""A TrainingState for tests that care about its step, or one field, and nothing else."""

from typing import Any

from train.config import Config
from train.run.training_state import TrainingState


def training_state(step: int, **fields: Any) -> TrainingState:
    usual: dict[str, Any] = {
        "step": step, "evaluated": 0, "metrics": None, "steps_per_epoch": 8, "data": "made-up points",
        "config": Config().model_dump(), "world_size": 1, "attempt": "20200101T000000-abcdef", "start": "",
        "optimizer": {}, "scaler": {}, "compressor": {},
    }
    return TrainingState(**usual | fields)
