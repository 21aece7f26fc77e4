"""Addresses of object stores in settings: `s3://bucket/runs`. No torch and no fsspec here."""

import re

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
# The one package that each needs beside fsspec, as an extra of ours
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure",
          "http": "http", "https": "http"}


def is_url(text: str) -> bool:
    """Whether `text` is an address such as s3://bucket/runs, and no path."""
    return _URL.match(text) is not None


def extra_of(url: str) -> str:
    """Which extra of ours an address needs; "" if it needs none that we know."""
    return EXTRAS.get(url.partition("://")[0], "")


def secrets_in(url: str) -> bool:
    """Whether `url` holds a user and password, or parameters that may be keys, as a signed address has.

    Settings are printed, logged, saved with each checkpoint and seen in the list of processes. The name before the @ of
    abfs is a container's, and the parameters of tcp are a rank's.
    """
    scheme, _, rest = url.lower().partition("://")
    before, at, _ = rest.rpartition("@")
    password = bool(at) and ":" in before  # a key may have an @ or a / in it, which end no user here
    user = "@" in rest.partition("/")[0] and scheme not in ("abfs", "abfss")
    key = "?" in rest and scheme in (*EXTRAS, "http", "https", "ftp")
    return is_url(url) and (password or user or key)


def must_hold_no_secrets(what: str) -> str:
    """The message for an address with `secrets_in` it, which it does not repeat. `what`: the setting."""
    return (
        f"{what} must be an address without user, password, key or parameters. Credentials come from the environment "
        "(AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS, ...) or from the cloud's own files."
    )
