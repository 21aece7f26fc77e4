"""The file system of an address, by fsspec. Data and run directories at a URL are opened here."""

from typing import Any

from rankup.errors import UserError, reason
from train.config.urls import extra_of


def open_filesystem(url: str, **options: Any) -> tuple[Any, str]:
    """fsspec's file system for `url`, an address or a folder, and what it calls that. `options`: of that file system.

    Raises UserError where the package that it needs is not installed, and where fsspec knows no such address.
    """
    try:
        import fsspec  # here: 0.1 s, which a run without any address does without

        opened: tuple[Any, str] = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        extra = extra_of(url)
        way_out = f"pip install 'rankup[{extra}]', or '.[{extra}]' in a checkout" if extra else reason(error)
        raise UserError(f"{url} needs a package that is not installed here. {way_out}.") from None
    except ValueError as error:
        raise UserError(f"{url} must be an address that fsspec knows, got: {reason(error)}") from None
    return opened
