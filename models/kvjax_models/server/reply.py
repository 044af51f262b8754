"""The answer to a request for completions, entire or as a stream, from its submission to its line in the log."""

import asyncio
import collections
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kvjax_models.engine import Collector, Output
from kvjax_models.server.answers import Format, event
from kvjax_models.server.log import add_details, report
from kvjax_models.server.metrics import Metrics
from kvjax_models.server.responses import EventStream, json_response, unless_disconnected
from kvjax_models.server.schema import GenerationRequest
from kvjax_models.server.worker import Job, Worker


class Reply:
    """The answer to one request, its numbers of tokens, and how it ended."""

    def __init__(self, worker: Worker, metrics: Metrics, body: GenerationRequest, job: Job, form: Format) -> None:
        """Submits the job; a RequestError refuses it."""
        self._worker, self._metrics, self._body, self._job, self._form = worker, metrics, body, job, form
        self._tokens: dict[int, list[int]] = collections.defaultdict(list)  # new ones of every sequence
        self._num_unfinished = len(job.prompts)
        self._outcome = "cancelled"  # until it is known
        worker.submit(job)

    async def respond(self, request: Request, start: float) -> Response:
        """Returns the response after the first output, so that an error before it has its own status.

        Args:
            start: time of the request (`time.monotonic`).
        """

        def close() -> None:
            self._close(request, start)

        is_streamed = False
        try:
            first = await unless_disconnected(request, self._next_output())
            self._metrics.first_token.observe(time.monotonic() - start)
            if self._body.stream:
                response = EventStream(request, self._events(first), close)
                is_streamed = True
                return response
            return json_response(await unless_disconnected(request, self._answer(first)))
        finally:
            if not is_streamed:
                close()

    def _close(self, request: Request, start: float) -> None:
        """Ends the job and counts it."""
        job, usage = self._job, self._usage()
        cached, new_tokens = usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
        self._worker.abort(job)
        prompt = f"{usage['prompt_tokens']} prompt tokens ({cached} cached)"
        add_details(request.scope, f"{self._outcome}; {prompt}, {new_tokens} new tokens")
        self._metrics.requests.labels(self._outcome).inc()
        self._metrics.prompt_tokens.inc(sum(len(prompt) - job.num_reused for prompt in job.prompts))
        self._metrics.cached_tokens.inc(cached)
        self._metrics.new_tokens.inc(new_tokens)
        self._metrics.duration.observe(time.monotonic() - start)

    async def _next_output(self) -> Output:
        """Returns the next output of the job, or raises its error."""
        output = await self._job.outputs.get()
        if isinstance(output, Exception):
            self._outcome = "error"
            raise output
        self._tokens[output.number] += output.tokens
        if output.finish_reason is not None:
            self._num_unfinished -= 1
            if not self._num_unfinished:
                self._outcome = output.finish_reason
        return output

    async def _outputs(self, first: Output) -> AsyncIterator[Output]:
        """Yields all outputs of the job."""
        yield first
        while self._num_unfinished:
            yield await self._next_output()

    async def _answer(self, first: Output) -> bytes:
        """Returns an entire answer."""
        collector = Collector()
        completions = [collector.add(output) async for output in self._outputs(first)]
        choices = []
        for one in sorted((one for one in completions if one is not None), key=lambda one: one.number):
            # The log-probabilities of long answers are millions of values.
            choice = await asyncio.to_thread(self._form.choice, one)
            choices.append(choice | await self._citations(one.number))
        return await asyncio.to_thread(self._form.answer, choices, self._usage())

    async def _events(self, first: Output) -> AsyncIterator[bytes]:
        """Yields the events of a streamed answer; an error is the last one."""
        try:
            async for output in self._outputs(first):
                if (part := self._form.delta(output)) is not None:
                    if output.finish_reason is not None:
                        part |= await self._citations(output.number)
                    yield self._form.chunk([part], None)
            if self._body.stream_options is not None and self._body.stream_options.include_usage:
                yield self._form.chunk([], self._usage())
            yield b"data: [DONE]\n\n"
        except Exception as error:
            yield event(report(error, "a streamed answer has failed").body)

    async def _citations(self, number: int) -> dict[str, Any]:
        """Returns the citations of a finished sequence, for which the model processes question and answer once more."""
        document = self._job.document
        if document is None or not self._body.cite:
            return {}
        prompt, tokens = self._job.prompts[number], self._tokens[number]
        return {"citations": [one._asdict() for one in await self._worker.call(document.cite, prompt, tokens)]}

    def _usage(self) -> dict[str, Any]:
        """Returns the numbers of tokens; each prompt counts once for all its choices."""
        job, count = self._job, len(self._job.prompts)
        before = 0 if job.document is None else job.document.num_tokens
        prompt_tokens = (before * count + sum(map(len, job.prompts))) // self._body.n
        new_tokens = sum(map(len, self._tokens.values()))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": new_tokens,
            "total_tokens": prompt_tokens + new_tokens,
            "prompt_tokens_details": {"cached_tokens": (before + job.num_reused) * count // self._body.n},
        }
