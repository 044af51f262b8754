"""Decides which requests start, in which group their rows are, and which groups a program computes; without JAX.

A *group* is rows of one size. It has a width, of which some rows may be free.

1. Requests wait in the order of their arrival. The first one starts when the bytes that its row may come to take fit,
   and a row is left; later ones do not pass it, because a long request would otherwise wait forever.
2. Prompts of similar lengths and one size start with it, and are prefilled as one batch; equal prompts are prefilled
   once.
3. Rows that are prefilled join the group of their size between two of its blocks. A group far from the end of its block
   lets them begin a second one.
4. Groups that ran apart for a while are computed by one program from then on: compiling it for every mix of groups that
   occurs would take longer than it saves.
"""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Sequence

from kvjax.messages import format_bytes

MAX_PROGRAMS = 40  # of decode steps, after which groups have free rows rather than another width
MAX_WAIT = 32  # steps that rows wait for the end of a group's block, rather than begin a second group
_APART_STEPS = 32  # of a mix of groups, before a program is compiled for it: about the time that compilation takes
_MAX_MIXES = 16  # that programs are compiled for


@dataclasses.dataclass(eq=False)
class Waiting:
    """A request that waits for a row.

    Attributes:
        number: number of the request.
        row_bytes: the bytes that its row takes at most.
        prompt: requests with an equal value have the same state after their prompts, except for the seed of sampling.
        num_tokens: tokens to process.
        batch: requests with an equal value can be prefilled as one batch; None to be prefilled alone.
        pads: whether such a batch may have rows without a request, because its tokens are few.
    """

    number: int
    row_bytes: int
    prompt: Hashable
    num_tokens: int
    batch: Hashable | None = None
    pads: bool = False


class Scheduler:
    """Requests that wait, and the rows and bytes of those that have started.

    Attributes:
        rows: maximum number of rows.
        max_bytes: maximum bytes of all rows; None for no limit.
        waiting: requests that wait for a row.
        started: bytes of the requests that have started, by number.
    """

    def __init__(self, rows: int, max_bytes: int | None = None, *, max_batch_tokens: int = 8192) -> None:
        """Creates a scheduler without requests.

        Args:
            max_bytes: maximum bytes of all rows.
            max_batch_tokens: maximum number of tokens that are prefilled as one batch.
        """
        self.rows, self.max_bytes, self._max_batch_tokens = rows, max_bytes, max_batch_tokens
        self.waiting: collections.deque[Waiting] = collections.deque()
        self.started: dict[int, int] = {}

    @property
    def num_free_rows(self) -> int:
        """Rows that no request occupies."""
        return self.rows - len(self.started)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the rows of all requests that have started may come to take."""
        return sum(self.started.values())

    @property
    def is_blocked(self) -> bool:
        """Whether no request has started, and the bytes of the first one that waits do not fit."""
        return bool(self.waiting) and not self.started and not self._fits([self.waiting[0]])

    def add(self, request: Waiting) -> None:
        """Appends a request to the queue.

        Raises:
            ValueError: if its row can never fit.
        """
        if self.max_bytes is not None and request.row_bytes > self.max_bytes:
            raise ValueError(
                f"the row of the request takes up to {format_bytes(request.row_bytes)}, more than the "
                f"{format_bytes(self.max_bytes)} for all rows; allow more memory, use a smaller budget, or shorten the "
                "prompt or max_new_tokens"
            )
        self.waiting.append(request)

    def start(self) -> list[Waiting]:
        """Starts the next requests, which are prefilled together; empty if the first one does not fit."""
        chosen: list[Waiting] = []
        prompts: dict[Hashable, None] = {}
        for request in self.waiting:
            if not self._fits([*chosen, request]):
                break
            if chosen and not self._joins(request, chosen[0], prompts):
                continue
            chosen.append(request)
            prompts[request.prompt] = None
        # Other numbers than powers of two are further programs, or need rows without a request.
        padding = width_for(len(prompts)) - len(prompts) if chosen else 0
        if chosen and not (chosen[0].pads and self._fits(chosen, padding * chosen[0].row_bytes)):
            kept = [*prompts][: 1 << (len(prompts).bit_length() - 1)]
            chosen = [request for request in chosen if request.prompt in kept]
        for request in chosen:
            self.waiting.remove(request)
            self.started[request.number] = request.row_bytes
        return chosen

    def _fits(self, chosen: Sequence[Waiting], padding_bytes: int = 0) -> bool:
        """Returns whether there are rows and bytes for requests that are about to start, and bytes for padding."""
        needed = self.reserved_bytes + sum(request.row_bytes for request in chosen) + padding_bytes
        return len(chosen) <= self.num_free_rows and (self.max_bytes is None or needed <= self.max_bytes)

    def _joins(self, request: Waiting, first: Waiting, prompts: Collection[Hashable]) -> bool:
        """Returns whether a request is prefilled together with the first one."""
        if request.prompt in prompts:
            return True
        tokens = max(request.num_tokens, first.num_tokens) * (len(prompts) + 1)
        return request.batch is not None and request.batch == first.batch and tokens <= self._max_batch_tokens

    def retry(self, requests: Sequence[Waiting]) -> None:
        """Returns the requests of a failed batch to the head of the queue, from which they are prefilled alone."""
        for request in requests:
            request.batch = None
            del self.started[request.number]
        self.waiting.extendleft(reversed(requests))

    def finish(self, number: int) -> None:
        """Ends a request that waits or has started."""
        if self.started.pop(number, None) is None:
            self.waiting = collections.deque(request for request in self.waiting if request.number != number)


def width_for(rows: int, width: int = 0) -> int:
    """Returns the width of a group: 1, 2, 4, or a multiple of 4, because each is a program.

    Args:
        width: its width so far, which becomes smaller when half of the rows are free.
    """
    if rows <= width < 2 * rows:
        return width
    return 1 << (rows - 1).bit_length() if rows <= 4 else -(-rows // 4) * 4


class Mixes:
    """Which groups one program computes.

    Attributes:
        max_groups: maximum number of groups of a program.
    """

    def __init__(self, max_groups: int) -> None:
        """Creates an empty record."""
        self.max_groups = max_groups
        self._steps: collections.Counter[tuple[Hashable, ...]] = collections.Counter()
        self._compiled: set[tuple[Hashable, ...]] = set()

    def split(self, shapes: Sequence[Hashable]) -> list[list[int]]:
        """Returns the groups of every program: mixes that are compiled, the largest first, and single groups.

        Args:
            shapes: shape of every group, in an order in which equal mixes are equal.

        Returns:
            Indices of groups.
        """
        programs: list[list[int]] = []
        left = [*range(len(shapes))]
        for mix in sorted(self._compiled, key=len, reverse=True):
            while (indices := _find(mix, shapes, left)) is not None:
                programs.append(indices)
                left = [index for index in left if index not in indices]
        return sorted([*programs, *([index] for index in left)])

    def count(self, shapes: Sequence[Hashable], steps: int) -> None:
        """Counts the steps of groups, after which the next ones of the same mix may be one program."""
        for first in range(0, len(shapes), self.max_groups):
            mix = tuple(shapes[first : first + self.max_groups])
            self._steps[mix] += steps
            if len(mix) > 1 and self._steps[mix] >= _APART_STEPS and len(self._compiled) < _MAX_MIXES:
                self._compiled.add(mix)


def _find(mix: Sequence[Hashable], shapes: Sequence[Hashable], left: Sequence[int]) -> list[int] | None:
    """Returns the first ones of some groups that are a mix, in its order; None if they are not."""
    left, indices = [*left], []
    for shape in mix:
        index = next((one for one in left if shapes[one] == shape), None)
        if index is None:
            return None
        left.remove(index)
        indices.append(index)
    return indices
