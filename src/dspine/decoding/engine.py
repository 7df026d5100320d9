"""The draft-verify loop over the rows of live requests.

    engine = Engine(target, drafter.runner(target))
    request = engine.submit(prompt_ids, SamplingParams(max_new_tokens=64))
    while engine.has_work:
        for progress in engine.step():
            ...

One step is one round: waiting requests join, the drafter proposes a block for every row, one target forward verifies
them all, each row commits its own number of tokens, finished requests leave. Without a drafter it is plain decoding by
the same code with a width of 1. Live requests always hold rows 0..n-1 of both caches.

Shapes: n live rows, w slots of a round (anchor first), m = w - 1 drafted tokens, v vocabulary, k candidates.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from dspine.decoding.calibration import Calibration
from dspine.decoding.logprobs import token_logprobs
from dspine.decoding.request import Progress, Request, new_request
from dspine.decoding.sampling import SamplingParams
from dspine.decoding.verdicts import draft_randomness, first_token, judge
from dspine.decoding.verify import Verdict
from dspine.decoding.width import CostTable, timed
from dspine.decoding.width_policy import Width, new_width_policy
from dspine.drafters.base import Draft, DraftRunner
from dspine.errors import UserError
from dspine.modules.kv_cache import KVCache
from dspine.stages import stage
from dspine.targets.model import Target, TargetOutput

PREFILL_CHUNK = 512  # prompt tokens per forward
Observer = Callable[[Request, list[float], int], None]  # a row of a round: its raw confidences [m], how many were accepted


class Engine:
    """Decodes up to `max_rows` requests at once; more wait their turn. Not thread-safe: one caller steps it.

    width "confidence" verifies the whole block where there is no `calibration`. `observer` is told of every drafted row.
    """

    def __init__(
        self, target: Target, drafter: DraftRunner | None = None, *, max_rows: int = 8, width: Width = "auto",
        calibration: Calibration | None = None, observer: Observer | None = None,
    ) -> None:  # fmt: skip
        if max_rows < 1:
            raise UserError(f"max_rows = {max_rows}: the engine needs at least 1 row")
        self.target, self.drafter, self.max_rows = target, drafter, max_rows
        self._taps = drafter.config.target_layer_ids if drafter is not None else ()
        self._max_width = drafter.config.max_width if drafter is not None else 1
        expected = drafter.config.expected_acceptance if drafter is not None else ()
        self._widths = new_width_policy(width, self._max_width, expected, CostTable(self._time_forward), calibration)
        self._live: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._count = 0
        self._cache: KVCache | None = None
        self._draft_cache: KVCache | None = None
        self._observer = observer

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, prompt_ids: list[int], params: SamplingParams) -> Request:
        """Queue a prompt. Raises UserError for those that `check_prompt` refuses."""
        room = self.check_prompt(prompt_ids)
        self._count += 1
        request = new_request(self._count, list(prompt_ids), params, self.target.tokenizer, room, self.target.vocab_size)
        self._waiting.append(request)
        return request

    def check_prompt(self, prompt_ids: list[int]) -> int:
        """How many tokens an answer may have; any thread may ask. Raises UserError for an empty prompt, for one that
        fills the target's context and for ids outside its vocabulary."""
        if not prompt_ids:
            raise UserError("the prompt is empty; give at least one token")
        room = self.target.max_length - len(prompt_ids)
        if room < 1:
            raise UserError(
                f"the prompt has {len(prompt_ids)} tokens, but {self.target.name} holds {self.target.max_length} with the "
                "answer; shorten it"
            )
        bad = [t for t in prompt_ids if not 0 <= t < self.target.vocab_size]
        if bad:
            raise UserError(
                f"token id {bad[0]} is not in the vocabulary of {self.target.name} (0 to {self.target.vocab_size - 1})"
            )
        return room

    def cancel(self, request: Request) -> None:
        """Stop a request, waiting or live; what it has so far stays in it."""
        if request.finish_reason is not None:
            return
        request.finish_reason, request.finished_at = "cancelled", time.perf_counter()
        if request in self._waiting:
            self._waiting.remove(request)
        else:
            self._remove_finished()

    @property
    def has_work(self) -> bool:
        return bool(self._live or self._waiting)

    @property
    def live_requests(self) -> tuple[Request, ...]:
        """Those that hold a row of the caches."""
        return tuple(self._live)

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def run(self) -> None:
        """Step until every request is finished."""
        while self.has_work:
            self.step()

    # -- one round --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Progress]:
        """Admit, draft, verify, commit; returns what each request got, once even where it joined and ended."""
        got = {p.request.id: p for p in self._admit()}
        if self._live:
            for p in self._round():
                first = got.get(p.request.id)
                got[p.request.id] = p if first is None else first + p
        return list(got.values())

    def _admit(self) -> list[Progress]:
        progress = []
        while self._waiting and len(self._live) < self.max_rows:
            request = self._waiting.popleft()
            started = time.perf_counter()
            self._live.append(request)
            token, logits = self._prefill(request, len(self._live) - 1)
            request.stats.prefill_s += time.perf_counter() - started
            progress.append(self._commit(request, Verdict([token]), logits))
        self._remove_finished()
        return progress

    def _prefill(self, request: Request, row: int) -> tuple[int, Tensor]:
        """Run the prompt into `row` of the caches; returns the answer's first token and its logits [1, v]."""
        cache, draft_cache = self._caches(len(request.prompt_ids) + request.max_new_tokens)
        own, own_draft = cache.row(row), None if draft_cache is None else draft_cache.row(row)
        own.lengths.zero_()
        if own_draft is not None:
            own_draft.lengths.zero_()
        ids = torch.tensor([request.prompt_ids], device=self.target.device)
        token, logits = 0, ids.new_zeros(0)
        for start in range(0, ids.shape[1], PREFILL_CHUNK):
            chunk = ids[:, start : start + PREFILL_CHUNK]
            out = self.target.forward(chunk, own, self._taps)
            own.lengths += chunk.shape[1]
            following = ids[:, start + 1 : start + 1 + PREFILL_CHUNK]
            if following.shape[1] < chunk.shape[1]:  # the last chunk: the answer begins
                logits = self.target.logits(out.hidden[:, -1])
                token = first_token(request, logits)
                following = torch.cat((following, ids.new_tensor([[token]])), 1)
            if own_draft is not None and self.drafter is not None and out.features is not None:
                self.drafter.extend(out.features, following, own_draft)
                own_draft.lengths += chunk.shape[1]
        return token, logits

    def _round(self) -> list[Progress]:
        params = [r.params for r in self._live]
        width = self._choose_width(params)  # before the clock starts: its first call times some forwards
        assert self._cache is not None
        started = time.perf_counter()
        anchors = torch.tensor([r.output_ids[-1] for r in self._live], device=self.target.device)
        draft = self._draft(anchors, width) if width > 1 else None
        draft, confidence = self._shortened(draft, params)
        drafted_at = time.perf_counter()
        tokens = anchors[:, None] if draft is None else torch.cat((anchors[:, None], draft.tokens), 1)
        with stage("verification"):
            out = self.target.forward(tokens, self._cache, self._taps)
            logits = self.target.logits(out.hidden)  # [n, w, v]
        with stage("acceptance"):
            verdicts = judge(self._live, logits, draft)
        verified_at = time.perf_counter()
        self._advance(out, verdicts)
        advanced_at = time.perf_counter()
        num_verified, num_accepted = tokens.shape[1] - 1, [v.num_accepted for v in verdicts]
        if width > 1:
            self._widths.record(params, drafted_at - started, num_verified, num_accepted)
        if self._observer is not None and confidence:
            for request, of_row, accepted in zip(self._live, confidence, num_accepted, strict=True):
                self._observer(request, of_row, accepted)
        # Extending the drafter's context is the drafter's work too.
        draft_s, verify_s = drafted_at - started + advanced_at - verified_at, verified_at - drafted_at
        progress = [self._commit(*row) for row in zip(self._live, verdicts, logits, strict=True)]
        other_s, rows = time.perf_counter() - advanced_at, len(self._live)
        for request, accepted in zip(self._live, num_accepted, strict=True):
            request.stats.record_round(num_verified, accepted)
            request.stats.draft_s += draft_s / rows
            request.stats.verify_s += verify_s / rows
            request.stats.other_s += other_s / rows
        self._remove_finished()
        return progress

    def _choose_width(self, params: list[SamplingParams]) -> int:
        width = self._widths.width(params)
        if all(p.is_greedy for p in params):  # a sampled row uses as many random numbers near its end as before
            width = min(width, max(r.remaining for r in self._live))
        return width

    def _draft(self, anchors: Tensor, width: int) -> Draft:
        assert self.drafter is not None and self._draft_cache is not None
        temperatures, uniforms = draft_randomness(self._live, width - 1, self.target.device)
        with stage("draft_backbone"):  # what a drafter does besides, it says itself
            return self.drafter.propose(anchors, self._draft_cache, width - 1, temperatures, uniforms)

    def _shortened(self, draft: Draft | None, params: list[SamplingParams]) -> tuple[Draft | None, list[list[float]]]:
        """As much of a draft as is to be verified, and its raw confidences [n, m] where somebody wants to know."""
        decides = self._widths.reads_confidence
        if draft is None or draft.confidence is None or not (decides or self._observer is not None):
            return draft, []
        with stage("selection"):
            confidence: list[list[float]] = draft.confidence().tolist()
            if not decides:
                return draft, confidence
            kept = self._widths.tokens_to_verify(confidence, params)
            return (draft.first(kept) if kept else None), confidence

    def _advance(self, out: TargetOutput, verdicts: list[Verdict]) -> None:
        """Commit each row's anchor and accepted candidates in both caches; the rest stays behind its length."""
        assert self._cache is not None
        rows, most = len(verdicts), max(len(v.tokens) for v in verdicts)
        kept = torch.tensor([len(v.tokens) for v in verdicts])
        self._cache.lengths[:rows] += kept
        if self.drafter is not None and self._draft_cache is not None and out.features is not None:
            # What follows a kept token: the next accepted one, or the verdict's. Past those is garbage, never committed.
            padded = [v.tokens + [0] * (most - len(v.tokens)) for v in verdicts]
            following = torch.tensor(padded, device=out.features.device)
            with stage("draft_backbone"):
                self.drafter.extend(out.features[:, :most], following, self._draft_cache)
            self._draft_cache.lengths[:rows] += kept

    def _commit(self, request: Request, verdict: Verdict, logits: Tensor) -> Progress:
        """Hand a verdict's tokens to a request until one of them finishes it. `logits` [w, v]: what the slots said."""
        pieces: list[str] = []
        for position, token in enumerate(verdict.tokens):
            finished = request.append(token, position < verdict.num_accepted, self.target.eos_token_ids)
            pieces.append(request.text.take(final=finished))
            if finished:
                break
        used = len(pieces)
        wanted = request.params.logprobs
        logprobs = token_logprobs(logits, verdict.tokens[:used], wanted) if wanted is not None else []
        return Progress(request, request.output_ids[-used:], request.accepted[-used:], pieces, logprobs)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _caches(self, capacity: int) -> tuple[KVCache, KVCache | None]:
        capacity += self._max_width
        if self._cache is None:
            self._cache = self.target.new_cache(self.max_rows, capacity)
            self._draft_cache = self.drafter.new_cache(self.max_rows, capacity) if self.drafter is not None else None
        self._cache.reserve(capacity)
        if self._draft_cache is not None:
            self._draft_cache.reserve(capacity)
        return self._cache, self._draft_cache

    def _remove_finished(self) -> None:
        """Close the holes that finished requests leave, moving the last live row into each."""
        row = 0
        while row < len(self._live):
            if self._live[row].finish_reason is None:
                row += 1
                continue
            last = len(self._live) - 1
            for cache in (self._cache, self._draft_cache):
                if cache is not None:
                    cache.move_row(last, row)
            self._live[row] = self._live[last]
            self._live.pop()

    def _time_forward(self, tokens: int) -> float:
        """Seconds of one forward over `tokens` tokens of one row, for the width controller."""
        scratch = self.target.new_cache(1, tokens + 64)
        scratch.lengths += 64
        ids = torch.zeros(1, tokens, dtype=torch.long, device=self.target.device)

        def forward() -> None:
            int(self.target.logits(self.target.forward(ids, scratch, self._taps).hidden).argmax(-1)[0, -1])

        return timed(forward)
