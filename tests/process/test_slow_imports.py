"""Slow imports: no collections meanwhile, as many as ever afterwards, and none left for processes that are forked."""

import gc

from train.process.imports import without_collections


def test_garbage_is_collected_again_after_the_imports() -> None:
    try:
        with without_collections():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
