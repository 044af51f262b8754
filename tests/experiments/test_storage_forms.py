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


def test_signs_of_the_residual_are_right_on_average_key_by_key_and_vary_as_the_formula_says():
    """Over the matrix, <q, k> of every key within four and a half standard errors of the true one, its variance
    (pi / 2 |q|^2 |r|^2 - <q, r>^2) / D for what the grid leaves, r: rows of the matrix are Gaussian (QJL)."""
    keys, query = (np.random.default_rng(seed).normal(size=(50, 64)).astype(np.float32) for seed in (1, 2))
    query, levels = query[0], storage_forms.lloyd_max(1)
    of_keys = lambda kept: np.asarray(kept)[0, :, 0].astype(np.float64)  # noqa: E731
    x = jnp.asarray(keys[None, :, None])
    seeds = 400
    found = np.stack([of_keys(storage_forms.with_residual_signs(x, levels, seed)) @ query for seed in range(seeds)])
    rest = keys - of_keys(storage_forms.gaussian_grid(x, levels))
    variance = (np.pi / 2 * query @ query * np.sum(rest**2, axis=1) - (rest @ query) ** 2) / 64
    assert (np.abs(found.mean(0) - keys @ query) < 4.5 * np.sqrt(variance / seeds)).all()
    assert abs(np.mean(found.var(0) / variance) - 1) < 0.05


def test_every_part_of_the_form_is_left_out_of_one_row():
    errors = {
        name: np.mean((np.asarray(form.keys(jnp.asarray(X))) - X) ** 2)
        for name, form in storage_forms.forms(3, 64, X.shape[1]).items()
    }
    kvjax = errors.pop("kvjax")
    assert errors.pop("sinks and recent tokens whole") < 0.1 * kvjax  # of 70 all but two
    # Stretching costs a little, for products that are right; what else is left out costs more, where more stands out
    # than the mean.
    assert errors["keys as they are, not stretched"] < kvjax
    assert min(errors["keys' mean not apart"], errors["TurboQuant (square error)"]) > 1.5 * kvjax
    assert errors["scale of the largest"] > 1.2 * kvjax
    assert errors["TurboQuant (inner products)"] > errors["TurboQuant (square error)"]
