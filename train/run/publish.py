"""Old names of `rankup.state.copies`."""

from rankup.state.copies import STAGING, create_staging, publish, remove_unfinished

__all__ = ["STAGING", "create_staging", "publish", "remove_unfinished"]
