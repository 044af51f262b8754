"""The directory in which kvjax keeps files that it can create again: downloaded models and compiled programs."""

import os
import pathlib

CACHE_VARIABLE = "KVJAX_CACHE"  # environment variable with another directory


def user_cache_directory() -> pathlib.Path:
    """Returns `$KVJAX_CACHE`, else `$XDG_CACHE_HOME/kvjax`, else `~/.cache/kvjax`; the directory may not exist.

    Raises:
        FileNotFoundError: if neither a home directory nor any of the variables is set, or if `$KVJAX_CACHE` begins with
            the name of an unknown user.
    """
    if directory := os.environ.get(CACHE_VARIABLE):
        try:
            return pathlib.Path(directory).expanduser()
        except RuntimeError:
            raise FileNotFoundError(
                f"{CACHE_VARIABLE}={directory!r} names a user without a home directory; set it to another directory"
            ) from None
    if directory := os.environ.get("XDG_CACHE_HOME"):
        return pathlib.Path(directory) / "kvjax"
    try:
        return pathlib.Path.home() / ".cache" / "kvjax"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; set {CACHE_VARIABLE} to a directory for downloaded models") from error
