"""A library that takes long to import."""

import time

time.sleep(100)
