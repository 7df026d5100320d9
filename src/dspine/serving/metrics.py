"""Prometheus metrics of one server. Everything runs on the event loop; scrapes see whole answers only.

Speculation is read from one merged `DecodeStats`, so that tau and acceptance mean here what they mean everywhere else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dspine.decoding.request import Request
from dspine.decoding.stats import DecodeStats

TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
LATENCY_BUCKETS_S = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """Counters, gauges and histograms in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._stats = DecodeStats()
        self._registry.register(_SpeculationCollector(self._stats))

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, registry=self._registry, buckets=buckets)

        self._answers = counter("dspine_answers", "Answers that have ended, by reason", ("finish_reason",))
        self.refused = counter("dspine_refused", "Requests refused because the queue was full")
        self._prompt_tokens = counter("dspine_prompt_tokens", "Tokens of the prompts of ended answers")
        self._output_tokens = counter("dspine_output_tokens", "Tokens of ended answers")
        self._ttft = histogram("dspine_ttft_seconds", "Arrival of a request to its first token", TTFT_BUCKETS_S)
        self._tpot = histogram(
            "dspine_tpot_seconds", "Time per output token after the first, one value an answer", TPOT_BUCKETS_S
        )
        self._latency = histogram("dspine_latency_seconds", "Arrival of a request to its last token", LATENCY_BUCKETS_S)
        self._running = Gauge("dspine_running", "Answers being decoded", registry=self._registry)
        self._waiting = Gauge("dspine_queue_length", "Answers waiting to be decoded", registry=self._registry)

    def watch(self, *, running: Callable[[], int], waiting: Callable[[], int]) -> None:
        """Where scrapes look the present load up."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)

    def record(self, request: Request, arrived_at: float, reason: str | None) -> None:
        """Count an answer that has ended. `arrived_at` is on perf_counter's clock."""
        self._answers.labels(reason or "error").inc()
        self._prompt_tokens.inc(len(request.prompt_ids))
        self._output_tokens.inc(len(request.output_ids))
        self._stats.merge(request.stats)
        if request.first_token_at is None:
            return
        self._ttft.observe(request.first_token_at - arrived_at)
        if reason not in ("stop", "stop_string", "length"):
            return
        ended_at = request.finished_at or time.perf_counter()
        self._latency.observe(ended_at - arrived_at)
        if len(request.output_ids) > 1:
            self._tpot.observe((ended_at - request.first_token_at) / (len(request.output_ids) - 1))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _SpeculationCollector(Collector):
    """Counters by draft position, so that a query can take any window, and the ratios since the start."""

    def __init__(self, stats: DecodeStats) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield CounterMetricFamily("dspine_rounds", "Verification rounds, one per answer and forward", value=stats.rounds)
        for name, text, counts in (
            ("dspine_drafted_tokens", "Drafted tokens by position in the block", stats.drafted_at),
            ("dspine_accepted_tokens", "Accepted drafted tokens by position in the block", stats.accepted_at),
        ):
            family = CounterMetricFamily(name, text, labels=("position",))
            for position, count in enumerate(counts, 1):
                family.add_metric((str(position),), count)
            yield family
        tau = "Acceptance length tau since the start: tokens per round, the target's own included"
        yield GaugeMetricFamily("dspine_acceptance_length", tau, value=stats.acceptance_length)
        ratio = GaugeMetricFamily(
            "dspine_acceptance_ratio", "Share of rounds that accepted this position, since the start", labels=("position",)
        )
        for position, share in enumerate(stats.acceptance_by_position, 1):
            ratio.add_metric((str(position),), share)
        yield ratio
