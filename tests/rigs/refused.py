"""The report of load_config on settings that it refuses."""

import pytest

from rankup.errors import UserError
from train.config import load_config


def mistakes(settings=None, *, file=None, earlier=()):
    """Return the lines of the report on these settings."""
    with pytest.raises(UserError) as caught:
        load_config(settings or {}, file=file, mistakes=earlier)
    assert caught.value.code == 2
    return str(caught.value).splitlines()


def one(settings=None, **more):
    (line,) = mistakes(settings, **more)
    return line
