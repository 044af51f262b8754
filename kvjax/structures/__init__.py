"""The selections that policies are made of, each alone a pytree under `lax.scan`, `vmap` and `jit`."""
