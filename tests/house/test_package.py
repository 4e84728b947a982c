"""What a user gets: a light import, types, a command line that answers in sentences, a page that stands alone."""

import importlib.metadata
import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import lln
from helpers.command import run_command, run_python
from helpers.pages import Page, make_times
from lln.lab.cli.app import app
from lln.lab.cli.shared import EXTRAS
from lln.lab.core.tables import show_timing

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lln"
HEAVY = ("triton", "transformers", "datasets", "scipy", "pandas", "altair", "jinja2", "typer", "rich", "matplotlib")


def list_new_modules(code: str, before: str = "torch") -> list[str]:
    """What a process has loaded after the code and not before: torch may load some of it itself."""
    code = f"import sys, {before}; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    return run_python(code).split()


def test_importing_lln_loads_nothing_heavy_but_torch() -> None:
    new = list_new_modules("import lln; [getattr(lln, name) for name in lln.__all__]")
    assert {"lln.functional", "lln.nn.multihead", "lln.peers.performer", "lln.instruments.spectrum"} <= set(new)
    assert [name for name in new if name.split(".")[0] in HEAVY] == []
    # Of everything else that comes with it, only small pieces of torch and of the standard library.
    allowed = {"lln", "torch"} | sys.stdlib_module_names
    assert [name for name in new if name.split(".")[0] not in allowed] == []


def test_importing_lln_alone_waits_for_nothing() -> None:
    new = list_new_modules("import lln; lln.__version__", "os")
    assert [name for name in new if name.split(".")[0] not in {"lln"} | sys.stdlib_module_names] == []
    assert {name for name in new if name.startswith("lln")} == {"lln", "lln._moved"}
    with pytest.raises(AttributeError, match="module 'lln' has no attribute 'nothing'"):
        getattr(lln, "nothing")  # noqa: B009 - a type checker knows
    assert set(lln.__all__) <= set(dir(lln))


def test_dir_shows_what_lln_offers_and_nothing_that_it_is_made_of() -> None:
    code = "import lln, lln.hf; print(*[n for n in dir(lln) if n not in lln.__all__ and not n.startswith('__')])"
    rooms = set(run_python(code).split())
    assert {"hf", "kernels", "peers"} <= rooms
    assert not rooms - {path.stem for path in SOURCE.iterdir()}
    assert "_moved" not in rooms


def test_a_conversion_without_anything_to_learn_from_is_refused_before_anything_heavy_is_loaded() -> None:
    code = (
        "import sys, lln.lab.cli.app as app; sys.argv[1:] = ['convert', 'model', 'out']\n"
        "try: app.main()\n"
        "except SystemExit as end: print(end.code, *sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert run_python(code).split() == ["2"]


@pytest.mark.parametrize("name", sorted(path.stem for path in (SOURCE / "lab" / "cli").glob("[a-z]*.py")))
def test_a_file_of_the_command_line_waits_for_nothing_but_typer(name: str) -> None:
    new = list_new_modules(f"import lln.lab.cli.{name}", "typer")
    assert [module for module in new if module.split(".")[0] not in {"lln", "typer"} | sys.stdlib_module_names] == []


@pytest.mark.parametrize("name", ["typer", "rich"])
def test_the_command_line_names_its_extra_where_it_is_missing(name: str) -> None:
    sentence = f"The command line needs {name}; install it with: pip install 'lln-attention[cli]'"
    code = f"import sys; sys.modules[{name!r}] = None; import lln.__main__; lln.__main__.main()"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (1, f"{sentence}\n")
    code = f"import sys; sys.modules[{name!r}] = None; import lln.lab.cli.app"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stderr.splitlines()[-1] == f"ModuleNotFoundError: {sentence}"


def test_the_modules_of_each_extra_are_what_it_installs() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules: dict[str, set[str]] = {}
    for module, packages in importlib.metadata.packages_distributions().items():
        for package in packages:
            modules.setdefault(package.lower().replace("_", "-"), set()).add(module)

    def list_packages(extra: str) -> set[str]:
        found: set[str] = set()
        for need in asked[extra]:
            name, inner = re.match(r"([\w-]+)(?:\[(.*?)\])?", need).groups()  # type: ignore[union-attr]
            found |= {name} if name != "lln-attention" else set().union(*map(list_packages, inner.split(",")))
        return found

    for extra, names in EXTRAS.items():
        wanted = list_packages(extra)
        assert len(names) == len(wanted), extra
        assert all(modules[package] & set(names) for package in wanted if package in modules), extra


def test_the_package_is_typed_and_names_its_version_once() -> None:
    assert (Path(lln.__file__).parent / "py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dynamic"] == ["version", "readme", "urls"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", lln.__version__)
    assert lln.__version__ in (ROOT / "CHANGELOG.md").read_text()


def test_every_public_name_is_there_and_documented() -> None:
    for name in set(lln.__all__) - {"__version__"}:
        assert getattr(lln, name).__doc__


COMMANDS = [command.callback.__name__ for command in app.registered_commands if command.callback is not None]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_teaches(command: str) -> None:
    answer = run_command(*command.split(), "--help")
    assert answer.exit_code == 0
    assert "Usage" in answer.output
    words = " ".join(answer.output.split())
    assert f"Examples: lln {command}" in words or f"Example: lln {command}" in words


@pytest.mark.parametrize("command", COMMANDS)
def test_options_that_several_commands_have_mean_the_same(command: str) -> None:
    output = run_command(command, "--help").output
    files = {"calibrate"}  # its result is one JSON file
    if command not in ("info", "plan"):  # which measure nothing and store nothing
        assert "--out" in output or command == "convert"  # whose folder is an argument
        assert "--seed" in output
        assert "--device" in output
    assert ("--json" in output) != (command in files)


def test_an_error_nobody_foresaw_is_one_line_unless_debugging() -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = (
            "import sys, lln.lab.cli.app, lln.lab.cli.info as info\n"
            "def broken(): raise RuntimeError('the disk\\nis full')\n"
            "info.gather_facts = broken\n"
            "lln.lab.cli.app.main()"
        )
        return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)

    found = call("info")
    assert found.returncode == 1
    assert found.stderr == "lln: RuntimeError: the disk is full (--debug shows where)\n"
    found = call("info", "--debug")
    assert found.returncode == 1
    assert "Traceback" in found.stderr
    assert call("info", "--nonsense").returncode == 2


def test_version_and_info_answer() -> None:
    assert run_command("--version") == (0, f"lln-attention {lln.__version__}\n", "")
    told = json.loads(run_command("info", "--json").stdout)
    assert told["torch"] == torch.__version__
    assert set(told["missing"]) == {"cli", "report", "instruments", "hf", "train"}
    answer = run_command("info")
    assert answer.exit_code == 0
    for line in ("lln-attention", "python", "torch", "devices", "back ends", "extra report"):
        assert line in answer.output
    (asked, *_) = told["calls"]
    of_each = [{kind[name] for kind in asked["kinds"]} for name in ("dtype", "dim", "mode")]
    assert of_each[:2] == [{"float32", "bfloat16", "float16"}, {64, 128}]
    assert of_each[2] >= {"LLN", "LLN+Diag", "LLN, causal", "evidence", "evidence, causal"}
    assert len(asked["kinds"]) == math.prod(map(len, of_each))  # every kind of call, once
    if not torch.cuda.is_available():
        assert {kind["runs"] for kind in asked["kinds"]} == {"eager"}
        assert "Not by the Triton back end: " in answer.output
    assert "calls" not in json.loads(run_command("info", "--quick", "--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "--lengths", "many"], "like 512,2048; got 'many'"),
        (["report", "--lengths", "0"], "must be positive whole numbers"),
        (["report", "--repeats", "0"], "--repeats"),
        (["report", "--device", "nowhere"], "torch cannot use 'nowhere' here"),
        (["report", "--out", "pyproject.toml"], "pyproject.toml is a file; name a folder"),
        (["rapport"], "No such command 'rapport'"),
    ],
)
def test_a_wrong_option_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    answer = run_command(*arguments)
    assert answer.exit_code == 2
    assert message in answer.output
    assert "Traceback" not in answer.output


def test_a_missing_extra_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lln.lab.cli.shared.EXTRAS", {"report": ("altair", "no_such_module")})
    answer = run_command("report")
    assert answer.exit_code == 2
    assert "needs no_such_module" in answer.output
    assert "pip install 'lln-attention[report]'" in answer.output
    assert "missing no_such_module: pip install 'lln-attention[report]'" in run_command("info").output


def test_the_report_is_a_page_that_stands_alone(tmp_path: Path) -> None:
    out = tmp_path / "page"
    sections = "moments,lengths"
    answer = run_command("report", "--lengths", "32,64", "--repeats", "2", "--sections", sections, "--out", str(out))
    assert answer.exit_code == 0
    assert str(out / "index.html") in answer.output.replace("\n", "")
    text = (out / "index.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.find_outside(out) == []  # nothing is fetched
    assert "url(http" not in text
    names = {path.name for path in out.iterdir()}
    charts = ["time-against-length", "memory-against-length", "variance-curve", "alpha-against-sigma"]
    charts += ["entropy-against-sigma"]
    files = {f"{name}.{kind}" for name in charts for kind in ("svg", "csv")}
    assert names == {"index.html", "settings", "lengths.json", "moments.json"} | files
    data = json.loads((out / "lengths.json").read_text())
    assert {"command", "commit", "device", "seed", "torch"} <= data["provenance"].keys()
    for row in data["rows"]:
        assert row["forward"]["median"] > 0
        assert row["training_bytes"] >= 3 * 12 * row["length"] * 64 * 4  # at least the three gradients
        assert show_timing(row["forward"]) in text


def test_the_page_says_where_softmax_wins() -> None:
    from lln.lab.page.lengths_section import make_section

    lengths = [256, 512, 1024]
    made = make_section(make_times({"softmax": [1, 4, 16], "LLN": [2, 3, 4], "LLN+Diag": [0.5, 9, 17]}, lengths))
    said = made.sentences
    assert "12 heads of dim 64, float32, on a CPU with 2 threads" in made.lead
    assert "LLN trains 4 times" in said[0]
    assert said[1].startswith("Memory there peaks at 1 MiB for LLN")
    assert said[2] == "LLN trains faster from 512 tokens on; at 256 and below, softmax wins."
    assert said[3] == "LLN+Diag was not reliably faster than softmax attention at any measured length."


def test_text_in_the_page_is_escaped(tmp_path: Path) -> None:
    from lln.lab.core.page import write_page
    from lln.lab.page.lengths_section import make_section

    part = make_section(make_times({"softmax": [1.0], "LLN": [1.0], "LLN+Diag": [1.0]}, [8]))
    text = write_page(tmp_path, [part], {"command": "lln <script>alert(1)</script>"}).read_text()
    assert "<script>alert" not in text
    assert "&lt;script&gt;" in text


def test_files_are_whole_or_not_there(tmp_path: Path) -> None:
    from lln.files import write_json, write_text

    path = tmp_path / "deep" / "result.json"
    write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, float("nan"))
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]
