import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.theory import measured_norms


def test_measured_norms_are_maxima():
    vectors = np.zeros((2, 3, 1, 4), np.float32)
    vectors[1, 2, 0] = [1, 2, 2, 4]
    norms = measured_norms(2 * vectors, vectors, 0.5 * vectors.astype(jnp.bfloat16))
    assert norms == (5.0, 10.0, 2.5)


def test_vectors_that_are_not_finite_are_refused():
    valid = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="key vectors are not all finite"):
        measured_norms(valid, valid.at[0, 1].set(jnp.nan), valid)
    with pytest.raises(ValueError, match="value vectors are not all finite"):
        measured_norms(valid, valid, valid.at[0, 1].set(jnp.inf))
