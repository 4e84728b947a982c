"""The section on time and memory against length, from a result of lln.lab.bench.calls.measure_lengths."""

from lln.lab.bench.calls import OURS
from lln.lab.core.charts import draw_against_length
from lln.lab.core.page import MIB, Chart, Result, Rows, Section, pick
from lln.lab.core.tables import show_number, show_timing


def make_section(result: Result) -> Section:
    rows, made = result["rows"], result["provenance"]
    threads = "" if "cuda" in made else f" with {made['threads']} thread{'s' if made['threads'] > 1 else ''}"
    times, memory, table = [], [], []
    for row in rows:
        name, length, ms, extra = row["attention"], row["length"], row["training"], row["training_bytes"] / MIB
        times.append({"attention": name, "length": length, "ms": ms["median"], "low": ms["low"], "high": ms["high"]})
        memory.append({"attention": name, "length": length, "MiB": extra})
        faster = f"{compare_with_softmax(rows, name, length):.2g}"
        table.append([f"{length:,}", name, show_timing(row["forward"]), show_timing(ms), faster, show_number(extra)])
    charts = [
        Chart(
            "time-against-length", draw_against_length(times, "ms", "forward + backward (ms)"),
            "Time of forward and backward against length, for softmax attention, LLN and LLN+Diag. "
            "Bars span the quartiles of the repeats.", rows=times,
        ),
        Chart(
            "memory-against-length", draw_against_length(memory, "MiB", "peak extra memory (MiB)"),
            "Peak extra memory of forward and backward against length, for the same three.", rows=memory,
        ),
    ]  # fmt: skip
    return Section(
        name="lengths",
        title="Time and memory against length",
        lead=f"One call of attention: a batch of 1, {result['heads']} heads of dim {result['dim']}, float32, on "
        f"{made['device']}{threads}. Softmax attention is torch's own, as it chooses it here.",
        sentences=write_sentences(result),
        charts=charts,
        header=["length", "attention", "forward ms", "forward + backward ms", "times as fast", "extra MiB"],
        table=table,
        data=result,
    )


def compare_with_softmax(rows: Rows, attention: str, length: int) -> float:
    """How many times as fast it trains."""
    both = (pick(rows, attention=name, length=length)["training"]["median"] for name in ("softmax", attention))
    return float(next(both) / next(both))


def write_sentences(result: Result) -> list[str]:
    rows = result["rows"]
    longest = max(row["length"] for row in rows)
    faster = {name: f"{compare_with_softmax(rows, name, longest):.3g}" for name in OURS}
    memory = {row["attention"]: show_number(row["training_bytes"] / MIB) for row in rows if row["length"] == longest}
    return [
        f"At {longest:,} tokens, LLN trains {faster['LLN']} times and LLN+Diag {faster['LLN+Diag']} times as fast as "
        "softmax attention.",
        f"Memory there peaks at {memory['LLN']} MiB for LLN, {memory['LLN+Diag']} for LLN+Diag and {memory['softmax']} "
        "for softmax attention: torch's does not keep its matrix either, so time is the difference.",
        *describe_crossovers(rows),
    ]


def describe_crossovers(rows: Rows) -> list[str]:
    """From which length on each is faster than softmax attention."""
    lengths = sorted({row["length"] for row in rows})
    said = []
    for name in OURS:
        # From here on, not merely here: a lucky short length is not a crossover.
        faster = [n for i, n in enumerate(lengths) if all(compare_with_softmax(rows, name, m) > 1 for m in lengths[i:])]
        slower = [n for n in lengths if n not in faster]
        if not faster:
            text = "was not reliably faster than softmax attention at any measured length."
        elif slower:
            text = f"trains faster from {faster[0]:,} tokens on; at {slower[-1]:,} and below, softmax wins."
        else:
            text = f"trains faster than softmax attention at every measured length, from {lengths[0]:,} tokens on."
        said.append(f"{name} {text}")
    return said
