"""For fresh interpreters that import much: with torch the collector takes two of five CPU seconds, one at the end."""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
