"""The report that load_config gives on settings which it refuses."""

import pytest

from rankup.errors import UserError
from train.config import load_config


def mistakes(settings=None, *, file=None, earlier=()):
    """The lines of the report that these settings cause."""
    with pytest.raises(UserError) as caught:
        load_config(settings or {}, file=file, mistakes=earlier)
    assert caught.value.code == 2
    return str(caught.value).splitlines()


def one(settings=None, **more):
    (line,) = mistakes(settings, **more)
    return line
