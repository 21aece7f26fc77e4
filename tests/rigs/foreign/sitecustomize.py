"""For interpreters that import much: garbage collection takes two of torch's five CPU seconds, one at the end."""

import atexit
import gc

gc.set_threshold(100_000)
atexit.register(gc.freeze)
