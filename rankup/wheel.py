"""setuptools' build of the wheel, with one date for all files: the same files give the same bytes on any day."""

import os

from setuptools.build_meta import *  # type: ignore[import-untyped]  # noqa: F403

os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")
