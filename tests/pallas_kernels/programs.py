"""What a traced program holds."""

from collections.abc import Iterator
from typing import Any

import jax


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, but for those inside kernels."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "jaxpr") or hasattr(x, "eqns")):
                if (inner := getattr(inner, "jaxpr", inner)) is not None and hasattr(inner, "eqns"):
                    yield from equations(inner)
