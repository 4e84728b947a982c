"""The examples run, here with sizes that take seconds."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"vision_transformer": "timm", "image_transformer": "diffusers"}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("finetune_encoder", ["--steps", "2", "--attention", "lln_diag"], "lln_diag: accuracy"),
        ("long_documents", ["--steps", "10", "--length", "256"], "accuracy on new documents"),
        ("streaming_generation", ["--steps", "2", "--tokens", "40"], "bytes after all of them"),
        ("vision_transformer", ["--sizes", "224", "--repeats", "1"], "tiles of at most 14 patches a side"),
        ("image_transformer", ["--sizes", "256", "--repeats", "1"], "one step of one picture"),
    ],
)
def test_example(
    name: str, arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if (need := NEEDS.get(name)) is not None:
        pytest.importorskip(need)
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert says in capsys.readouterr().out


def test_no_example_is_forgotten() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {
        "finetune_encoder",
        "image_transformer",
        "long_documents",
        "streaming_generation",
        "vision_transformer",
    }
