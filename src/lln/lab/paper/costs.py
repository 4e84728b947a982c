"""Tables 2 and 4: time and memory of a training step of the paper's models, attention by attention."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lln.files import write_result
from lln.lab.core.documents import write_markdown
from lln.lab.core.limits import LONGEST
from lln.lab.core.progress import Progress
from lln.lab.core.provenance import provenance
from lln.lab.core.tables import show_number
from lln.lab.core.timing import peak_memory, time_calls
from lln.lab.paper.published import LENGTHS2, PAPER2, PAPER4, TASKS4
from lln.lab.recipes import recipe
from lln.lab.train.config import Config, Model
from lln.lab.train.models import Sizes, build, skip_masks

TOGETHER_MS, MOST_STEPS = 500, 8  # of the steps that are timed as one


@dataclasses.dataclass(frozen=True)
class Setting:
    """What can be asked for beyond the paper's: other lengths, batches of so many tokens (at least one sequence),
    torch.compile, another precision (None: bfloat16 on a GPU, float32 elsewhere)."""

    lengths: tuple[int, ...] = ()
    tokens: int = 0
    compile: bool = False
    precision: str | None = None

    @property
    def end(self) -> str:
        """Of the names of files."""
        return (f"-{self.tokens}-tokens" if self.tokens else "") + ("-compiled" if self.compile else "")


def read_count(text: str, most: int) -> int:
    if not 0 < (count := int(text)) <= most:
        raise ValueError(f"it must lie between 1 and {most:,}")
    return count


def parse_setting(changes: list[str]) -> Setting:
    """ValueError, in one sentence, for what is no setting."""
    readers: dict[str, Callable[[str], Any]] = {
        "lengths": lambda text: tuple(read_count(part, LONGEST) for part in text.split(",")),
        "tokens": lambda text: read_count(text, LONGEST),
        "compile": {"yes": True, "no": False}.__getitem__,
        "precision": {name: name for name in ("float32", "bfloat16")}.__getitem__,
    }
    found: dict[str, Any] = {}
    for change in changes:
        name, _, text = change.partition("=")
        try:
            found[name] = readers[name](text)
        except (KeyError, ValueError):
            raise ValueError(
                "of single steps these can be set: lengths=512,65536, tokens=16384, compile=yes, precision=float32 or "
                f"bfloat16; got {change!r}."
            ) from None
    return Setting(**found)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One training step: a model, an attention, a batch of sequences of one length."""

    column: str  # a length, or a task
    attention: str
    config: Config
    sizes: Sizes
    batch: int
    length: int
    implementation: str | None = None  # of softmax in transformers, where it is not torch's


@dataclasses.dataclass(frozen=True)
class CostTable:
    name: str
    title: str
    attentions: tuple[str, ...]
    cells: Callable[[str, Setting], list[Cell]]  # of a scale
    paper: dict[str, Any]


TORCH, OURS = "torch", ("lln", "lln_diag")
ROWS2 = ("softmax", TORCH, "nystromformer", "lln", "lln_diag")  # softmax as the paper has it, and torch's own


def list_cells2(scale: str, setting: Setting) -> list[Cell]:
    """RoBERTa, a batch of one."""
    model, lengths = {
        "tiny": (Model(layers=2, width=128, heads=2, inner=512), (256, 512, 1024, 2048)),
        "mini": (Model(layers=6, width=384, heads=6, inner=1536), LENGTHS2),
        "paper": (Model(layers=12, width=768, heads=12, inner=3072), LENGTHS2),
    }[scale]
    sizes = Sizes(vocabulary=50265 if scale == "paper" else 8192, padding=1)
    found = []
    for name in ROWS2:
        base = recipe("mlm", "paper", "softmax" if name == "torch" else name)
        for length in setting.lengths or lengths:
            config = dataclasses.replace(base, model=model, data=dataclasses.replace(base.data, length=length))
            batch = max(setting.tokens // length, 1)
            given = "eager" if name == "softmax" else None
            found.append(Cell(str(length), name, config, sizes, batch, length, given))
    return found


def list_cells4(scale: str, setting: Setting) -> list[Cell]:
    """Long Range Arena's models; with the paper's batches and lengths, or a part of them."""
    if setting.lengths or setting.tokens:
        raise ValueError(
            "lengths and tokens can be set for table2 only: table4 has a length and a batch for each task."
        )
    found = []
    for name in PAPER4:
        for task in TASKS4:
            config = recipe("lra", "paper", name, task)
            batch, length = config.optimisation.batch, config.data.length
            if scale != "paper":
                batch, length = (2, length // 4) if scale == "tiny" else (8, length)
                config = dataclasses.replace(config, data=dataclasses.replace(config.data, length=length))
            sizes = Sizes(vocabulary=512, labels=10, pair=task == "retrieval")
            found.append(Cell(task, name, config, sizes, batch, length))
    return found


TABLES = {
    "table2": CostTable("table2", "a training step of RoBERTa", ROWS2, list_cells2, PAPER2),
    "table4": CostTable(
        "table4", "a training step of Long Range Arena's models of 2 layers", tuple(PAPER4), list_cells4, PAPER4
    ),
}


def measure_steps(
    table: CostTable, cells: list[Cell], scale: str, setting: Setting, *, device: torch.device, repeats: int, seed: int,
    progress: Progress, store: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:  # fmt: skip
    """Milliseconds and bytes of each cell, or why there are none; stored as they come."""
    setting = dataclasses.replace(setting, precision=setting.precision or choose_precision(device))
    result: dict[str, Any] = {
        "table": table.name,
        "what": f"time and peak memory of {table.title}: forward, backward and AdamW, `steps` of them without a wait",
        "scale": scale,
        "setting": dataclasses.asdict(setting),
        "provenance": provenance(seed, device),
        "rows": [],
    }
    for cell in cells:
        progress(f"{cell.attention}: {cell.column}")
        row: dict[str, Any] = {
            "attention": cell.attention, "column": cell.column, "batch": cell.batch, "length": cell.length,
            "ms": None, "bytes": None, "note": None,
        }  # fmt: skip
        torch.manual_seed(seed)
        try:
            row |= measure_step(cell, device, repeats, setting)
        except torch.OutOfMemoryError:
            row["note"] = "OOM"
        except ValueError as error:
            row["note"] = str(error)
        torch.compiler.reset()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        result["rows"].append(row)
        store(result)
    return result


def choose_precision(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def measure_step(cell: Cell, device: torch.device, repeats: int, setting: Setting) -> dict[str, Any]:
    with device:  # a large model starts much sooner where its random numbers are drawn on the GPU
        model: Any = build(cell.config, cell.sizes)
    model = model.to(device).train()
    if cell.implementation is not None:
        model.set_attn_implementation(cell.implementation)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device.type == "cuda")
    run = torch.compile(model) if setting.compile else model
    mixed = (setting.precision or choose_precision(device)) == "bfloat16"
    ids = torch.randint(5, cell.sizes.vocabulary, (cell.batch, cell.length), device=device)
    given = {"input_ids": ids, "labels": ids}
    if cell.config.task == "lra":
        given["labels"] = torch.randint(cell.sizes.labels, (cell.batch,), device=device)
    if cell.sizes.pair:
        given["pair_ids"] = ids.flip(0)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed), skip_masks():
            loss = run(**given).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    for _ in range(2):  # the first makes the optimiser's moments, and may compile
        step()
    count = count_together(step, device)

    def steps() -> None:
        for _ in range(count):
            step()

    timing = time_calls({"steps": steps}, repeats=repeats, device=device, warmup=0)["steps"]
    ms = {name: getattr(timing, name) / count for name in ("median", "low", "high")} | {"repeats": timing.repeats}
    # Of the step, with weights and optimiser, which the paper counts too.
    held = sum(p.numel() * p.element_size() for p in model.parameters()) * 3
    return {"ms": ms, "steps": count, "bytes": peak_memory(step, device) + held}


def count_together(step: Callable[[], None], device: torch.device) -> int:
    """Steps that are timed together. Training does not wait for the GPU between them: the host prepares a step while
    the one before it runs, and a wait after each would time the host's head start, not the step. Of a step that
    takes most of a second the head start is little, and one is enough."""
    if device.type != "cuda":
        return 1
    once = time_calls({"step": step}, repeats=1, device=device, warmup=0)["step"].median
    return max(min(round(TOGETHER_MS / once), MOST_STEPS), 1)


def write_costs(table: CostTable, result: dict[str, Any]) -> str:
    """Ours beside the paper's, which were measured on another device: what can be compared is how they grow."""
    return write_markdown("costs.md", **prepare_costs(table, result))


def prepare_costs(table: CostTable, result: dict[str, Any]) -> dict[str, Any]:
    """What its template takes: the headers and rows of its tables, ours and the paper's."""
    columns = list(dict.fromkeys(row["column"] for row in result["rows"]))
    cells = {(row["attention"], row["column"]): row for row in result["rows"]}
    there = [name for name in table.attentions if any((name, column) in cells for column in columns)]
    ms = {key: row["ms"]["median"] for key, row in cells.items() if row["ms"] is not None}
    mib = {key: cells[key]["bytes"] / 2**20 for key in ms}
    why = {key: "OOM" if row["note"] == "OOM" else "no" for key, row in cells.items()}
    measured, published = [], []
    for unit, found in (("ms a step", ms), ("MiB", mib)):
        shown = why | {key: show_number(value) for key, value in found.items()}
        rows = [[name, *(shown.get((name, column), "") for column in columns)] for name in there]
        for name in (n for n in there if n in OURS and TORCH in there and found is ms):
            pairs = [((TORCH, column), (name, column)) for column in columns]
            ratios = [f"{ms[base] / ms[own]:.2f}" if base in ms and own in ms else "" for base, own in pairs]
            rows.append([f"{name}, times as fast as {TORCH}", *ratios])
        measured.append(([unit, *columns], rows))
    for unit, known in next(iter(table.paper.values())).items():
        rows = [
            [name, *("OOM" if value is None else f"{value:g}" for value in values[unit].values())]
            for name, values in table.paper.items()
        ]
        published.append(([f"{unit}, the paper's", *known], rows))
    return result | {"title": table.title, "measured": measured, "published": published}


def write_files(table: CostTable, result: dict[str, Any], out: Path, *, charts: bool) -> list[Path]:
    """NAME.json, NAME.md and, where asked for, charts; returns where they are."""
    name = f"{table.name}{Setting(**result['setting']).end}"
    texts = {".md": write_costs(table, result)}
    if charts:
        from lln.lab.paper.result_charts import draw_costs

        texts |= {f"{end}.svg": text for end, text in draw_costs(result).items()}
    return write_result(out, name, result, texts)
