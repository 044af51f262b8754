"""Decides which request gets which batch row, and which requests are prefilled together; works on numbers, without JAX.

1. Requests wait in the order of their arrival. One that shares a prefix needs a row of a group that has this prefix, or
   of a group without requests; any other one takes any row.
2. A request whose row is not free lets later ones pass.
3. The first request that has a row starts its prefill. The requests at the head of the queue that only append a suffix
   to a shared prefix start with it, if all rows together take at most twice the time of their blocks alone: padded to
   the longest one, a batch costs as much for every row.
4. A request with the prompt of another one waits for its prefill, whose state it can take.
"""

import collections
import dataclasses
from collections.abc import Collection, Hashable


@dataclasses.dataclass(eq=False)
class Waiting:
    """A request that waits for a row.

    Attributes:
        number: number of the request.
        prompt: requests with an equal value have the same state after their prompts, except for the seed of sampling.
        num_tokens: tokens to process.
        prefix: the prefix that the row shares with others; None for rows with all their tokens.
        can_batch: whether it can be prefilled together with others.
    """

    number: int
    prompt: Hashable
    num_tokens: int
    prefix: Hashable | None = None
    can_batch: bool = False


class Scheduler:
    """The rows of a batch, in groups if they share prefixes.

    Attributes:
        rows: number of rows.
        waiting: requests that wait for a row.
        prefilling: requests that are being prefilled, by row.
        running: numbers of the requests that are decoded, by row.
        prefixes: the prefix of every group, which stays until another one takes its place.
    """

    def __init__(self, rows: int, groups: int = 0, block_size: int = 1) -> None:
        """Creates a scheduler without requests.

        Args:
            rows: number of rows; a multiple of `groups`.
            groups: number of groups whose rows share a prefix; 0 for rows without one.
            block_size: tokens of a block, by which suffixes are processed.
        """
        self.rows, self._block_size = rows, block_size
        self.waiting: collections.deque[Waiting] = collections.deque()
        self.prefilling: dict[int, Waiting] = {}
        self.running: dict[int, int] = {}
        self.prefixes: list[Hashable | None] = [None] * groups

    @property
    def num_free_rows(self) -> int:
        """Rows that no request occupies."""
        return self.rows - len(self.running) - len(self.prefilling)

    def add(self, request: Waiting) -> None:
        """Appends a request to the queue."""
        self.waiting.append(request)

    def start(self, ready_prompt: Hashable | None = None) -> dict[int, Waiting]:
        """Moves the next requests from the queue to `prefilling`.

        Args:
            ready_prompt: `Waiting.prompt` of a state that exists already.

        Returns:
            The requests by row; more than one are prefilled together. Empty if no request has a free row.
        """
        self.prefilling = self._batch(ready_prompt) or self._first()
        for request in self.prefilling.values():
            self.waiting.remove(request)
        return self.prefilling

    def run(self) -> None:
        """Moves the requests that are prefilled to the running ones."""
        self.running |= {row: request.number for row, request in self.prefilling.items()}
        self.prefilling = {}

    def retry(self) -> list[int]:
        """Returns the requests of a failed prefill to the head of the queue, from which they are prefilled alone.

        Returns:
            The number of a request that was alone, and has failed.
        """
        requests, self.prefilling = [*self.prefilling.values()], {}
        if len(requests) == 1:
            return [requests[0].number]
        for request in requests:
            request.can_batch = False
        self.waiting.extendleft(reversed(requests))
        return []

    def free(self, rows: Collection[int]) -> None:
        """Ends the running requests of rows."""
        for row in rows:
            del self.running[row]

    def cancel(self, number: int) -> bool:
        """Removes a request that waits or is being prefilled; returns whether there was one."""
        for request in self.waiting:
            if request.number == number:
                self.waiting.remove(request)
                return True
        for row, request in self.prefilling.items():
            if request.number == number:
                del self.prefilling[row]
                return True
        return False

    def _first(self) -> dict[int, Waiting]:
        """Returns the first request that has a free row, by that row."""
        for request in self.waiting:
            if (row := self._find_row(request.prefix)) is not None:
                return {row: request}
        return {}

    def _batch(self, ready_prompt: Hashable | None) -> dict[int, Waiting]:
        """Returns requests that are prefilled together, by row; empty if that saves no time."""
        prefixes = [*self.prefixes]
        batch: dict[int, Waiting] = {}
        for request in self.waiting:
            if not request.can_batch or request.prompt == ready_prompt:
                break
            if any(request.prompt == one.prompt for one in batch.values()):
                break
            if (row := self._find_row(request.prefix, batch)) is not None:
                batch[row] = request
        blocks = [-(-request.num_tokens // self._block_size) for request in batch.values()]
        if len(batch) > 1 and max(blocks) * self.rows <= 2 * sum(blocks):
            return batch
        self.prefixes = prefixes
        return {}

    def _find_row(self, prefix: Hashable | None, taken: Collection[int] = ()) -> int | None:
        """Returns a free row; for a prefix a row of its group, which takes the place of one that no row shares.

        Args:
            prefix: the prefix of a request.
            taken: rows that are not free although no request runs in them.
        """
        free = [row for row in range(self.rows) if row not in self.running and row not in taken]
        if prefix is None:
            return next(iter(free), None)
        if prefix in self.prefixes:
            return next((row for row in self.group(self.prefixes.index(prefix)) if row in free), None)
        # Empty groups first, so that prefixes stay as long as possible.
        unused = [group for group in range(len(self.prefixes)) if set(self.group(group)) <= set(free)]
        group = min(unused, key=lambda group: self.prefixes[group] is not None, default=None)
        if group is None:
            return None
        self.prefixes[group] = prefix
        return self.group(group)[0]

    def group(self, number: int) -> range:
        """Returns the rows of a group."""
        size = self.rows // len(self.prefixes)
        return range(number * size, (number + 1) * size)
