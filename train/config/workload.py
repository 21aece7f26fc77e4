"""The workloads by name, and their settings. No torch here."""

from pydantic import JsonValue

from .setting import Settings, path, setting

# Modules in train/workloads, each with a function `build`
WORKLOADS = ("images", "text")
RULE = f"{', '.join(WORKLOADS)} or module:function"


class WorkloadSettings(Settings):
    """Which workload to train, and its settings."""

    workload: str = setting("images", f"What is trained: {', '.join(WORKLOADS)}, or your own module:function.",
                            pattern=rf"^({'|'.join(WORKLOADS)}|[A-Za-z_][\w.]*:[A-Za-z_][\w.]*)$", rule=RULE)
    model: str = setting("cnn", "cnn, mlp, or a torchvision model such as resnet18.",
                         pattern=r"^[A-Za-z]\w*$", rule="cnn, mlp or the name of a torchvision classifier",
                         of="--workload images")
    max_seq_len: int = setting(128, "Cut longer texts to this many tokens.", ge=4, of="--workload text")
    bert_dir: str | None = path(
        "Folder of a BERT: config, vocabulary, weights; null: small encoder.", free=True, of="--workload text")
    # Only types that YAML and JSON share: the options are saved with the run, and compared when it is resumed
    options: dict[str, JsonValue] = setting(
        {}, "Free settings: --options.key value.", of="--workload MODULE:FUNCTION",
        rule="a mapping of words to finite numbers, texts, true, false, null, lists or mappings")
    init_from: str | None = path("Start from these weights: a checkpoint or a state dict, or its address.")
    dropout: float = setting(0.0, "Share of activations that training drops.", ge=0, lt=1)
