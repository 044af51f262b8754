"""Measures time with and without the time that JAX spends tracing and compiling."""

import functools
import time

import jax

_COMPILE_EVENTS = tuple(
    f"/jax/core/compile/{name}_duration" for name in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
)


class _CompileTimer:
    """Measures the seconds that this process spends tracing, lowering and compiling, from its creation on."""

    def __init__(self) -> None:
        """Starts to listen to JAX's events."""
        self._intervals: list[tuple[float, float]] = []
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event not in _COMPILE_EVENTS:
            return
        end = time.perf_counter()
        # Functions are traced inside of others, whose event follows and contains theirs.
        while self._intervals and self._intervals[-1][0] >= end - duration_secs:
            self._intervals.pop()
        self._intervals.append((end - duration_secs, end))

    @property
    def seconds(self) -> float:
        """Seconds so far, without counting nested events twice."""
        return sum(end - start for start, end in self._intervals)


@functools.cache
def _compile_timer() -> _CompileTimer:
    """Returns the timer of this process; JAX keeps listeners forever."""
    return _CompileTimer()


class Stopwatch:
    """Measures the seconds since its creation, with and without compilation."""

    def __init__(self) -> None:
        """Starts."""
        self._timer = _compile_timer()
        self._start, self._compiled = time.perf_counter(), self._timer.seconds

    @property
    def compile_seconds(self) -> float:
        """Seconds of compilation since the creation."""
        return self._timer.seconds - self._compiled

    @property
    def seconds(self) -> float:
        """Seconds since the creation, without compilation."""
        return time.perf_counter() - self._start - self.compile_seconds
