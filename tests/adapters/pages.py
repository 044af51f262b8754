"""The code of the pages in docs/adapters, and the policies that it supports."""

import pathlib
import re

import pytest

import kvjax
from kvjax.registry import POLICIES as REGISTERED
from tests.kvjax.support import ON_A_MESH

DIRECTORY = pathlib.Path(__file__).parents[2] / "docs" / "adapters"
BLOCK = re.compile(r"^```python\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
# The pages pass neither RoPE frequencies nor a repetition of the prompt.
UNSUPPORTED = {
    "attention_matching": "rope_frequencies",
    "compactor": "rope_frequencies",
    "expected_attention": "rope_frequencies",
    "kvzip": "KVzip needs a repetition of the prompt",
    "leverage_scores": "rope_frequencies",
}
_BY_CLASS = {type(policy): policy for name, policy in ON_A_MESH.items() if "reindexed" not in name}
_BY_CLASS[kvjax.KVzip] = kvjax.KVzip(20, sinks=2, compact_every=8)
POLICIES = {name: _BY_CLASS[policy_class] for name, policy_class in REGISTERED.items()}
supported_policies = pytest.mark.parametrize("policy", [name for name in POLICIES if name not in UNSUPPORTED])
unsupported_policies = pytest.mark.parametrize("policy", UNSUPPORTED)


def load_page(name):
    """Runs the code of a page and returns the names that it defines."""
    path, names = DIRECTORY / f"{name}.md", {}
    [block] = BLOCK.findall(path.read_text())
    assert len(block.splitlines()) <= 60
    exec(compile(block, str(path), "exec"), names)
    return names
