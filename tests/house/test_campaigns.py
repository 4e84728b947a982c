"""The short versions of the long campaigns, and that each of them would notice something."""

import dataclasses
import functools
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import fuzzing
from helpers.fuzzing import CHECKS, run_case

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("op", 120),
        ("states", 60),
        ("modules", 60),
        pytest.param("plugin", 12, marks=pytest.mark.long),
    ],
)
def test_generated_cases_agree_with_their_references(kind: str, count: int) -> None:
    faults = {number: fault for number in range(count) if (fault := run_case(kind, 1, number))}
    assert not faults


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in lanes that a mask leaves out
def test_generated_calls_of_the_kernels_agree_with_theirs() -> None:
    pytest.importorskip("triton")
    faults = {number: fault for number in range(4) if (fault := run_case("kernels", 1, number))}
    assert not faults


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_kernels_that_differ_are_found() -> None:
    pytest.importorskip("triton")
    from helpers import triton_cases

    plain: Any = vars(triton_cases)["lln_attention"]

    def spoil(*given: Any, **options: Any) -> Any:
        found = plain(*given, **options)
        if options["backend"] != triton_cases.BACKEND:
            return found
        return (found[0] * 1.15, found[1]) if isinstance(found, tuple) else found * 1.15

    with mock.patch.object(triton_cases, "lln_attention", spoil):
        assert all(run_case("kernels", 1, number) is not None for number in range(4))


@pytest.mark.parametrize("kind", ["op", "states", "modules"])
def test_what_differs_is_found(kind: str) -> None:
    where: tuple[Any, str] = (fuzzing, "lln_attention") if kind != "modules" else (torch.nn.Module, "__call__")
    plain: Any = getattr(*where)

    def spoil(*given: Any, **options: Any) -> Any:
        found = plain(*given, **options)
        return (found[0] * 1.05, found[1]) if isinstance(found, tuple) else found * (1.05 + 0.1 * random.random())

    with mock.patch.object(*where, spoil):
        assert sum(run_case(kind, 1, number) is not None for number in range(40)) > 20


def test_a_case_follows_from_its_number() -> None:
    for kind in CHECKS:
        drawn = [random.Random(f"{kind} 1 7").random() for _ in range(2)]
        assert drawn[0] == drawn[1]
    one, other = (fuzzing.draw_call(random.Random("op 1 7")) for _ in range(2))
    assert torch.equal(one[0][0], other[0][0])
    assert one[1].keys() == other[1].keys()


def test_so_many_forms_of_calls_and_no_more_are_compiled() -> None:
    """Of one form are calls that differ in their lengths and the size of their exponents alone."""
    pytest.importorskip("triton")
    cases = [fuzzing.draw_kernel_case(random.Random(f"kernels 1 {number}"), 5) for number in range(60)]
    varied: dict[str, Any] = {"lengths": (), "key_lengths": None, "size": 1.0}
    assert len({dataclasses.replace(case, **varied) for case in cases}) == 5
    assert len({case.lengths for case in cases}) > 20


@pytest.mark.usefixtures("tools")
def test_a_stopped_campaign_goes_on_and_with_other_sources_begins_anew(tmp_path: Path) -> None:
    import campaign as campaigns

    asked = ["--cases", "5", "--out", str(tmp_path)]
    options = campaigns.make_parser(None, 10).parse_args(asked)
    tried: list[int] = []

    def try_one(number: int) -> campaigns.Tried:
        tried.append(number)
        return campaigns.Tried("tried", "it is odd" if number % 2 else None, (f"kind {number % 3}",))

    one = campaigns.Campaign("odd", options)
    one.run(try_one, until=float("inf"))
    assert tried == [0, 1, 2, 3, 4]
    options.cases = 7
    two = campaigns.Campaign("odd", options)
    two.run(try_one, until=float("inf"))
    assert tried == [0, 1, 2, 3, 4, 5, 6]
    held = json.loads((tmp_path / "odd.json").read_text())
    assert (held["done"], held["faults"]) == (7, {str(n): "it is odd" for n in (1, 3, 5)})
    assert held["counts"] == {"tried": 7}
    assert held["variants"] == 3  # each counted once, also by one that goes on
    assert {"commit", "command", "date", "seed", "device"} <= held["provenance"].keys()
    assert two.tell().startswith("odd: 7 in")
    with pytest.raises(SystemExit) as end:
        campaigns.finish([two])
    assert end.value.code is True
    held["provenance"]["commit"] = "another"  # which stored what was found so far, say
    (tmp_path / "odd.json").write_text(json.dumps(held))
    assert campaigns.Campaign("odd", options).done == 7
    held["code"] = "another"
    (tmp_path / "odd.json").write_text(json.dumps(held))
    assert campaigns.Campaign("odd", options).done == 0
    stopped = campaigns.Campaign("odd", options)
    stopped.run(try_one, until=0.0)
    assert stopped.done == 0
    assert "7 are left, the same command goes on" in stopped.tell()


@pytest.mark.long
@pytest.mark.usefixtures("tools")
def test_several_at_once_find_the_same(tmp_path: Path) -> None:
    import campaign as campaigns
    import fuzz

    held = []
    for name, at_once in (("one", 1), ("two", 2)):
        options = campaigns.make_parser(None, 10).parse_args(["--cases", "70", "--out", str(tmp_path / name)])
        found = campaigns.Campaign("fuzz-states", options)
        try_one = functools.partial(fuzz.run_named, "states", 0, {})
        found.run(try_one, float("inf"), at_once=at_once, prepare=fuzz.prepare)
        held.append((found.done, found.counts, found.faults))
    assert held[0] == held[1] == (70, {"states": 70}, {})


@pytest.mark.usefixtures("tools")
def test_other_sources_and_tests_are_known_and_other_pages_are_none(tmp_path: Path) -> None:
    from campaign import hash_code

    found = set()
    for name, text in (("src/a.py", "1"), ("src/a.py", "2"), ("tests/b.py", "1"), ("docs/c.md", "1"), ("d.json", "1")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        found.add(hash_code(tmp_path))
    assert len(found) == 3


@pytest.mark.usefixtures("tools")
def test_the_page_tells_what_is_stored_and_what_is_not_there_yet(tmp_path: Path) -> None:
    from campaigns_table import campaigns

    about = {"commit": "0a1b", "device": "abacus"}
    held = {"done": 120, "seconds": 90.0, "faults": {}, "provenance": about, "request": {"seed": 3}}
    for name, counts in (("kill-train", {"2 kills": 100, "0 kills": 20}), ("mutants", {"killed": 119, "survived": 1})):
        faults = {"7": "state.py:3 number: 0 -> 1"} if name == "mutants" else {}
        (tmp_path / f"{name}.json").write_text(json.dumps({**held, "name": name, "counts": counts, "faults": faults}))
    text = campaigns(tmp_path)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "0a1b" in line]
    assert cells == [
        ["`lln train`, killed", "200 kills of 120 runs", "0", "2 min", "3", "0a1b", "abacus"],
        ["mutants", "120", "1 survive", "2 min", "3", "0a1b", "abacus"],
    ]
    (left,) = [line for line in text.splitlines() if line.startswith("These campaigns have not reached")]
    assert "fuzz-op (0 of 50,000)" in left
    assert "bad-inputs (0 of 400)" in left
    assert "kill" not in left
    assert "mutants" not in left


@pytest.mark.usefixtures("tools")
def test_what_is_stored_of_two_runs_agrees_where_they_are_the_same(tmp_path: Path) -> None:
    import kill_test

    for name, loss, seconds in (("one", 1.0, 3.0), ("same", 1.0, 4.0), ("other", 1.5, 3.0)):
        (tmp_path / name / "run").mkdir(parents=True)
        found = {"metrics": {"loss": loss}, "seconds": seconds, "provenance": {"date": seconds}}
        (tmp_path / name / "run" / "result.json").write_text(json.dumps(found))
        (tmp_path / name / "run" / "model.safetensors").write_bytes(b"weights")
    ends = {name: kill_test.read_end(tmp_path / name) for name in ("one", "same", "other")}
    assert kill_test.find_difference(ends["one"], ends["same"]) is None
    assert kill_test.find_difference(ends["one"], ends["other"]) == "run/result.json is another"
    (tmp_path / "same" / "run" / "model.safetensors").write_bytes(b"weight!")
    assert kill_test.find_difference(ends["one"], kill_test.read_end(tmp_path / "same"))
    (tmp_path / "same" / "run" / "model.safetensors").unlink()
    missing = kill_test.find_difference(ends["one"], kill_test.read_end(tmp_path / "same"))
    assert missing == "run/model.safetensors is in one of the two alone"


@pytest.mark.usefixtures("tools")
def test_a_process_is_killed_and_its_command_goes_on(tmp_path: Path) -> None:
    import kill_test

    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert kill_test.run(sleeper, tmp_path, after=0.2) == -9
    assert kill_test.run([sys.executable, "-c", "raise SystemExit(4)"], tmp_path) == 4


@pytest.mark.long
@pytest.mark.usefixtures("tools")
def test_every_mutant_is_another_program() -> None:
    import mutants

    drawn, other = mutants.draw(0), mutants.draw(1)
    assert drawn != other
    assert set(drawn) == set(other)
    assert len(set(drawn)) == len(drawn)
    assert len(drawn) > 5000
    rooms = {one.file.split("/")[0] for one in drawn}
    assert {"kernels", "state.py", "checks.py", "matching", "hf"} <= rooms
    assert {one.operator for one in drawn} >= {
        "comparison", "arithmetic", "and, or", "not", "sign", "truth", "number", "name", "statement"
    }  # fmt: skip
    for one in drawn[:200]:
        source = (ROOT / "src" / "lln" / one.file).read_text()
        assert " ".join(source[one.start : one.end].split()) == one.before
        changed = source[: one.start] + one.after + source[one.end :]
        assert changed != source
        compile(changed, one.file, "exec")
    for tests in mutants.TESTS.values():
        assert all((ROOT / "tests" / one).exists() for one in tests)


@pytest.mark.usefixtures("tools")
def test_a_mutant_is_noticed_and_the_sources_are_as_they_were(tmp_path: Path) -> None:
    """Two states may have betas that are further apart."""
    import mutants

    source = (ROOT / "src/lln/state.py").read_text()
    one, _ = [m for m in mutants.list_mutants("state.py", source) if m.before == "1e-6"]
    assert (one.operator, one.after) == ("number", "2e-06")
    shutil.copytree(ROOT / "src" / "lln", tmp_path / "lln", ignore=shutil.ignore_patterns("__pycache__"))
    said = mutants.notice(one, tmp_path, ["core/test_refusals.py"])
    assert said is not None
    assert said.startswith("FAILED tests/core/test_refusals.py::test_one_beta_is_the_same")
    assert (tmp_path / "lln/state.py").read_text() == source


@pytest.mark.parametrize("tool", ["fuzz", "kill_test", "refuse", "mutants"])
def test_a_campaign_says_how_it_is_run(tool: str) -> None:
    text = (ROOT / "tools" / f"{tool}.py").read_text()
    target = {"fuzz": "fuzz", "kill_test": "kill-test", "refuse": "bad-inputs", "mutants": "mutants"}[tool]
    assert f"make {target}" in text
    assert f"\n{target}: $(READY)\n\t$(VENV)/bin/python tools/{tool}.py" in (ROOT / "Makefile").read_text()
    assert f"make {target}" in (ROOT / "docs" / "hardening.md").read_text()
