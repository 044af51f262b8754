"""Forms of storage beside one another."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import storage_forms

X = np.random.default_rng(0).normal(size=(2, 70, 2, 64)).astype(np.float32) + 1


def test_lloyd_and_max_s_levels_are_the_published_ones():
    # Max (1960), table I.
    np.testing.assert_allclose(storage_forms.lloyd_max(1), [-0.7979, 0.7979], atol=1e-3)
    np.testing.assert_allclose(storage_forms.lloyd_max(2)[2:], [0.4528, 1.510], atol=1e-3)
    np.testing.assert_allclose(storage_forms.lloyd_max(3)[4:], [0.2451, 0.7560, 1.344, 2.152], atol=1e-3)


@pytest.mark.parametrize("axis", [1, 3])
def test_groups_err_by_half_a_step_at_most(axis):
    kept = np.asarray(storage_forms.grouped(2, jnp.asarray(X), axis))
    moved, of_kept = np.moveaxis(X, axis, -1)[..., :64], np.moveaxis(kept, axis, -1)[..., :64]
    groups, of_kept = (x.reshape(*x.shape[:-1], 2, 32) for x in (moved, of_kept))
    step = (groups.max(-1) - groups.min(-1)) / 3
    assert (np.abs(of_kept - groups).max(-1) <= step / 2 * 1.0001).all()
    assert all(len(np.unique(group)) <= 4 for group in of_kept.reshape(-1, 32)[:50])


def test_signs_of_the_residual_make_inner_products_right_on_average():
    keys = jnp.asarray(np.random.default_rng(1).normal(size=(1, 500, 1, 64)), jnp.float32)
    query = np.random.default_rng(2).normal(size=64)
    levels = storage_forms.lloyd_max(1)
    true = np.asarray(keys)[0, :, 0] @ query
    slope = lambda kept: true @ (np.asarray(kept)[0, :, 0] @ query) / (true @ true)  # noqa: E731
    slopes = [slope(storage_forms.with_residual_signs(keys, levels, seed)) for seed in range(100)]
    assert abs(np.mean(slopes) - 1) < 4 * np.std(slopes) / 10 < 0.1
    assert slope(storage_forms.gaussian_grid(keys, levels)) < 0.7


def test_every_part_of_the_form_is_left_out_of_one_row():
    errors = {
        name: np.mean((np.asarray(form.keys(jnp.asarray(X))) - X) ** 2)
        for name, form in storage_forms.forms(3, 64).items()
    }
    kvjax = errors.pop("kvjax")
    # Stretching costs a little, for products that are right; what else is left out costs more, where more stands out
    # than the mean.
    assert errors["keys as they are, not stretched"] < kvjax
    assert min(errors["keys' mean not apart"], errors["TurboQuant (square error)"]) > 1.5 * kvjax
    assert errors["scale of the largest"] > 1.2 * kvjax
    assert errors["TurboQuant (inner products)"] > errors["TurboQuant (square error)"]
