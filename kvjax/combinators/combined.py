"""The base class of policies that combine several policies."""

from kvjax.policy import Policy, Requirements, S, merge_requirements


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

    @property
    def is_retrieval(self) -> bool:  # type: ignore[override]
        """Whether any of the policies retrieves blocks."""
        return any(policy.is_retrieval for policy in self.policies)
