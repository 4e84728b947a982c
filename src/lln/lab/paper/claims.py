"""What the paper says of Figs. 1, 8, 9 and 10, held against the numbers of runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from lln.lab.paper.analysis import Verdict
from lln.lab.paper.spread import find_difference

NEAR = 0.05  # nats: a loss that is higher by no more than this is said to follow another
SOME = 1.0  # bits: entropy that is "approximately zero"
RANGE9 = (2.0, 2.2)  # of alpha and beta in the paper's Fig. 9

Ends = dict[str, tuple[float, float]]  # by series: the first value and the last


def judge_cooling(attention: str, temperature: Ends, entropy: Ends) -> Verdict:
    (t0, t1), (h0, h1) = (map(statistics.fmean, zip(*ends.values(), strict=True)) for ends in (temperature, entropy))
    return Verdict(
        claim=f"The temperature decreases during training, and with it the entropy ({attention}).",
        holds=t1 < t0 and h1 < h0,
        numbers={"temperature_first": t0, "temperature_last": t1, "entropy_first": h0, "entropy_last": h1},
        sentence=f"Mean over the layers from the first record to the last: temperature {t0:.3g} to {t1:.3g}, entropy "
        f"{h0:.2f} to {h1:.2f} bits.",
    )


def judge_layers(attention: str, entropy: Ends) -> Verdict:
    """Of three layers or more."""
    values = [last for _, last in entropy.values()]
    lowest = min(values[1:-1])
    return Verdict(
        claim=f"The first layers keep a high entropy, while that of middle layers comes near zero ({attention}).",
        holds=lowest < SOME and values[0] > lowest,
        numbers={"first_layer": values[0], "lowest_middle_layer": lowest},
        sentence=f"In the end the entropy of layer 1 is {values[0]:.2f} bits, the lowest of the middle layers "
        f"{lowest:.2f}.",
    )


def judge_gaps(attention: str, gap: Ends) -> Verdict:
    fallen = [name for name, (first, last) in gap.items() if last < first]
    return Verdict(
        claim=f"In most layers the spectral gap decreases during training ({attention}).",
        holds=len(fallen) > len(gap) / 2,
        numbers={"layers": len(gap), "decreased": len(fallen)},
        sentence=f"It decreased in {len(fallen)} of {len(gap)} layers.",
    )


def judge_loss(attention: str, ours: Sequence[float], softmax: Sequence[float]) -> Verdict:
    """Of the final losses of runs with different seeds."""
    said, (mean, theirs) = find_difference(ours, softmax), map(statistics.fmean, (ours, softmax))
    return Verdict(
        claim=f"The loss of {attention} follows that of softmax, or falls below it.",
        # No: more than NEAR above it, and by more than the noise. With a large noise, or one seed, nobody knows.
        holds=None if said.noise is None or NEAR < said.difference <= said.noise else said.difference <= NEAR,
        numbers={"final": mean, "softmax": theirs, "difference": said.difference, "noise": said.noise},
        sentence=f"Final validation loss {mean:.3f}, of softmax {theirs:.3f}: {said.difference:+.3f}"
        + (" with one seed" if said.noise is None else f", where the noise of seeds is {said.noise:.3f}")
        + f"; up to {NEAR} above it counts as following.",
    )


def judge_scale(attention: str, ours: float, softmax: float, first: float, lowered: tuple[int, int]) -> Verdict:
    """first: the inverse scale that runs begin with; lowered: how often ours and softmax's scale was. Where no scale
    came below the first one, the largest inverse is that of the beginning, and says nothing."""
    tested = max(ours, softmax) > first
    begun = "" if tested else " (the one that runs begin with)"
    times = [f"{count} time{'s' * (count != 1)}" for count in lowered]
    return Verdict(
        claim=f"The largest inverse loss scale of {attention} does not exceed that of softmax.",
        holds=ours <= softmax if tested else None,
        numbers={"largest": ours, "softmax": softmax, "first": first}
        | {"lowered": lowered[0], "softmax_lowered": lowered[1]},
        sentence=f"Largest inverse loss scale {ours:.3g}, of softmax {softmax:.3g}{begun}; the loss scale was lowered "
        f"{times[0]}, that of softmax {times[1]}.",
    )


def judge_range(attention: str, values: Sequence[float]) -> Verdict:
    """Of alpha and beta, means over the heads of a layer."""
    low, high, inside = min(values), max(values), statistics.fmean(RANGE9[0] <= x <= RANGE9[1] for x in values)
    return Verdict(
        claim=f"alpha and beta stay within (2, 2.2) during training ({attention}).",
        holds=inside == 1,
        numbers={"lowest": low, "highest": high, "inside": inside},
        sentence=f"Means over the heads of a layer lie between {low:.3f} and {high:.3f}; "
        f"{100 * inside:.0f} % of them within (2, 2.2).",
    )


def judge_fixed(attention: str, by: dict[float, list[float]], matched: list[float]) -> list[Verdict]:
    """Fixed values below 2 lose accuracy, those from 2 on do not. by: accuracies of each alpha = beta."""
    apart = {alpha: find_difference(values, matched) for alpha, values in by.items()}
    worse = {a: d.noise is not None and d.difference < -d.noise for a, d in apart.items()}
    once = any(d.noise is None for d in apart.values())
    seeds, mean = "one seed" if once else "beyond the noise of seeds counts", statistics.fmean(matched)
    found = []
    for low, words in ((True, "below 2 lose accuracy against"), (False, "from 2 on reach the accuracy of")):
        asked = [a for a in by if (a < 2.0) == low]
        texts = ", ".join(f"{round(apart[a].difference, 1) + 0.0:+.1f} at {a:g}" for a in asked)  # no -0.0
        if asked:
            found.append(
                Verdict(
                    claim=f"Fixed alpha = beta {words} moment matching ({attention}).",
                    holds=None if once else all(worse[a] == low for a in asked),
                    numbers={f"difference_{a:g}": apart[a].difference for a in asked} | {"matched": mean},
                    sentence=f"Accuracy against {mean:.1f} % with matching: {texts} ({seeds}).",
                )
            )
    return found


def judge_risk(attention: str, four: float, two: float, matched: float | None) -> Verdict:
    return Verdict(
        claim=f"With alpha = beta = 4 the inverse loss scale is larger than with 2 ({attention}).",
        holds=four > two,
        numbers={"four": four, "two": two, "matched": matched},
        sentence=f"Largest inverse loss scale {four:.3g} with 4, {two:.3g} with 2"
        + ("." if matched is None else f", {matched:.3g} with matching."),
    )
