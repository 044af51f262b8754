"""The base class of policies that combine several policies."""

from kvjax.policy import Policy, Requirements, S, merge_requirements
from kvjax.spec import CacheSpec


class CombinedPolicies(Policy[S]):
    """Several policies that read the same prompt and compact together.

    Attributes:
        policies: the policies; a field or a property of subclasses.
    """

    policies: tuple[Policy, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.policies:
            raise ValueError("policies=() must hold at least one policy")

    @property
    def compact_every(self) -> int:
        """The smallest `compact_every` of the policies."""
        return min(policy.compact_every for policy in self.policies)

    @property
    def requires(self) -> Requirements:
        """Combined requirements of the policies."""
        return merge_requirements(self.policies)

    def min_budget(self, spec: CacheSpec | None = None) -> int:
        """Returns the largest of the smallest budgets of the policies."""
        return max(policy.min_budget(spec) for policy in self.policies)

    @property
    def is_retrieval(self) -> bool:  # type: ignore[override]
        """Whether any of the policies retrieves blocks."""
        return any(policy.is_retrieval for policy in self.policies)
