import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.theory import measured_norms


def test_norms_are_the_largest_of_the_vectors_given():
    vectors = np.zeros((2, 3, 1, 4), np.float32)
    vectors[1, 2, 0] = [1, 2, 2, 4]
    found = measured_norms(2 * vectors, vectors, 0.5 * vectors.astype(jnp.bfloat16))
    assert found == (5.0, 10.0, 2.5)


def test_norms_of_what_is_not_finite_are_refused():
    good = jnp.ones((2, 4))
    with pytest.raises(ValueError, match="key vectors are not all finite"):
        measured_norms(good, good.at[0, 1].set(jnp.nan), good)
    with pytest.raises(ValueError, match="value vectors are not all finite"):
        measured_norms(good, good, good.at[0, 1].set(jnp.inf))
