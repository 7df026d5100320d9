r"""DSpine drafters in SGLang: an installed plugin adds `--speculative-algorithm DSPINE`.

    python -m sglang.launch_server --model-path MODEL --speculative-algorithm DSPINE \
        --speculative-draft-model-path DSPINE_CHECKPOINT

`plugin.register` is what SGLang calls in each of its processes; docs/sglang.md says what is refused and why.
"""

from __future__ import annotations

ALGORITHM = "DSPINE"
