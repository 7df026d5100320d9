"""dspine's drafters in vLLM: a plugin that vLLM finds by its entry point.

    dspine export smollm2-135m-dspine --output draft
    vllm serve ... --speculative-config '{"method": "dflash", "model": "draft"}'

It adds two draft architectures to vLLM's `dflash` method: DFlash without a norm on queries and keys, and DSpine. On a CPU it
also puts vLLM's sampling of drafted tokens right (`cpu_sampling`). docs/vllm.md of dspine says what is refused and why.
"""

from __future__ import annotations

from dspine.integrations.vllm_export import DFLASH_ARCHITECTURE, DSPINE_ARCHITECTURE

__all__ = ["register"]


def register() -> None:
    """What vLLM calls in each of its processes, possibly more than once.

    Other models are served as without it: under a release of vLLM that it was not made for it registers the architectures, whose
    own check then says so, and touches nothing else.
    """
    import vllm
    from vllm import ModelRegistry

    from dspine_vllm.checks import supports

    ModelRegistry.register_model(DFLASH_ARCHITECTURE, "dspine_vllm.dflash:DFlashWithoutQKNorm")
    ModelRegistry.register_model(DSPINE_ARCHITECTURE, "dspine_vllm.dspine:DSpineForCausalLM")
    if supports(vllm.__version__):
        from dspine_vllm import cpu_sampling, proposer

        proposer.install()
        cpu_sampling.install()
