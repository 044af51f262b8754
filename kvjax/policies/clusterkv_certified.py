"""ClusterKV with a certificate: a bound on the attention that was missed, and recall until it is small enough."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.policies.clusterkv import Clustered, ClusterKV
from kvjax.recall import stored_blocks
from kvjax.segment import Choice
from kvjax.state import state, static
from kvjax.structures.clusters import unread_mass


@state
class Certificate:
    """What attention missed at most, as far as the last appended token's queries go."""

    missing: Float[Array, "B H_q"]  # float32, the bound on the last step's missing mass
    rounds: Int[Array, "B"]  # int32 rounds of recall so far, one for every appended token at least
    steps: Int[Array, "B"]  # int32 appended tokens so far


@state
class Certified(Clustered):
    certificate: Certificate
    logit_cap: float | None = static()


@dataclasses.dataclass(frozen=True)
class ClusterKVCertified(ClusterKV):
    """As `ClusterKV` (ours): every step leaves in the state an upper bound on the share of the appended token's
    attention that lies on tokens which were not read, for every query head.

    The keys of cluster c lie within its radius r_c of its mean key m_c, so n unread ones of it hold no more mass than
    n exp((<q, m_c> + |q| r_c) / sqrt(D)). Attention's output is off by at most twice the share times the largest norm
    of a value, with residual clusters or without: those, too, weigh no more than that bound.

    Attributes:
        target: recalls in rounds, each of the budget's tokens in whole blocks, until that share is at most this for all
            query heads of the row; None: recalls once, as `ClusterKV`. Bytes read are those of one round.
    """

    target: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and not 0 <= self.target < 1:
            raise ValueError(f"target={self.target}; a share of attention that may be missing lies in [0, 1)")

    def init(self, spec, row_keys) -> Certified:
        none = lambda: jnp.zeros(spec.batch, jnp.int32)  # noqa: E731
        certificate = Certificate(jnp.zeros((spec.batch, spec.query_heads)), none(), none())
        return Certified(**vars(super().init(spec, row_keys)), certificate=certificate, logit_cap=spec.logit_cap)

    def read(self, state, newer):
        window, recalled = super().read(state, newer)
        stored = stored_blocks(state.store)
        blocks = min(stored, max(1, -(-self.tokens // self.places)))  # of one round: at least one, so that rounds end

        def choose(query: Float[Array, "B 1 H_q D"], round: Int[Array, "B"] | None) -> Choice:
            if round is None:
                choice = recalled.choose(query, None)
            else:
                tokens, skip = stored * self.places, round * blocks
                choice = self._nearest(state.clusters, query, tokens=tokens, blocks=blocks, skip=skip)
            return choice._replace(unread=unread_mass(state.clusters, query, choice.taken, state.logit_cap))

        index = (*recalled.index, state.clusters.radius)
        rounds = -(-stored // max(blocks, 1))
        return window, dataclasses.replace(recalled, choose=choose, index=index, target=self.target, rounds=rounds)

    def observe(self, state, seen) -> Certified:
        old, (_, recall), real = state.certificate, seen.parts, seen.real
        last = real.shape[1] - 1 - jnp.argmax(real[:, ::-1], axis=1)
        newest = jnp.take_along_axis(recall.missing, last[:, None, None], axis=1)[:, 0]
        certificate = Certificate(
            missing=jnp.where(jnp.any(real, axis=1)[:, None], newest, old.missing),
            rounds=old.rounds + jnp.sum(jnp.where(real, recall.rounds, 0), axis=1),
            steps=old.steps + jnp.sum(real, axis=1, dtype=jnp.int32),
        )
        return dataclasses.replace(state, certificate=certificate)
