"""The section on time and memory against length, from a result of lln.lab.bench.calls.measure_lengths."""

from lln.lab.bench.calls import OURS
from lln.lab.core.charts import draw_against_length
from lln.lab.core.documents import write_paragraphs
from lln.lab.core.page import MIB, Chart, Result, Rows, Section, pick, tell_section
from lln.lab.core.tables import show_number, show_timing

WIDE = 0.5  # of the median: quartiles further apart make a ratio rough
CROWDED = 1.25  # times as much work as cores


def make_section(result: Result) -> Section:
    rows = result["rows"]
    times, memory, table = [], [], []
    for row in rows:
        name, length, ms, extra = row["attention"], row["length"], row["training"], row["training_bytes"] / MIB
        times.append({"attention": name, "length": length, "ms": ms["median"], "low": ms["low"], "high": ms["high"]})
        memory.append({"attention": name, "length": length, "MiB": extra})
        faster = f"{compare_with_softmax(rows, name, length):.2g}"
        table.append([f"{length:,}", name, show_timing(row["forward"]), show_timing(ms), faster, show_number(extra)])
    of_time, of_memory = write_paragraphs("lengths.txt", "captions")
    charts = [
        Chart(f"{name}-against-length", draw_against_length(points, unit, title), caption, rows=points)
        for name, points, unit, title, caption in (
            ("time", times, "ms", "forward + backward (ms)", of_time),
            ("memory", memory, "MiB", "peak extra memory (MiB)", of_memory),
        )
    ]
    return Section(
        **tell_section("lengths", result),
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


def describe_doubts(result: Result) -> list[str]:
    """What makes the times of a result rough: other work on the machine, or repeats that differ much."""
    wide = {
        (row["attention"], row["length"]): (row["training"]["high"] - row["training"]["low"])
        / row["training"]["median"]
        for row in result["rows"]
    }
    (name, length), spread = max(wide.items(), key=lambda pair: pair[1], default=(("", 0), 0.0))
    load, cores = result.get("load"), result.get("cores")  # of older results nobody knows
    busy = load is not None and cores is not None and load > cores * CROWDED
    facts = {"name": name, "length": length, "spread": spread, "load": load, "cores": cores}
    if not busy and spread <= WIDE:
        return []
    return write_paragraphs("lengths.txt", "doubts", busy=busy, wide=spread > WIDE, **facts)


def write_sentences(result: Result) -> list[str]:
    rows = result["rows"]
    longest = max(row["length"] for row in rows)
    faster = {name: compare_with_softmax(rows, name, longest) for name in OURS}
    memory = {row["attention"]: row["training_bytes"] / MIB for row in rows if row["length"] == longest}
    said = write_paragraphs("lengths.txt", "sentences", longest=longest, faster=faster, memory=memory)
    return [*said, *describe_crossovers(rows)]


def describe_crossovers(rows: Rows) -> list[str]:
    """From which length on each is faster than softmax attention."""
    lengths = sorted({row["length"] for row in rows})
    found = {}
    for name in OURS:
        # From here on, not merely here: a lucky short length is not a crossover.
        faster = [n for i, n in enumerate(lengths) if all(compare_with_softmax(rows, name, m) > 1 for m in lengths[i:])]
        found[name] = [n for n in lengths if n not in faster], faster
    return write_paragraphs("lengths.txt", "crossovers", crossovers=found)
