"""What must be known of several policies together, before there is a cache."""

from kvjax.policy import ALL_QUERIES, Policy, Repeat, repeat_of


class Several(Policy):
    """A policy made of `policies`."""

    policies: tuple[Policy, ...]

    @property
    def compact_every(self) -> int:
        return min(policy.compact_every for policy in self.policies)

    @property
    def prompt_queries(self) -> int:
        asked = [policy.prompt_queries for policy in self.policies]
        return ALL_QUERIES if ALL_QUERIES in asked else max(asked)

    @property
    def repeat(self) -> Repeat | None:
        return repeat_of(self.policies)

    @property
    def observes(self) -> bool:
        return any(policy.observes for policy in self.policies)

    @property
    def streams(self) -> bool:
        return all(policy.streams for policy in self.policies)

    @property
    def recalls(self) -> bool:
        return any(policy.recalls for policy in self.policies)


def check_policies(policies: tuple[Policy, ...]) -> None:
    """Raises a ValueError where there is none."""
    if not policies:
        raise ValueError(f"policies={policies!r}; there must be at least one policy")
