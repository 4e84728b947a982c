"""`lln reproduce` on the command line."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lln.files import read_data, read_json, write_json, write_result
from lln.lab.cli import shared
from lln.lab.core.errors import DataError, Refused
from lln.lab.core.progress import Bars, describe_metrics, progress_bar

if TYPE_CHECKING:
    from lln.lab.paper.jobs import Job
    from lln.lab.paper.reproduction import Reproduction, Workload

LISTED: dict[str, tuple[str, str]] = read_data("reproductions")  # title, and time at scale tiny on one core
FigureName = enum.StrEnum("FigureName", list(LISTED))  # type: ignore[misc]
Scale = enum.StrEnum("Scale", "tiny mini paper")
TRAINED = tuple(read_data("experiments"))  # from training runs
TUNED = ("table1", "matching", "variants")  # pre-trained, then fine-tuned
MEASURED = ("table2", "table4")  # of single training steps
SHARED = ("--attentions", "--set", "--from", "--no-charts", "--scale")  # by these and those that are trained


def print_list(wanted: bool) -> None:
    """What can be made, and how long it takes."""
    if not wanted:
        return
    from lln.lab.core.tables import print_wide, terminal_table

    rows = [[name, *told] for name, told in LISTED.items()]
    caption = "Times are those of one core, of training at scale tiny, as measured for the documentation. Figures 3 "
    caption += "and 4 of the paper are block diagrams: there is nothing to measure in them."
    print_wide(terminal_table(["name", "what it is", "time"], rows, "l", caption=caption, caption_justify="left"))
    raise typer.Exit


def reproduce(
    figure: Annotated[FigureName, typer.Argument(metavar="FIGURE")],
    out: Path = Path("reproduced"),
    quick: bool = False,
    seeds: shared.CountOrNone = None,
    seed: shared.Seed = 0,
    scale: Scale = Scale.tiny,
    device: shared.Device = "",
    attentions: str | None = None,
    tasks: str | None = None,
    tunings: shared.CountOrNone = None,
    changes: Annotated[list[str] | None, typer.Option("--set")] = None,
    data_root: shared.DataRoot = None,
    source: Annotated[Path | None, typer.Option("--from")] = None,
    no_charts: bool = False,
    dry_run: bool = False,
    retry: Annotated[bool, typer.Option("--retry-failed")] = False,
    keep: Annotated[bool, typer.Option("--keep-all")] = False,
    at_once: shared.Count = 1,
    no_controls: bool = False,
    as_json: shared.AsJson = False,
    show_list: Annotated[bool, typer.Option("--list", callback=print_list, is_eager=True)] = False,
) -> None:
    """Make a figure or table of the paper from scratch, and say in numbers whether its claims hold.

    Args:
        figure: A figure or table of the paper, or one of ours. --list shows them all.
        show_list: List all figures and tables with the time that each takes, and stop.
        out: Folder for data (JSON, CSV), tables (Markdown), charts (SVG) and runs.
        quick: Take shorter sequences and fewer draws. The verdicts are then provisional.
        seeds: Number of sets of draws, or of training runs. [default: 4, with --quick 2; training runs 1]
        seed: The first seed.
        scale: How large models, sequences and runs are.
        attentions: Names, with commas between. Names of runs may have options, like lln:alpha=2. [default: the
            paper's]
        tasks: Tasks of table1 and table5; for fig9 image or mlm. [default: all; for fig9 image]
        tunings: Fine-tunings of each pre-trained model. [default: 3, at scale tiny 1]
        changes: An option of all runs, like precision=bfloat16, or of some of them, like glue.sst2.data.length=64.
            For lengths also lengths=512,2048; for pretraining rates=.5,1,2 (factors of the recipe's); for table2
            lengths, tokens (in a batch), compile and precision. May be given several times.
        source: Run nothing, and use the runs or the result in this folder.
        no_charts: Draw nothing now. --from draws later.
        dry_run: Print what would be run, and run nothing.
        retry: Run failed runs again.
        keep: Keep the checkpoints and all models of finished runs.
        no_controls: Leave out the fine-tunings of new weights that stand beside those of pre-trained models.
        at_once: Runs side by side on the device, at most 4 on a GPU. Their times then say little.

    Examples:
        lln reproduce fig2 --quick  # a look in seconds
        lln reproduce table2 --scale paper --device cuda --set tokens=16384 --set compile=yes  # on a GPU
        lln reproduce table1 --scale mini --data-root DIR --seeds 2 --attentions softmax,lln,lln:matching=entropy
            --set mlm.data.name=corpus/mine  # trains on your data
        lln reproduce fig8 --from DIR  # draws from runs that exist
        The names matching, variants, lengths and pretraining are not the paper's but ours: how alpha and beta are
            found, what else may help LLN, needles in text, and training from scratch at the best of a few rates.
        A figure that was stopped goes on when the same command is given again.
    """
    shared.need_folder(out)
    name = figure.value
    if source is not None and at_once > 1:
        raise typer.BadParameter(
            "it has no effect with --from, which runs nothing; leave it out.", param_hint="--at-once"
        )
    if name in TRAINED:
        shared.need("train")
        if quick:
            raise typer.BadParameter(f"{name} is made of runs: --scale says how long they are.", param_hint="--quick")
        if tunings and name not in TUNED:
            raise typer.BadParameter(f"it goes with {', '.join(TUNED)}, not with {name}.", param_hint="--tunings")

        from lln.lab.paper.experiments import EXPERIMENTS
        from lln.lab.paper.reproduction import check_data, understand
        from lln.lab.paper.run_jobs import cap_at_once

        try:
            if not EXPERIMENTS[name].columns and not no_charts and (why := refuse_charts("runs")):
                raise Refused(why)
            if source is not None and not source.is_dir() and not (source.is_file() and source.suffix == ".json"):
                raise Refused(f"--from: {source} is not a folder, nor a result in JSON.")
            work = understand(
                name, scale=scale.value, attentions=attentions, tasks=tasks, seeds=seeds or 1, first=seed,
                tunings=tunings, changes=shared.parse_changes(changes), device=device, out=out,
                controls=not no_controls,
            )  # fmt: skip
            if source is not None:
                with shared.trust("--from", source):
                    result = work.load(source)
            else:
                plan = work.plan(retry=retry)
                at_once = cap_at_once(at_once, work.asked.device, lambda text: typer.echo(text, err=True))
                check_data(plan.jobs, data_root)
                typer.echo(work.describe(plan, at_once), err=True)
                if dry_run:
                    typer.echo("\n".join(f"{folder}: {state}" for folder, state in plan.states.items()))
                    return
        except (ValueError, DataError) as error:
            shared.fail(f"lln reproduce: {error}")
        if source is None:
            result = run(work, plan, data_root=data_root, retry=retry, keep=keep, at_once=at_once)
            # What came of the first runs may say which others there are (the seeds at the best rate).
            while (later := work.plan(retry=False)).costs.keys() - plan.costs.keys():
                plan = later
                result = run(work, plan, data_root=data_root, retry=False, keep=keep, at_once=at_once)
        with shared.trust("--from", source):
            paths = work.write(result, charts=not no_charts)
            tell(result, work.tell(result), paths, as_json=as_json, end=f"; runs: {source or work.asked.runs}.")
        if source is None and result["failed"]:
            raise typer.Exit(1)
        return
    given = {
        "--attentions": attentions, "--tasks": tasks, "--tunings": tunings, "--set": changes, "--from": source,
        "--no-charts": no_charts, "--dry-run": dry_run, "--retry-failed": retry, "--keep-all": keep,
        "--at-once": at_once > 1, "--no-controls": no_controls, "--scale": scale.value != "tiny",
    }  # fmt: skip
    if foreign := [o for o, value in given.items() if value and not (name in MEASURED and o in SHARED)]:
        also = MEASURED if foreign[0] in SHARED else ()
        raise typer.BadParameter(f"it goes with {', '.join(TRAINED + also)}, not with {name}.", param_hint=foreign[0])
    if name in MEASURED:
        reproduce_costs(
            name, scale.value, device, out, attentions.split(",") if attentions else [], changes or [],
            repeats=1 if quick else 3, seed=seed, source=source, charts=not no_charts, as_json=as_json,
        )  # fmt: skip
        return
    shared.need("report")

    import dataclasses

    from lln.lab.paper.analysis import QUICK, Draws, tell_verdicts
    from lln.lab.paper.analysis_figures import FIGURES

    chosen, draws = FIGURES[name], QUICK if quick else Draws()
    draws = dataclasses.replace(draws, seeds=seeds or draws.seeds)
    with progress_bar(chosen.steps) as step:
        result = chosen.make(draws, seed, step)
    charts = {f"{end}.svg": text for end, text in chosen.charts(draws, result["rows"]).items()}
    paths = write_result(out, name, result, charts)
    if as_json:
        typer.echo(json.dumps(result, indent=1))
    else:
        typer.echo(tell_verdicts(f"{chosen.name}: {chosen.title}", result["verdicts"], quick=quick))
        typer.echo(f"\nWritten: {', '.join(map(str, paths))}.")


def reproduce_costs(
    name: str, scale: str, device: str, out: Path, attentions: list[str], changes: list[str], *, repeats: int,
    seed: int, source: Path | None, charts: bool, as_json: bool,
) -> None:  # fmt: skip
    shared.need("train")
    charts = charts and name == "table2"  # table4 has no lengths to draw against
    if charts and (why := refuse_charts("measures")):
        raise typer.BadParameter(why)

    import torch

    from lln.lab.paper.costs import TABLES, measure_steps, parse_setting, write_costs, write_files

    table = TABLES[name]
    if unknown := [a for a in attentions if a not in table.attentions]:
        raise typer.BadParameter(
            f"{name} has {', '.join(table.attentions)}; got {unknown[0]!r}.", param_hint="--attentions"
        )
    try:
        setting = parse_setting(changes)
        cells = [c for c in table.cells(scale, setting) if not attentions or c.attention in attentions]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--set") from None
    file = f"{name}{setting.end}.json"
    if source is not None:
        if attentions:
            raise typer.BadParameter("a result is drawn as it is; leave it out with --from.", param_hint="--attentions")
        if not (source / file).exists():
            raise typer.BadParameter(f"{source} holds no {file}.", param_hint="--from")
        result = read_json(source / file, dict)
    else:
        with progress_bar(len(cells)) as step:
            result = measure_steps(
                table, cells, scale, setting, device=torch.device(device), repeats=repeats, seed=seed, progress=step,
                store=lambda found: write_json(out / file, found),
            )  # fmt: skip
    with shared.trust("--from", None if source is None else source / file):
        paths = write_files(table, result, out, charts=charts)
        tell(result, write_costs(table, result), paths, as_json=as_json)


def refuse_charts(does: str) -> str | None:
    """Why there can be none here, if so."""
    extra = f"charts need {', '.join(names := shared.find_missing('report'))} (pip install 'lln-attention[report]')"
    return f"{extra}; --no-charts {does} without, and --from draws later." if names else None


def tell(result: dict[str, Any], text: str, paths: list[Path], *, as_json: bool, end: str = ".") -> None:
    typer.echo(json.dumps(result, indent=1) if as_json else text)
    typer.echo(f"Written: {', '.join(map(str, paths))}{end}", err=True)


def run(
    work: Reproduction, plan: Workload, *, data_root: Path | None, retry: bool, keep: bool, at_once: int
) -> dict[str, Any]:
    import transformers

    from lln.lab.paper.run_jobs import Hooks, run_jobs
    from lln.lab.paper.run_tables import tell_row

    transformers.utils.logging.set_verbosity_error()  # a new head on a trained model is meant
    if not plan.costs:
        return work.collect()
    with RunBars(plan.costs) as bars:

        def end(job: Job, now: str) -> None:
            bars.end(job)
            if job.folder in plan.costs:
                result = work.collect()
                if now == "finished" and work.experiment.columns:
                    bars.say(tell_row(result, job.config.attention.label))

        hooks = Hooks(say=bars.say, begin=bars.begin, step=bars.step, end=end)
        try:
            run_jobs(
                plan.jobs, work.asked.runs, device=work.asked.device, data_root=data_root, hooks=hooks,
                retry=retry, keep=keep, at_once=at_once,
            )  # fmt: skip
        except KeyboardInterrupt:
            work.collect()
            bars.progress.stop()
            shared.fail(f"Stopped. The same command goes on where it was; what there is so far is in {work.out}.", 130)
        except OSError as error:
            bars.progress.stop()
            why = f"{error.strerror or error}: the runs in {work.asked.runs} stop here"
            shared.fail(f"{why}; the same command goes on.", 1)
    return work.collect()


class RunBars(Bars):
    """Two bars: all runs, by what they are estimated to take, and the steps of the one that was heard of last."""

    def __init__(self, costs: dict[str, float]) -> None:
        super().__init__()
        self.costs, self.number, self.done = costs, 0, 0.0
        self.running: dict[str, float] = {}  # the share of each that is done
        self.all = self.add("runs", sum(costs.values()) or 1)
        self.one = self.add("", 1, visible=False)

    def begin(self, job: Job) -> None:
        self.number += 1
        self.running[job.folder] = 0.0
        self.all(description=f"run {self.number} of {len(self.costs)}: {job.folder}")
        self.one(completed=0, total=job.config.optimisation.steps, visible=True, description="start")

    def step(self, job: Job, number: int, values: dict[str, float]) -> None:
        steps = job.config.optimisation.steps
        self.one(completed=number, total=steps, description=describe_metrics(values))
        self.running[job.folder] = number / steps
        self.advance()

    def end(self, job: Job) -> None:
        self.done += self.costs.get(job.folder, 0.0)
        self.running.pop(job.folder, None)
        self.advance()

    def advance(self) -> None:
        part = sum(self.costs.get(folder, 0.0) * share for folder, share in self.running.items())
        self.all(completed=self.done + part)
