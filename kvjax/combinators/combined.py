"""The base class of policies that combine several policies."""

from kvjax.policy import Policy, Requirements, S, merge_requirements


class CombinedPolicies(Policy[S]):
    """Several policies that read the same prompt and compact together.

    Attributes:
        policies: the policies; a field or a property of subclasses.
    """

    policies: tuple[Policy, ...]

    @property
    def compact_every(self) -> int:
        """The smallest `compact_every` of the policies."""
        return min(policy.compact_every for policy in self.policies)

    @property
    def requires(self) -> Requirements:
        """Combined requirements of the policies."""
        return merge_requirements(self.policies)

    @property
    def is_retrieval(self) -> bool:  # type: ignore[override]
        """Whether any of the policies retrieves blocks."""
        return any(policy.is_retrieval for policy in self.policies)

    @property
    def budget_is_rate(self) -> bool:  # type: ignore[override]
        """Whether a budget in percent is a share of the prompt's tokens for any of the policies."""
        return any(policy.budget_is_rate for policy in self.policies)
