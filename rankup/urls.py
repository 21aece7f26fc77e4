"""Addresses of object stores in settings, such as `s3://bucket/runs`. This file imports neither torch nor fsspec."""

import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# The extra of rankup that installs the package which fsspec needs for each scheme
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
          "http": "http", "https": "http"}


def is_url(text: str) -> bool:
    """Return whether `text` is an address such as s3://bucket/runs, and not a path."""
    return _URL.match(text) is not None


def extra_of(url: str) -> str:
    """Return which extra of rankup an address needs, or "" if it needs none that we know."""
    return EXTRAS.get(url.partition("://")[0], "")


def secrets_in(url: str) -> bool:
    """Return whether `url` contains a user, a password, or parameters that may be keys, as in a signed address.

    Settings are printed, logged, saved with each checkpoint, and visible in the list of processes. Two parts are no
    secrets: abfs has a container's name before the @, and tcp has a rank in its parameters.
    """
    scheme, _, rest = url.lower().partition("://")
    before, at, _ = rest.rpartition("@")
    password = bool(at) and ":" in before  # the last @ counts, because a password may contain @ and /
    user = "@" in rest.partition("/")[0] and scheme not in ("abfs", "abfss")
    key = "?" in rest and scheme in (*EXTRAS, "http", "https", "ftp")
    return is_url(url) and (password or user or key)


def must_hold_no_secrets(what: str) -> str:
    """Return the message for an address with `secrets_in` it, without the address. `what`: the setting."""
    return (
        f"{what} must be an address without user, password, key or parameters. Credentials come from the environment "
        "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...) or from the cloud's own files."
    )
