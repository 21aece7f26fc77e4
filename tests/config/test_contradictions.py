"""Settings that contradict each other or do not fit the number of processes are refused."""

import re

import pytest

from rankup.errors import UserError
from tests.rigs.refused import one
from train.config import Config, check_run, load_config

FOLDER = {"dataset": "imagefolder", "data_dir": "x"}


@pytest.mark.parametrize(("settings", "message"), [
    ({"parallel": "dp", "device_ids": "0", "device": "cpu"}, '--device-ids must be empty with device cpu, got "0". *'),
    ({"parallel": "fsdp", "precision": "fp16"}, '--precision must be fp32 or bf16 with parallel fsdp, got "fp16". *'),
    ({"parallel": "horovod", "compress": "bf16"},
     '--compress must be none or fp16 with parallel horovod, got "bf16". Horovod does not sum bf16*'),
    ({"run_dir": "x", "mirror": "x/"}, '--mirror must be another place than run_dir, got "x/". *'),
    ({"dataset": "hf:x", "data_dir": "y"}, '--data-dir must be null with dataset hf:PATH_OR_NAME, got "y". *'),
    ({"dataset": "imagefolder"}, "data_dir must be a folder * with dataset imagefolder, got null. Set it with *"),
])
def test_contradiction_is_refused(settings, message):
    found = one(settings)
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), found), found


@pytest.mark.parametrize("settings", [
    {"parallel": "dp", "device_ids": "1,0"},
    {"precision": "fp16", "device": "cpu"}, {**FOLDER, "augment": "imagenet"},
    {"dataset": "imagefolder", "workload": "my.job:build"},
])
def test_settings_that_go_together_are_accepted(settings):
    load_config(settings)


def test_contradiction_with_the_default_of_a_wrong_value_is_not_reported():
    # The mirror equals the default of run_dir, but the user gave another run_dir, which is wrong by itself
    assert one({"run_dir": "", "mirror": "runs"}) == '--run-dir must be a path or an address, got "".'


@pytest.mark.parametrize(("settings", "world_size", "message"), [
    ({"batch_size": 128}, 200, "batch_size must be at least 200 (200 processes), got 128. Set --batch-size 200, *"),
    ({"accumulate": 65}, 1, "batch_size must be at least 65 (1 process x accumulate=65), got 64. *"),
    ({"batch_size": 12, "accumulate": 5}, 4, "batch_size must be at least 20 (4 processes x accumulate=5), got 12. *"),
    ({"parallel": "none"}, 4, "parallel must be auto or ddp with 4 processes, got none. *"),
    ({"parallel": "dp"}, 2, "parallel must be auto or ddp with 2 processes, got dp. *"),
])
def test_world_size_that_does_not_fit_is_refused_with_the_way_out(settings, world_size, message):
    with pytest.raises(UserError) as caught:
        check_run(Config(**settings), world_size)
    assert re.fullmatch(re.escape(message).replace(r"\*", ".*"), str(caught.value)), caught.value
