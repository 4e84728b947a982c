"""What Triton's compiler makes of the kernels: that it takes them, and that they fit into a card's shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = Path(__file__).parents[1] / "helpers" / "compiled_kernels.py"
A100, H100 = "80", "90"


@pytest.mark.parametrize(
    ("capability", "dtype", "mode", "block_size"),
    [
        (H100, "float32", "bidirectional", "64"),
        (H100, "float32", "causal", "64"),
        (H100, "bfloat16", "bidirectional", "128"),
        (H100, "bfloat16", "causal", "64"),
        (A100, "float32", "bidirectional", "64"),
        (A100, "bfloat16", "bidirectional", "128"),
    ],
)
def test_kernels_compile_and_fit_into_shared_memory(
    capability: str, dtype: str, mode: str, block_size: str, tmp_path: Path
) -> None:
    """With several query heads a key head, blocks, dropout, a mask, and every gradient."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", str(COMPILED), capability, dtype, mode, block_size]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    expected = {"bidirectional": "fold_backward_kernel", "causal": "causal_keys_kernel"}[mode]
    assert found["shared"][expected] > 0
    assert {name: size for name, size in found["shared"].items() if size > found["limit"]} == {}
