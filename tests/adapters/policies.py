"""A small policy of every name in the registry, and the code of pages, for tests of adapters."""

import pathlib
import re

import pytest

import kvjax
from kvjax.registry import POLICIES as REGISTERED
from tests.kvjax.support import ON_A_MESH

# Policies that read a prompt twice or need predicted scores; only keras-hub's adapter can run KVzip.
KVZIP, KVGRAD, KVZAP = (
    policy_class(20, sinks=2, compact_every=8) for policy_class in (kvjax.KVzip, kvjax.KVgrad, kvjax.KVzap)
)
_BY_CLASS = {type(policy): policy for name, policy in ON_A_MESH.items() if "reindexed" not in name}
POLICIES = {name: _BY_CLASS[policy_class] for name, policy_class in REGISTERED.items() if policy_class in _BY_CLASS}
POLICIES["streaming_llm:reindex"] = ON_A_MESH["streaming_llm_reindexed"]
assert len(POLICIES) + 3 == len(REGISTERED) + 1
every_policy = pytest.mark.parametrize("policy", POLICIES)


def run_page(name, **names):
    """Runs the code of a page in docs/adapters, which uses `names`, and returns all names that it defines."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "adapters" / f"{name}.md").read_text()
    assert len(text.splitlines()) <= 60
    [code] = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    exec(compile(code, name, "exec"), names)
    return names
