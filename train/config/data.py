"""The data sets by name, and their settings. No torch here."""

from __future__ import annotations

from functools import partial
from typing import Literal

from .setting import Count, Natural, Settings, free, path, setting

# `dataset` -> module in train/data/sources and its function (config) -> (training samples, test samples)
SOURCES = {
    **dict.fromkeys(("fashion-mnist", "mnist", "cifar10", "digits"), "in_memory:of_torchvision"),  # and a line in KNOWN
    "imagefolder": "imagefolder:load",
    "fake": "in_memory:fake",
    "hf:PATH_OR_NAME": "huggingface:load",
}
NAMES = ", ".join(SOURCES)
Augment = bool | Literal["imagenet", "trivial"]
_of_hf = partial(setting, min_length=1, rule="a name", of="--dataset hf")


class DataSettings(Settings):
    """Which data set to use, and its settings."""

    dataset: str = setting("fashion-mnist", f"The data: {NAMES}.", rule=f"one of {NAMES}",
                           pattern=f"^({'|'.join(SOURCES).replace('PATH_OR_NAME', '.+')})$",
                           of="--workload images or --dataset hf")
    data_dir: str | None = path("Folder of the data; null: look in the usual places, then download.", free=True)
    image_size: int | None = setting(
        None, "Height and width of images in pixels; null: their own.", ge=8, of="--workload images")
    augment: Augment = setting(
        False, "Change the training images at random. true: shift and flip; imagenet: its random crops and flips; "
        "trivial: also TrivialAugmentWide. The last two need imagefolder or hf.",
        rule="true, false, imagenet or trivial", of="--workload images")
    limit_train: Natural = setting(0, "Train only on the first N samples; 0: all.")
    limit_eval: Natural = setting(0, "Evaluate only on the first N samples; 0: all.")
    eval_split: Literal["dev", "test"] = free(
        "dev", "Which part to evaluate on if there are both.", of="--workload text or --dataset hf")

    fake_samples: Count = setting(1024, "How many training images it has.", of="--dataset fake")
    fake_classes: int = setting(10, "How many classes it has.", ge=2, of="--dataset fake")

    hf_config: str | None = _of_hf(None, "Configuration of the data set; null: the only one, or the default.")
    input_column: str | None = _of_hf(None, "Column of the images or texts; null: image, or text.")
    label_column: str = _of_hf("label", "Column of the labels.")
    hf_train_split: str = _of_hf("train", "Rows to train on: a split, or part of one such as train[:90%].")
    hf_eval_split: str | None = _of_hf(
        None, "Rows to evaluate on; null: validation or test, as eval_split says.", free=True)
    hf_download: bool = free(
        False, "Download hf:NAME from the Hugging Face hub, once.", of="--dataset hf")
