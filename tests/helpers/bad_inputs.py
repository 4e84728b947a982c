"""The table of bad inputs of the command line: what is typed, and words of the sentence that refuses it. Most of it
follows from what options say of themselves, so that a new option is in it from its first day; the rest stands here.

`make test` runs the table in one process; `make bad-inputs` (tools/bad_inputs.py) in a process for each row, as a user
would, and stores what came of it.
"""

import dataclasses
import enum
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lln.lab.cli.app import app
from lln.lab.core.ranges import OneOf
from lln.lab.recipes import recipe

GENERIC = ("Traceback", "(--debug shows where)", "object has no attribute")
# No training starts where something is let through that should not be.
BRIEF = {
    "optimisation.steps": "1", "model.layers": "1", "model.width": "32", "model.heads": "2", "model.inner": "32",
    "data.length": "32", "data.vocabulary": "300", "data.evaluation": "4", "optimisation.batch": "2",
}  # fmt: skip
NUMBERS = ("nan", "inf", "-inf", "-1", "many", "")
COUNTS = (*NUMBERS, "1.5", "99999999999999999999", "1e3")


class Bad(typing.NamedTuple):
    arguments: tuple[str, ...]
    said: tuple[str, ...]  # words of the sentence
    files: tuple[tuple[str, str | bytes], ...] = ()  # that are there before, in the folder the command runs in
    allowed: tuple[int, ...] = (2,)  # exit codes


def list_fields(holder: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, type, rule or None) of every option of a config."""
    for name, hint in typing.get_type_hints(type(holder), include_extras=True).items():
        value = getattr(holder, name)
        if dataclasses.is_dataclass(value):
            yield from list_fields(value, f"{prefix}{name}.")
        elif typing.get_origin(hint) is Annotated:
            yield (f"{prefix}{name}", *typing.get_args(hint))
        else:
            yield f"{prefix}{name}", hint, None


def list_wrong(kind: Any, rule: Any) -> list[str]:
    """Texts that are no value of an option."""
    if kind is bool:
        return ["maybe", "", "2", "None"]
    if isinstance(rule, OneOf):
        return [text for text in ("foo", "", rule.names[-1].upper()) if text not in rule.names]
    if rule is None:
        return []
    if typing.get_origin(kind) is tuple:
        return ["0.9", "0.9,", "nan,0.9", "0.9,1", "-0.1,0.9", "a,b"]
    wrong = list(COUNTS if kind is int else NUMBERS)
    if rule.most is not None:
        wrong.append(str(int(rule.most) + 1))
    if rule.positive or rule.least > 0:
        wrong.append("0")
    return wrong


def make_settings() -> Iterator[Bad]:
    """Of every option of a training run."""
    for name, kind, rule in list_fields(recipe("mlm", "tiny", "lln")):
        for text in list_wrong(kind, rule):
            yield train({name: text}, name)


def train(changes: dict[str, str], *said: str, task: str = "mlm", more: tuple[str, ...] = (), **rest: Any) -> Bad:
    base = {k: v for k, v in BRIEF.items() if task == "mlm" or k.startswith("optimisation")}
    pairs = (f"{name}={value}" for name, value in (base | changes).items())
    arguments = ("train", task, "--attention", "lln", "--out", "out", *more)
    return Bad((*arguments, *(word for pair in pairs for word in ("--set", pair))), said, **rest)


# What a command needs beside the option that is wrong.
NEEDED = {"convert": ("model", "out"), "inspect": ("model",), "train": ("mlm",), "reproduce": ("fig2",)}


def make_options() -> Iterator[Bad]:
    """Of every option of every command that is a number or one of some names."""
    for registered in app.registered_commands:
        command: Any = registered.callback
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            kind, info = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, None)
            if not isinstance(info, typer.models.OptionInfo):
                continue
            kind = next((one for one in typing.get_args(kind) if one is not type(None)), kind)
            shown = (info.param_decls or (f"--{name.replace('_', '-')}",))[-1]
            for text in list_wrong_texts(kind, info):
                yield Bad((command.__name__, *NEEDED.get(command.__name__, ()), shown, text), (shown,))


def list_wrong_texts(kind: Any, info: Any) -> list[str]:
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return ["foo", ""]
    if kind is int:
        beyond = [str(int(limit) + step) for limit, step in ((info.min, -1), (info.max, 1)) if limit is not None]
        return [*(text for text in COUNTS if text != "-1"), *beyond]
    return [text for text in NUMBERS if text != "-1"] if kind is float else []


JSON = "x.json"
BY_HAND = (
    train({"task": "glue"}, "task cannot be set"),
    train({"preset": "foo"}, "preset cannot be set"),
    train({"data.options.foo": "1"}, "data.options", "'foo'"),
    train({"data.options.probability": "nan"}, "data.options", "probability"),
    train({"data.options.probability": "7"}, "probability"),
    train({"data.subset": "foo"}, "data.subset", "foo"),
    train({"data.vocabulary": "99999999999"}, "data.vocabulary"),
    train({"data.vocabulary": "5"}, "vocab", "261"),
    train({"data.name": "embedded/nothing"}, "embedded/nothing"),
    train({"data.length": "0"}, "length"),
    train({"optimisation.batch": "1000000000"}, "optimisation.batch"),
    train({"optimisation.accumulation": "3"}, "accumulation"),
    train({"model.heads": "3"}, "model.heads"),
    train({"model.patch": "2"}, "model.patch", "image"),
    train({"model.start": "nowhere"}, "model.start", "nowhere"),
    train({"model.start": "~nobody-of-that-name/model"}, "model.start", "~nobody"),
    train({"model.start": "model"}, "model.start", "config.json", files=(("model/config.json", "{"),)),
    train({"model.start": "model"}, "model.start", "config.json", files=(("model/config.json", "[]"),)),
    train({"attention.name": "foo"}, "attention.name", "foo"),
    train({"attention.options.foo": "1"}, "attention.options", "foo"),
    train({"attention.options.alpha": "nan"}, "alpha"),
    train({"attention.options.alpha": "-1"}, "alpha"),
    train({"attention.options.alpha": "many"}, "alpha"),
    train({"attention.options.matching": "best"}, "matching", "best"),
    train({"save_every": "15"}, "save_every", "log_every"),
    train({"optimisation.rat": "1"}, "'rat'"),
    train({"optimisation": "1"}, "optimisation is a group"),
    train({"seed.deep": "1"}, "seed has no options"),
    train({"": "1"}, "--set", "NAME=VALUE"),
    train({}, "--set", "NAME=VALUE", more=("--set", "seed")),
    train({"seed": "5"}, "seed is given twice", more=("--seed", "3")),
    train({"graph": "no"}, "graph is given twice", more=("--graph",)),
    train({"model.start": "a"}, "model.start is given twice", more=("--start", "b")),
    train({}, "/nonesuch", "--data-root", more=("--data-root", "/nonesuch")),
    train({}, "no such home folder", more=("--data-root", "~nobody-of-that-name/x")),
    train({}, "report_to", "'paper'", more=("--report-to", "paper")),
    train({}, "--device", more=("--device", "toaster")),
    train({}, "file is a file", more=("--out", "file"), files=(("file", "x"),)),
    train({}, "file is a file", more=("--out", "file/below"), files=(("file", "x"),)),
    train({}, "is no run", more=("--out", "full"), files=(("full/thesis.tex", "x"),)),
    train({}, "config.json", more=("--out", "run"), files=(("run/config.json", '{"task": '),)),
    train({}, "config.json", more=("--out", "run"), files=(("run/config.json", b"\xff\xfe"),)),
    train({"data.name": "some/set"}, "README.md", more=("--data-root", "."),
          files=(("some/set/README.md", "---\nconfigs: 3\n---\n"),)),
    train({"data.name": "some/set"}, "README.md", more=("--data-root", "."),
          files=(("some/set/README.md", "---\nconfigs:\n- data_files: [{}]\n---\n"),)),
    train({"data.name": "some/set"}, "README.md", more=("--data-root", "."),
          files=(("some/set/README.md", "---\nconfigs:\n- config_name: a\n  data_files: []\n- 7\n---\n"),)),
    train({"data.name": "some/set"}, "README.md", more=("--data-root", "."),
          files=(("some/set/README.md", b"---\n\xff\n---\n"),)),
    train({"data.name": "some/set"}, "README.md", more=("--data-root", "."),
          files=(("some/set/README.md", "---\nconfigs: [}\n---\n"),)),
    train({"data.name": "some/set"}, "parquet", more=("--data-root", "."),
          files=(("some/set/data/train-00000-of-00001.parquet", "nonsense"),)),
    train({"data.subset": "foo"}, "data.subset", task="glue", more=("--name", "sst2")),
    train({"data.subset": "foo"}, "data.subset", task="lra", more=("--name", "listops")),
    train({"data.options.foo": "1"}, "data.options", task="lra", more=("--name", "listops")),
    train({"data.options.difficulty": "cruel"}, "difficulty", task="lra", more=("--name", "pathfinder")),
    train({"data.options.max_depth": "1"}, "max_depth", task="lra", more=("--name", "listops")),
    train({"data.options.foo": "1"}, "data.options", task="image"),
    train({"data.options.augment": "maybe"}, "augment", task="image"),
    train({"model.patch": "0"}, "model.patch", task="image"),
    train({"model.patch": "3"}, "model.patch", task="image"),
    train({"data.vocabulary": "300"}, "data.vocabulary", task="image"),
    train({"data.options.keys": "0"}, "keys", task="needles"),
    train({}, "task must be one of", task="audio"),
    train({}, "preset must be one of", more=("--preset", "foo")),
    train({}, "takes no name", more=("--name", "foo")),
    Bad(("report", "--lengths", "99999999999999999999"), ("--lengths",)),
    Bad(("report", "--lengths", "0"), ("--lengths",)),
    Bad(("report", "--lengths", "nan"), ("--lengths",)),
    Bad(("report", "--lengths", ","), ("--lengths",)),
    Bad(("report", "--sections", "foo"), ("--sections", "foo")),
    Bad(("report", "--sections", ""), ("--sections",)),
    Bad(("report", "--out", "file/below"), ("file is a file",), (("file", "x"),)),
    Bad(("report", "--out=~nobody-of-that-name/x"), ("--out", "home")),
    Bad(("report", "--device", "toaster"), ("toaster",)),
    Bad(("compare", "--lengths", "99999999999999999999"), ("--lengths",)),
    Bad(("compare", "--temperatures", "nan"), ("--temperatures",)),
    Bad(("compare", "--temperatures", "0"), ("--temperatures",)),
    Bad(("compare", "--temperatures", "inf"), ("--temperatures",)),
    Bad(("compare", "--only", "foo"), ("foo",)),
    Bad(("compare", "--attentions", ""), ("--attentions",)),
    Bad(("compare", "--only", "lln", "--all"), ("--attentions", "--all")),
    Bad(("compare", "--model", "nowhere/at/all"), ("nowhere/at/all",)),
    Bad(("compare", "--device", "toaster"), ("toaster",)),
    Bad(("bench", "--lengths", "99999999999999999999"), ("--lengths",)),
    Bad(("bench", "--shapes", "1x2"), ("--shapes",)),
    Bad(("bench", "--shapes", "0x1x1x1"), ("--shapes",)),
    Bad(("bench", "--shapes", "1x1x99999999999999999999x1"), ("--shapes",)),
    Bad(("bench", "--only", "foo"), ("foo",)),
    Bad(("bench", "--peers", "foo"), ("--peers",)),
    Bad(("bench", "--modes", "eager"), ("--modes",)),
    Bad(("bench", "--model", "nowhere/at/all"), ("nowhere/at/all",)),
    Bad(("bench", "--dropout", "nan"), ("--dropout",)),
    Bad(("bench", "--render", "none.json"), ("--render", "none.json")),
    Bad(("bench", "--render", JSON), ("--render", JSON), ((JSON, "{"),)),
    Bad(("bench", "--render", JSON), ("--render", JSON), ((JSON, "[]"),)),
    Bad(("bench", "--render", JSON), ("--render", JSON), ((JSON, b"\xff"),)),
    Bad(("bench", "--render", JSON), ("--render", JSON),
        ((JSON, '{"rows": 3, "scaling": 1, "checks": 1, "copy_bytes_per_second": 1}'),)),
    Bad(("bench", "--render", JSON), ("--render", JSON),
        ((JSON, '{"rows": [{}], "scaling": {}, "checks": [], "copy_bytes_per_second": 1}'),)),
    Bad(("bench", "--render", JSON), ("--render", JSON), ((JSON, '{"rows": [1], "errors": [], "settings": {}}'),)),
    Bad(("calibrate", "--out", "."), ("--out", "folder")),
    Bad(("calibrate", "--out", "file/below.json"), ("file is a file",), (("file", "x"),)),
    Bad(("calibrate", "--head-dims", "0"), ("--head-dims",)),
    Bad(("calibrate", "--head-dims", "99999"), ("--head-dims",)),
    Bad(("calibrate", "--lengths", "x"), ("--lengths",)),
    Bad(("calibrate", "--seeds", "1"), ("--seeds",)),
    Bad(("convert", "nowhere/at/all", "out", "--calibration", "a.txt"), ("nowhere",), (("a.txt", "words"),)),
    Bad(("convert", "model", "out", "--calibration", "none.txt"), ("none.txt",)),
    Bad(("convert", "model", "out"), ("--calibration",)),
    Bad(("convert", "model", "file/below", "--calibration", "a.txt"), ("file is a file",), (("file", "x"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt"), ("model", "config.json"),
        (("a.txt", "words " * 50), ("model/x", ""))),
    Bad(("convert", "model", "out", "--calibration", "a.txt"), ("model",),
        (("a.txt", "words " * 50), ("model/config.json", "{"))),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--rate", "nan"), ("--rate",), (("a.txt", "words"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--rate", "-1"), ("rate",), (("a.txt", "words"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--layers", "x,y"), ("layers",), (("a.txt", "words"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--attention", "foo"), ("attention",), (("a.txt", "w"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--mix", "foo"), ("mix",), (("a.txt", "w"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--overlap", "foo"), ("--overlap",), (("a.txt", "w"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--feature-map", "foo"), ("feature_map",),
        (("a.txt", "w"),)),
    Bad(("convert", "model", "out", "--images", "none"), ("none",)),
    Bad(("convert", "model", "out", "--images", "file"), ("file",), (("file", "x"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt", "--tile", "4"), ("--tile",), (("a.txt", "w"),)),
    Bad(("convert", "model", "out", "--calibration", "a.txt"), ("conversion.json",),
        (("a.txt", "w"), ("model/config.json", "{}"), ("out/conversion.json", "{"))),
    Bad(("convert", "model", "out", "--calibration", "a.txt"), ("conversion.json",),
        (("a.txt", "w"), ("model/config.json", "{}"), ("out/conversion.json", "{}"))),
    Bad(("convert", "model", "out", "--calibration", "a.txt"), ("request.json",),
        (("a.txt", "w"), ("model/config.json", "{}"), ("out.partial/request.json", "nope"))),
    Bad(("inspect", "nowhere/at/all"), ("nowhere",)),
    Bad(("inspect", "model"), ("model", "config.json"), (("model/x", ""),)),
    Bad(("inspect", "model"), ("model",), (("model/config.json", "[]"),)),
    Bad(("inspect", "~nobody-of-that-name/model"), ("home",)),
    Bad(("inspect", "model", "--file", "none.txt"), ("none.txt",)),
    Bad(("inspect", "model", "--file", "a.txt"), ("a.txt",), (("a.txt", ""),)),
    Bad(("inspect", "model", "--file", "a.txt"), ("a.txt",), (("a.txt", b"\xff\xfe\x00"),)),
    Bad(("inspect", "model", "--text", " "), ("--text",)),
    Bad(("inspect", "model", "--text", "one \udcff half"), ("--text",)),
    Bad(("inspect", "model", "--text", "a", "--file", "a.txt"), ("--file",), (("a.txt", "x"),)),
    Bad(("inspect", "model", "--out", "file/below"), ("file is a file",), (("file", "x"),)),
    Bad(("inspect", "model", "--device", "toaster"), ("toaster",)),
    Bad(("reproduce", "fig99"), ("fig99",)),
    Bad(("reproduce", "fig2", "--attentions", "lln"), ("--attentions",)),
    Bad(("reproduce", "fig2", "--scale", "mini"), ("--scale", "fig2")),
    Bad(("reproduce", "fig2", "--no-controls"), ("--no-controls", "fig2")),
    Bad(("compare", "--temperatures", "1e7"), ("--temperatures",)),
    Bad(("compare", "--attentions", "softmax", "--heads", "1048576", "--batch", "1048576", "--lengths", "16777216"),
        ("not enough memory",), (), (1,)),
    Bad(("reproduce", "table1", "--quick"), ("--quick",)),
    Bad(("reproduce", "table1", "--scale", "huge"), ("--scale",)),
    Bad(("reproduce", "table1", "--tasks", "foo"), ("--tasks", "foo")),
    Bad(("reproduce", "table1", "--attentions", "foo"), ("foo",)),
    Bad(("reproduce", "table3", "--attentions", "lln:foo=1"), ("foo",)),
    Bad(("reproduce", "table3", "--attentions", "lln:alpha=nan"), ("alpha",)),
    Bad(("reproduce", "table3", "--set", "optimisation.rate=nan"), ("optimisation.rate",)),
    Bad(("reproduce", "table3", "--set", "model.heads=0"), ("model.heads",)),
    Bad(("reproduce", "table3", "--set", "seed=4"), ("seed",)),
    Bad(("reproduce", "table3", "--set", "foo=4"), ("foo",)),
    Bad(("reproduce", "table3", "--set", "x"), ("--set",)),
    Bad(("reproduce", "table3", "--from", "none"), ("--from", "none")),
    Bad(("reproduce", "table3", "--from", JSON), (JSON,), ((JSON, "{"),)),
    Bad(("reproduce", "table3", "--from", JSON), (JSON,), ((JSON, "[]"),)),
    Bad(("reproduce", "table3", "--from", JSON), (JSON,), ((JSON, "{}"),)),
    Bad(("reproduce", "table3", "--from", JSON), (JSON,), ((JSON, '{"table": "table3"}'),)),
    Bad(("reproduce", "fig8", "--from", JSON), (JSON,), ((JSON, '{"figure": "fig8", "rows": 3}'),)),
    Bad(("reproduce", "table3", "--from", "runs"), ("config.json",), (("runs/a/config.json", "{"),)),
    Bad(("reproduce", "table2", "--from", "."), ("table2.json",), (("table2.json", "{"),)),
    Bad(("reproduce", "table2", "--from", "."), ("table2.json",), (("table2.json", "{}"),)),
    Bad(("reproduce", "table2", "--from", "none"), ("--from", "none")),
    Bad(("reproduce", "table2", "--set", "lengths=0"), ("lengths",)),
    Bad(("reproduce", "table2", "--set", "lengths=99999999999999999999"), ("lengths",)),
    Bad(("reproduce", "table2", "--set", "tokens=-1"), ("tokens",)),
    Bad(("reproduce", "table2", "--set", "foo=1"), ("foo",)),
    Bad(("reproduce", "table2", "--set", "precision=foo"), ("precision",)),
    Bad(("reproduce", "lengths", "--set", "lengths=0"), ("lengths",)),
    Bad(("reproduce", "lengths", "--set", "lengths=x"), ("lengths",)),
    Bad(("reproduce", "table3", "--data-root", "/nonesuch", "--scale", "mini"), ("/nonesuch",)),
    Bad(("reproduce", "table3", "--at-once", "2", "--from", "."), ("--at-once",)),
    Bad(("reproduce", "table3", "--out", "file/below"), ("file is a file",), (("file", "x"),)),
    Bad(("plan", "--card", "abacus"), ("--card", "abacus")),
    Bad(("plan", "--memory", "0"), ("--memory",)),
    Bad(("plan", "--link=-1",), ("--link",)),
    Bad(("plan", "--network", "0"), ("--network",)),
    Bad(("plan", "nowhere/at/all"), ("nowhere/at/all",)),
    Bad(("plan", "model"), ("model", "config.json"), (("model/x", ""),)),
    Bad(("plan", "model"), ("model",), (("model/config.json", "{"),)),
    Bad(("plan", "model"), ("model",), (("model/config.json", "[]"),)),
    Bad(("plan", "model"), ("model", "vocab_size"), (("model/config.json", '{"model_type": "timesformer"}'),)),
    Bad(("plan", "model"), ("model", "num_attention_heads"),
        (("model/config.json", '{"model_type": "bert", "num_attention_heads": 0}'),)),
    Bad(("plan", "model"), ("model", "num_hidden_layers"),
        (("model/config.json", '{"model_type": "bert", "num_hidden_layers": -3}'),)),
    Bad(("plan", "model"), ("model", "hidden_size"),
        (("model/config.json", '{"model_type": "bert", "hidden_size": "wide"}'),)),
    train({}, "--out", more=("--out=",)),
    train({}, "--start", more=("--start", "")),
    Bad(("convert", "model", ""), ("OUT", "must name")),
    Bad(("convert", "model", "/", "--calibration", "a.txt"), ("/ is no folder",),
        (("a.txt", "words " * 50), ("model/config.json", "{}"))),
    Bad(("inspect", "model", "--out", ""), ("--out",), (("model/config.json", "{}"),)),
    Bad(("foo",), ("foo",)),
    Bad(("train",), ("Missing argument",)),
    Bad(("info", "--foo"), ("--foo",)),
)  # fmt: skip


def list_bad_inputs() -> list[Bad]:
    return [*make_settings(), *make_options(), *BY_HAND]


def lay_out(bad: Bad, folder: Path) -> dict[str, bytes]:
    """Writes the files that are there before, and returns what is there."""
    for name, text in bad.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return take_stock(folder)


def take_stock(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def judge(bad: Bad, code: int, said: str, before: dict[str, bytes], after: dict[str, bytes]) -> str | None:
    """What is wrong with how an input was refused; None: nothing."""
    plain = " ".join(said.replace("│", " ").split())
    if code not in bad.allowed:
        return f"exit code {code}"
    if found := [word for word in GENERIC if word in plain]:
        return f"it says {found[0]!r}"
    if missing := [word for word in bad.said if word not in plain]:
        return f"it does not say {missing[0]!r}"
    if before != after:
        return f"it leaves {sorted({*after} ^ {*before}) or 'a changed file'}"
    return None
