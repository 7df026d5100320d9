"""A server's counters of speculative decoding, read from its Prometheus page before and after the work in question.

    before = read_counters("http://localhost:8000/metrics")
    ...
    counts = settled_counters("http://localhost:8000/metrics") - before
    counts.acceptance_length

Two dialects are known; both count accepted tokens without the bonus token. vLLM: `vllm:spec_decode_num_drafts_total` (rounds),
`..._num_draft_tokens_total`, `..._num_accepted_tokens_total` and, with the label `position` from 0,
`..._num_accepted_tokens_per_pos_total`. dspine: `dspine_rounds_total`, `dspine_drafted_tokens_total` and
`dspine_accepted_tokens_total`, the latter two with `position` from 1. SGLang's page has averages only, which are no counts: see
`evaluation.served`.
"""

from __future__ import annotations

import http.client
import re
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dspine.errors import UserError

TIMEOUT_S = 10.0
SETTLE_S = 0.05  # servers update their counters a moment after they have answered
SETTLE_READS = 40
# Name -> (what it counts, its first position). vLLM's forks keep its names under a prefix of their own.
_NAMES = {
    "spec_decode_num_drafts": ("rounds", 0),
    "spec_decode_num_draft_tokens": ("drafted", 0),
    "spec_decode_num_accepted_tokens": ("accepted", 0),
    "spec_decode_num_accepted_tokens_per_pos": ("accepted_at", 0),
    "dspine_rounds": ("rounds", 0),
    "dspine_drafted_tokens": ("drafted", 1),
    "dspine_accepted_tokens": ("accepted", 1),
}
_PREFIX = re.compile(r"^\w+:")


@dataclass(frozen=True, kw_only=True)
class SpecCounts:
    """What was drafted and accepted. `accepted_at[j]` counts rounds that accepted position j + 1, `drafted_at[j]` those that
    proposed it; () where that is not told."""

    rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()

    @property
    def acceptance_length(self) -> float:
        """tau, as decoding.stats defines it; 0 where no round has run."""
        return self.num_accepted_tokens / self.rounds + 1.0 if self.rounds else 0.0

    def __add__(self, other: SpecCounts) -> SpecCounts:
        return self._combined(other, 1)

    def __sub__(self, earlier: SpecCounts) -> SpecCounts:
        return self._combined(earlier, -1)

    def _combined(self, other: SpecCounts, sign: int) -> SpecCounts:
        def both(ours: tuple[int, ...], theirs: tuple[int, ...]) -> tuple[int, ...]:
            ours, theirs = (a + (0,) * (max(len(ours), len(theirs)) - len(a)) for a in (ours, theirs))
            return tuple(a + sign * b for a, b in zip(ours, theirs, strict=True))

        return SpecCounts(
            rounds=self.rounds + sign * other.rounds,
            num_drafted_tokens=self.num_drafted_tokens + sign * other.num_drafted_tokens,
            num_accepted_tokens=self.num_accepted_tokens + sign * other.num_accepted_tokens,
            drafted_at=both(self.drafted_at, other.drafted_at),
            accepted_at=both(self.accepted_at, other.accepted_at),
        )


def parse_counters(page: str) -> SpecCounts | None:
    """The counters of a Prometheus page, summed over engines and models; None where it has none. ValueError for another page."""
    sums: Counter[str] = Counter()
    drafted_at: Counter[int] = Counter()
    accepted_at: Counter[int] = Counter()
    for what, position, value in _samples(page):
        sums[what] += value
        if position is not None:
            (drafted_at if what == "drafted" else accepted_at)[position] += value
    if "rounds" not in sums:
        return None
    return SpecCounts(
        rounds=sums["rounds"],
        num_drafted_tokens=sums["drafted"],
        num_accepted_tokens=sums["accepted"],
        drafted_at=tuple(drafted_at[j] for j in range(len(drafted_at))),
        accepted_at=tuple(accepted_at[j] for j in range(len(accepted_at))),
    )


def _samples(page: str) -> Iterator[tuple[str, int | None, int]]:
    """(what is counted, position from 0 or None, value) of every counter that is ours."""
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            known = _NAMES.get(_PREFIX.sub("", sample.name).removesuffix("_total"))
            if known is None or not sample.name.endswith("_total"):
                continue
            what, first = known
            position = sample.labels.get("position")
            yield what, None if position is None else int(position) - first, round(sample.value)


def read_counters(url: str) -> SpecCounts:
    """Read the page at `url`. Raises UserError where there is none, or no counters on it."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as reply:
            counts = parse_counters(reply.read().decode("utf-8", errors="replace"))
    except ImportError as error:
        raise UserError('reading a server\'s counters needs the extra: pip install -e ".[eval]"') from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise UserError(f"cannot read {url} ({error}); start the server with its metrics switched on") from error
    except ValueError as error:
        raise UserError(f"{url} is no Prometheus page ({error}); check the server's address") from error
    if counts is None:
        raise UserError(
            f"{url} has no counters of accepted draft tokens: does the server draft at all? For SGLang, whose page has only "
            "averages, give --sglang"
        )
    return counts


def settled_counters(url: str, sleep: Callable[[float], None] = time.sleep) -> SpecCounts:
    """The counters once two readings in a row agree. Raises UserError where they never do."""
    last = read_counters(url)
    for _ in range(SETTLE_READS):
        sleep(SETTLE_S)
        now = read_counters(url)
        if now == last:
            return now
        last = now
    raise UserError(f"the counters of {url} do not come to rest: something else is using the server; measure it alone")
