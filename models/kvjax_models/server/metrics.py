"""Metrics in Prometheus' format."""

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvjax_models.server.worker import Worker

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Counters of requests and tokens, and gauges that read the worker.

    Attributes:
        requests: finished requests by outcome: "stop", "length", "error" or "cancelled".
        prompt_tokens: tokens of prompts and questions that were read.
        cached_tokens: tokens of documents and conversations that were not read again.
        new_tokens: generated tokens.
        first_token: seconds from a request to its first token.
        duration: seconds from a request to its end.
    """

    def __init__(self, worker: Worker) -> None:
        """Creates metrics in a new registry."""
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("kvjax_requests", "Finished requests", ["outcome"], registry=registry)
        self.prompt_tokens = Counter("kvjax_prompt_tokens", "Tokens of prompts and questions", registry=registry)
        self.cached_tokens = Counter("kvjax_cached_tokens", "Tokens that were not read again", registry=registry)
        self.new_tokens = Counter("kvjax_new_tokens", "Generated tokens", registry=registry)
        self.first_token = Histogram(
            "kvjax_first_token_seconds", "Seconds to the first token", buckets=_SECONDS, registry=registry
        )
        self.duration = Histogram("kvjax_request_seconds", "Seconds of requests", buckets=_SECONDS, registry=registry)
        for name, text, function in (
            ("kvjax_rows_running", "Batch rows that requests occupy", lambda: worker.num_rows),
            ("kvjax_sequences_waiting", "Sequences that wait for a row", lambda: worker.num_waiting),
            ("kvjax_documents", "Documents in memory", lambda: len(worker.documents or ())),
            ("kvjax_documents_bytes", "Bytes of documents in memory", lambda: worker.held_bytes),
            ("kvjax_conversations", "Answers that can be continued", lambda: len(worker.conversations)),
            ("kvjax_conversations_bytes", "Bytes of their caches", lambda: worker.conversations.held_bytes),
        ):
            Gauge(name, text, registry=registry).set_function(function)

    def render(self) -> bytes:
        """Returns all metrics as text."""
        return prometheus_client.generate_latest(self._registry)
