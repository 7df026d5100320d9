"""An out-of-tree SGLang platform for tests on a CPU.

It takes part only where SGLANG_PLATFORM=dspine_cpu asks for it. TRITON_INTERPRET=1 runs the scheduler's Triton kernels.
"""

from __future__ import annotations

import os

NAME = "dspine_cpu"


def activate() -> str | None:
    """The platform's class, for SGLang to load; None where another platform, or none, is asked for."""
    return "dspine_sglang_test_platform.platform.CpuTestPlatform" if os.environ.get("SGLANG_PLATFORM") == NAME else None
