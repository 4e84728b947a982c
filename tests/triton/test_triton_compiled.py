"""What Triton's compiler makes of the kernels: that it takes them, that they fit into a card's shared memory, and that
it is not called for every new length. tools/compile_cards.py compiles all of them for all cards."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln.kernels.triton.survey import EVIDENCE, MIXED, MODES

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "compile_cards.py"
VARIANTS = Path(__file__).parents[1] / "helpers" / "compiled_variants.py"


def run(script: Path, *arguments: str, cache: Path, code: int = 0) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-W", "ignore", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == code, done.stdout[-1000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("target", "dtype", "dim", "mode", "hard"),
    [
        pytest.param("80", "float32", "64", "LLN+Diag", True, marks=pytest.mark.long),
        pytest.param("86", "bfloat16", "128", "LLN+Diag", False, marks=pytest.mark.long),
        pytest.param("89", "float16", "64", "LLN+Diag", True, marks=pytest.mark.long),
        ("90", "bfloat16", "64", "LLN+Diag, causal", False),
        pytest.param("100", "bfloat16", "128", "LLN+Diag", False, marks=pytest.mark.long),
        pytest.param("120", "bfloat16", "64", "LLN, causal", False, marks=pytest.mark.long),
        pytest.param("gfx942", "bfloat16", "128", "LLN+Diag", False, marks=pytest.mark.long),
        pytest.param("gfx942", "bfloat16", "64", "LLN+Diag", False, marks=pytest.mark.long),
        pytest.param("gfx942", "float16", "64", "LLN, causal", False, marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", "evidence, signed", False, marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", "evidence, directions", True, marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", "evidence, causal", True, marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", "evidence", False, marks=pytest.mark.long),
        pytest.param("90", "bfloat16", "64", "evidence, causal", False, marks=pytest.mark.long),
        ("90", "bfloat16", "64", "evidence, mix", False),
        pytest.param("86", "bfloat16", "64", "evidence, mix, causal", True, marks=pytest.mark.long),
        pytest.param("80", "float16", "64", "evidence, Diag", True, marks=pytest.mark.long),
        pytest.param("86", "bfloat16", "64", "evidence, directions, Diag", False, marks=pytest.mark.long),
        pytest.param("gfx942", "bfloat16", "64", "evidence", False, marks=pytest.mark.long),
    ],
)
def test_kernels_compile_and_fit_into_a_card(
    target: str, dtype: str, dim: str, mode: str, hard: bool, tmp_path: Path
) -> None:
    """hard: with several query heads a key head, dropout, a mask, and every gradient."""
    stored = tmp_path / "cards.json"
    options = ["--targets", target, "--dtypes", dtype, "--dims", dim, "--modes", mode, "--out", str(stored)]
    run(TOOL, *options, *(["--hard"] if hard else []), cache=tmp_path)
    (row,) = json.loads(stored.read_text())["rows"]
    expected = {"forward": "read_kernel", "backward": "fold_backward_kernel"}
    if mode in MIXED:
        expected = {"forward": "join_kernel", "backward": "join_backward_kernel"}
    elif "causal" in mode and mode in EVIDENCE:
        expected = {"forward": "evidence_values_kernel", "backward": "evidence_causal_keys_kernel"}
    elif "directions" in mode:
        expected = {"forward": "directed_read_kernel", "backward": "directed_keys_kernel"}
    elif mode in EVIDENCE:
        expected = {name: f"evidence_{kernel}" for name, kernel in expected.items()}
    elif MODES[mode][0]:
        expected = {"forward": "causal_rows_kernel", "backward": "causal_keys_kernel"}
    for name, kernel in expected.items():
        made = row[name]
        assert made["runs"] == "kernels"
        assert made["value channels at once"] >= 32
        assert kernel in {held["kernel"] for held in made["kernels"]}
        assert all(held["shared"] <= row["shared"] for held in made["kernels"])


@pytest.mark.long
@pytest.mark.parametrize(("dim", "mode"), [("64", "evidence, directions, causal"), ("128", "evidence")])
def test_what_a_small_card_has_no_room_for_runs_in_plain_pytorch(dim: str, mode: str, tmp_path: Path) -> None:
    stored = tmp_path / "cards.json"
    options = ["--targets", "120", "--dtypes", "bfloat16", "--dims", dim, "--modes", mode, "--out", str(stored)]
    run(TOOL, *options, cache=tmp_path, code=1)
    (row,) = json.loads(stored.read_text())["rows"]
    assert row["backward"]["runs"] == "eager"
    assert "needs 112 KiB of shared memory, and there are 99" in row["backward"]["reason"]


def test_a_new_length_compiles_nothing(tmp_path: Path) -> None:
    """What is left: tiles that are all full or not, one split or several, few splits or many, two size classes."""
    counted = json.loads(run(VARIANTS, cache=tmp_path))
    assert len(counted["most"]) >= 9  # kernels
    assert max(counted["most"].values()) <= 12  # causal_rows_kernel, which is four: of two passes, fast and slow
    assert counted["late"] == {}  # compiled for a length after the first few
