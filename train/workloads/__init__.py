"""What is trained: a workload is a model, its samples, and functions that say what a batch means.

A user's own is a module with `build(config) -> Workload`, named by its import path: `--workload mypkg.job:build`.
"""

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from ..setting import Settings, path, setting

if TYPE_CHECKING:
    from .workload import Sums as Sums
    from .workload import TensorSamples as TensorSamples
    from .workload import Workload as Workload

# Modules in here, each with a function `build`
WORKLOADS = ("images", "text")
RULE = f"{', '.join(WORKLOADS)} or module:function"


class WorkloadSettings(Settings):
    """Which workload, and what it has."""

    workload: str = setting("images", f"What is trained: {', '.join(WORKLOADS)}, or your own module:function.",
                            pattern=rf"^({'|'.join(WORKLOADS)}|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$", rule=RULE)
    model: str = setting("cnn", "cnn, mlp, or a torchvision model such as resnet18.",
                         pattern=r"^[A-Za-z]\w*$", rule="cnn, mlp or the name of a torchvision classifier",
                         of="--workload images")
    max_seq_len: int = setting(128, "Longer texts are cut to so many tokens.", ge=4, of="--workload text")
    bert_dir: str | None = path(
        "A BERT's folder: config, vocabulary, weights; null: small encoder.", free=True, of="--workload text")
    # Only what YAML and JSON both hold: the options are saved with the run and compared when it is resumed
    options: dict[str, JsonValue] = setting(
        {}, "Free settings: --options.key value.", of="--workload MODULE:FUNCTION",
        rule="a mapping of words to finite numbers, texts, true, false, null, lists or mappings")
    init_from: str | None = path("Start from these weights: a checkpoint or a state dict, or its address.")
    dropout: float = setting(0.0, "Share of activations dropped in training.", ge=0, lt=1)


def __getattr__(name: str) -> Any:
    """What is in `workload`, when it is asked for: the settings need no torch."""
    return resolve_name(f"{__name__}.workload:{name}")
