"""The skew of InfiniGen: orthogonal matrices that concentrate products of queries and keys in few dimensions."""

import dataclasses
import functools
import hashlib
import os
import pathlib

import numpy as np
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class Skew:
    """A file of matrices, identified by its content.

    Attributes:
        path: path of an npz file with `skew`, float32 [layers, H_kv, D, D].
        sha256: digest of the file.
    """

    path: str = dataclasses.field(compare=False)
    sha256: str

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Skew":
        """Loads a file.

        Returns:
            The skew.

        Raises:
            ValueError: if the file has no matrices, or matrices that are not orthogonal (which would change logits).
        """
        skew = cls(str(path), hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest())
        skew.matrices()
        return skew

    def matrices(self) -> Float[np.ndarray, "L H_kv D D"]:
        """Returns the matrices; raises a ValueError if the file has changed."""
        return _matrices(self.path, self.sha256)


@functools.lru_cache(maxsize=4)
def _matrices(path: str, sha256: str) -> Float[np.ndarray, "L H_kv D D"]:
    if hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest() != sha256:
        raise ValueError(f"skew={path} has changed since it was loaded; load it again")
    with np.load(path) as arrays:
        if "skew" not in arrays:
            raise ValueError(f"skew={path} has arrays {sorted(arrays)}, expected an array 'skew'")
        skew = arrays["skew"].astype(np.float32)
    if skew.ndim != 4 or skew.shape[2] != skew.shape[3]:
        raise ValueError(f"skew={path} has shape {skew.shape}, expected [layers, H_kv, D, D]")
    if np.abs(np.swapaxes(skew, 2, 3) @ skew - np.eye(skew.shape[3])).max() > 1e-3:
        raise ValueError(f"skew={path} has matrices that are not orthogonal")
    return skew
