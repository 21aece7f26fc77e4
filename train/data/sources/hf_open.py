"""Where a Hugging Face data set is: a folder, the cache of `datasets`, or, if asked for, the hub."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankup.errors import ConfigError, DataError
from rankup.places.urls import is_url
from train.config import Config
from train.data.sources.cache import writable_cache
from train.data.sources.fetch import NotFetched, Say, download_lock

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")  # organisation/name, or the first data sets' single word
SAVED = ("dataset_dict.json", "state.json")  # what `save_to_disk` leaves of several splits, and of one


def open_splits(config: Config, *, say: Say) -> Mapping[str, Any]:
    """Split -> `datasets.Dataset`, from the place that `config.dataset` names behind hf:.

    Nothing is downloaded unless hf_download is set, and then once per node. Raises ConfigError without the package
    `datasets`, DataError for what is neither a folder nor cached, or can't be read, NotFetched if the hub refuses.
    """
    if importlib.util.find_spec("datasets") is None:
        raise ConfigError(
            f"dataset must be another than {config.dataset} without the package datasets, which is not installed: "
            "pip install 'rankup[hf]', in a checkout pip install -e '.[hf]'"
        )
    name = config.dataset.removeprefix("hf:")
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read_folder(folder, config)
    if not _may_be_at_the_hub(name, folder):
        problem = "which is a file" if folder.exists() else "which is not there"
        got = "an address" if is_url(name) else f"{config.dataset}, {problem}"  # an address may have a password in it
        raise DataError(f"dataset must be hf: and a folder, or a data set's name, got {got}.")
    found = _cached(name, config)
    if found is None and config.hf_download:
        title, lock = f"{name} from the Hugging Face hub", writable_cache() / f"hf-{name.replace('/', '--')}"
        with download_lock(lock, title, timeout_s=config.download_timeout_s, say=say):
            found = _cached(name, config)
            if found is None:
                say(f"downloading {title} (once, at most {config.download_timeout_s:g} s)")
                _download(name, title, config)
                found = _cached(name, config)
    if found is None:
        asked = f" with configuration {config.hf_config}" if config.hf_config else ""
        raise DataError(
            f"dataset must be hf: and a folder, or a data set's name, got {config.dataset}, which is no folder and not "
            f"cached here{asked}. Nothing is downloaded unasked: to fetch it from the Hugging Face hub, once, set "
            "--hf-download."
        )
    return found


def _download(name: str, title: str, config: Config) -> None:
    """Let `datasets` put a data set into its cache, in a process of its own, which can be ended. Raises NotFetched."""
    # It would report to the hub what is used here. Read when the packages are imported
    env = {**os.environ, "HF_HUB_DISABLE_TELEMETRY": "1", "HF_UPDATE_DOWNLOAD_COUNTS": "0"}
    code = "import sys, datasets; datasets.load_dataset(sys.argv[1], sys.argv[2] or None)"
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", code, name, config.hf_config or ""], env=env, check=True, text=True,
            stdin=subprocess.DEVNULL, capture_output=True, timeout=config.download_timeout_s,
        )
    except subprocess.SubprocessError as error:
        lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
        raise NotFetched(f"{title} cannot be downloaded ({lines[-1].strip()}).") from error


def _may_be_at_the_hub(name: str, folder: Path) -> bool:
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    # "csv" and the like are no names to `datasets`: they mean all such files below the working directory
    return HUB_NAME.fullmatch(name) is not None and not folder.exists() and name not in _PACKAGED_DATASETS_MODULES


def _read_folder(folder: Path, config: Config) -> Mapping[str, Any]:
    """What `save_to_disk` has written to a folder, or the files there of which `load_dataset` makes rows."""
    import datasets

    where = str(folder.absolute())
    try:
        with _offline():
            saved = any((folder / file).is_file() for file in SAVED)
            found = datasets.load_from_disk(where) if saved else datasets.load_dataset(where, config.hf_config)
    except Exception as error:  # of many types: no data files, damaged ones, no such configuration, no room
        raise DataError(f"{folder}: can't be read as a Hugging Face data set ({one_line(error)}).") from error
    return found if isinstance(found, Mapping) else {"train": found}


def _cached(name: str, config: Config) -> Mapping[str, Any] | None:
    """What `load_dataset` has kept of a name, None if nothing. Raises DataError for several configurations, unnamed.

    Not the files that the hub's own cache may have: nothing says whether they are all, or those before a broken end.
    """
    import datasets

    try:
        with _offline():
            found: Mapping[str, Any] = datasets.load_dataset(name, config.hf_config)
        return found
    except ValueError as error:
        if config.hf_download:
            return None
        raise DataError(f"{config.dataset}: what is cached can't be used ({one_line(error)}).") from error
    except Exception:  # of many types: to `datasets` it is the hub that can't be reached
        return None


@contextmanager
def _offline() -> Iterator[None]:
    """Keep `datasets` from the network, as HF_HUB_OFFLINE=1 would; its bars and warnings stay off the terminal."""
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


def one_line(error: BaseException) -> str:
    """What an exception says, on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200].rstrip(".")
