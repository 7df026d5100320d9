"""From the target's logits to the distribution a request asked for, and draws from it.

    params = SamplingParams(temperature=0.8, top_p=0.95)
    probs = target_distribution(penalise(logits, seen, drafted, params.repetition_penalty), params)
    tokens = sample(probs, generator)

The warpers are those of transformers' `generate`, in its order: repetition penalty, temperature, top-k, top-p, min-p.
No model and no loop here. Shapes: n slots (sequence), v vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from dspine.decoding.logprobs import MAX_ALTERNATIVES
from dspine.errors import UserError

# Below this, softmax(logits / T) is one-hot unless two fp32 logits agree to about 1e-4, and logits / T nears overflow.
GREEDY_TEMPERATURE = 1e-5
# Tokens looked at first when a nucleus is cut: sorting a whole vocabulary costs 30 times as much on a CPU.
NUCLEUS_GUESS = 256
NUCLEUS_GROWTH = 8


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What a request asks of its output. Values are checked (UserError) and stored as plain Python types."""

    temperature: float = 0.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    min_p: float = 0.0  # 0 = off
    repetition_penalty: float = 1.0  # 1 = off
    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # alternatives to report with each token's log-probability; None = report nothing

    def __post_init__(self) -> None:
        def store(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        store("temperature", _real("temperature", self.temperature, lambda t: 0 <= t <= 100, "give 0 (greedy) to 100"))
        store("top_k", _integer("top_k", self.top_k, lambda k: k >= 0, "give a whole number from 1, or 0 to turn it off"))
        remedy = "give a number above 0 and up to 1 (1 turns it off; temperature=0 is greedy)"
        store("top_p", _real("top_p", self.top_p, lambda p: 0 < p <= 1, remedy))
        store("min_p", _real("min_p", self.min_p, lambda p: 0 <= p <= 1, "give 0 (off) to 1"))
        penalty = _real("repetition_penalty", self.repetition_penalty, lambda r: 0.01 <= r <= 100, "give 0.01 to 100 (1 = off)")
        store("repetition_penalty", penalty)
        tokens = _integer("max_new_tokens", self.max_new_tokens, lambda n: n >= 1, "give a whole number from 1")
        store("max_new_tokens", tokens)
        store("stop", _stop_strings(self.stop))
        if self.seed is not None:
            seed = _integer("seed", self.seed, lambda s: -(2**63) <= s < 2**64, "give a whole number of at most 64 bits, or None")
            store("seed", seed)
        if self.logprobs is not None:
            remedy = f"give 0 to {MAX_ALTERNATIVES} alternatives per token, or None"
            store("logprobs", _integer("logprobs", self.logprobs, lambda n: 0 <= n <= MAX_ALTERNATIVES, remedy))
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos={_show(self.ignore_eos)} is no truth value; give True or False")

    @property
    def is_greedy(self) -> bool:
        """Whether the output is the argmax at every step (temperature 0, or too small to differ from it)."""
        return self.temperature < GREEDY_TEMPERATURE


def _show(value: object) -> str:
    try:
        text = repr(value)
    except ValueError:  # an int of thousands of digits refuses to be printed
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 60 else text[:57] + "..."


def _real(name: str, value: Any, fits: Callable[[float], bool], remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UserError(f"{name}={_show(value)} is not a number; {remedy}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not fits(number):
        raise UserError(f"{name}={_show(value)} is out of range; {remedy}")
    return number


def _integer(name: str, value: Any, fits: Callable[[int], bool], remedy: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise UserError(f"{name}={_show(value)} is not a whole number; {remedy}")
    if not fits(int(value)):
        raise UserError(f"{name}={_show(value)} is out of range; {remedy}")
    return int(value)


def _stop_strings(value: Any) -> tuple[str, ...]:
    """One string, or a list or tuple of them; an empty one would stop every request at once."""
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, tuple | list) or not all(isinstance(s, str) for s in strings):
        raise UserError(f"stop={_show(value)} is not a tuple of strings; give e.g. stop=('\\n\\n',)")
    if "" in strings:
        raise UserError(f"stop={_show(value)} holds an empty string, which would stop at once; leave it out")
    return tuple(strings)


def penalise(logits: Tensor, seen: Tensor, drafted: Tensor, penalty: float) -> Tensor:
    """Repetition penalty slot by slot: positive logits / penalty, others * penalty, on the tokens a slot has behind it.

    logits [n, v]; seen [v] bool, the tokens of prompt and output; drafted [n - 1], the candidates. Slot t counts `seen`
    and drafted[:t]: exactly the text that stands before it if it is ever used. Each token is penalised once however
    often it occurs. Returns [n, v] fp32. (Keskar et al., arXiv 1909.05858, section 4.1, as transformers applies it.)
    """
    logits = logits.float()
    if penalty == 1.0:
        return logits
    n, m = logits.shape[0], drafted.shape[0]
    assert m == n - 1, f"{n} slots take {n - 1} drafted tokens, not {m}"
    out = logits.clone()
    ids = seen.nonzero().squeeze(-1)
    out[:, ids] = _damp(logits[:, ids], penalty)
    if m:
        # A token drafted twice owns two equal columns here, so both writes agree.
        before = torch.ones(n, m, device=logits.device).tril(-1)  # [t, j]: candidate j stands before slot t
        same = (drafted[:, None] == drafted[None, :]).float()  # [j, i]
        active = (before @ same > 0) | seen[drafted]
        columns = logits[:, drafted]
        out[:, drafted] = torch.where(active, _damp(columns, penalty), columns)
    return out


def _damp(logits: Tensor, penalty: float) -> Tensor:
    return torch.where(logits > 0, logits / penalty, logits * penalty)


def target_distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The request's own p: logits [n, v] -> probabilities [n, v] fp32. Temperature, then top-k, top-p, min-p.

    Greedy requests get the one-hot argmax. Ties are cut as transformers cuts them: top-k keeps all tokens equal to the
    k-th, top-p prefers the higher id. Raises UserError where a row holds NaN or +inf, or nothing but -inf.
    """
    logits = logits.float()
    if not bool(torch.isfinite(logits.amax(-1)).all()):
        raise UserError("the target's logits are not finite; load the target in float32 or bfloat16 (dtype=...)")
    if params.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if params.temperature != 1.0:
        logits = logits / params.temperature
    if params.top_k or params.top_p < 1.0:
        return _truncated(logits, params)
    probs = logits.softmax(-1)
    if params.min_p:
        probs *= probs >= params.min_p * probs.amax(-1, keepdim=True)
        probs /= probs.sum(-1, keepdim=True)
    return probs


def _truncated(logits: Tensor, params: SamplingParams) -> Tensor:
    """Top-k, top-p and min-p by looking at the most likely tokens only, at more of them until the cut lies inside."""
    v = logits.shape[-1]
    total = None if params.top_k else (logits - logits.amax(-1, keepdim=True)).exp_().sum(-1, keepdim=True, dtype=torch.float64)
    size = params.top_k + 1 if params.top_k else NUCLEUS_GUESS
    while True:
        size = min(size, v)
        values, ids = _most_likely(logits, size)
        kept = _keep(values, total, params)
        if size == v or _is_inside(values, kept, params):
            break
        size *= NUCLEUS_GROWTH
    weights = (values - values[:, :1]).exp() * kept
    if params.min_p:
        weights *= weights >= params.min_p * weights[:, :1]
    weights /= weights.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, ids, weights)


def _most_likely(logits: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The `size` largest logits of each row and their ids, by falling logit, equal ones by falling id."""
    ids = logits.topk(size, dim=-1, sorted=False).indices.sort(dim=-1, descending=True).values
    values, order = logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, order)


def _keep(values: Tensor, total: Tensor | None, params: SamplingParams) -> Tensor:
    """Which of the sorted logits top-k and top-p keep: values [n, size] -> bool [n, size].

    `total` [n, 1] is the sum of exp(logit - maximum) over the whole row; None where top-k stands first and renormalises.
    """
    kept = torch.ones_like(values, dtype=torch.bool)
    if params.top_k:
        kept = values >= values[:, min(params.top_k, values.shape[-1]) - 1, None]
    if params.top_p < 1.0:
        weights = (values - values[:, :1]).double().exp() * kept
        before = weights.cumsum(-1) - weights  # what is more likely than this token
        kept = kept & (before < params.top_p * (weights.sum(-1, keepdim=True) if total is None else total))
        kept[:, 0] = True
    return kept


def _is_inside(values: Tensor, kept: Tensor, params: SamplingParams) -> bool:
    """Whether no token outside `values` could belong to, or tie with, those that the cut is made among."""
    last = kept.sum(-1, keepdim=True) - 1
    if params.top_k:  # a tie with the k-th counts in the mass that top-p divides, even where top-p stops earlier
        last = torch.full_like(last, params.top_k - 1)
    return bool((values[:, -1:] < values.gather(-1, last)).all())


def uniforms(count: int, generator: torch.Generator) -> Tensor:
    """`count` fp64 numbers in [0, 1), on the generator's device."""
    return torch.rand(count, generator=generator, device=generator.device, dtype=torch.float64)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF draws: weights [n, v], not negative, in any scale; uniform [n] in [0, 1) -> tokens [n].

    One number a draw (torch.multinomial takes v of them) and fp64 sums, so the same seed picks the same token wherever
    the weights agree, and no token of weight 0 can be picked.
    """
    cdf = weights.cumsum(-1, dtype=torch.float64)
    threshold = uniform.to(cdf.device)[:, None] * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True).squeeze(-1)


def sample(probs: Tensor, generator: torch.Generator) -> Tensor:
    """One token per row: probs [n, v] -> [n]; takes exactly n numbers from `generator`."""
    return draw(probs, uniforms(probs.shape[0], generator))
