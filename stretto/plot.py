"""Draws metrics.jsonl: what the model earned and learned, over the steps. `<run.folder>/reward.png`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stretto.errors import NotFoundError
from stretto.history import Curve

INK, REWARD, ACCURACY, GRID = "#24292f", "#4c78a8", "#e45756", "#d8dee4"
SMOOTH_SHARE = 0.08
"""Share of the steps over which the bold line averages; the faint one is what was measured."""


@dataclass(frozen=True, slots=True)
class Curves:
    """What is drawn."""

    reward: Curve = field(default_factory=Curve)
    accuracy: Curve = field(default_factory=Curve)


def read(lines: Iterable[str]) -> Curves:
    """Curves of metrics.jsonl; torn lines and missing values are left out."""
    curves = Curves()
    for line in lines:
        try:
            record: dict[str, Any] = json.loads(line)
            metrics: dict[str, Any] = record["metrics"]
            step, kind = int(record["step"]), str(record["kind"])
        except (ValueError, KeyError, TypeError):
            continue
        if kind == "train" and isinstance(reward := metrics.get("reward_mean"), int | float):
            curves.reward.add(step, float(reward))
        elif kind == "validation" and isinstance(accuracy := record.get("accuracy"), int | float):
            curves.accuracy.add(step, float(accuracy))
    return curves


def smooth(values: list[float], width: int) -> list[float]:
    """Each value's mean with up to `width` before it."""
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    return [(sums[i + 1] - sums[max(0, i + 1 - width)]) / (i + 1 - max(0, i + 1 - width)) for i in range(len(values))]


def draw(folder: Path, title: str) -> Path:
    """Write reward.png beside metrics.jsonl in `folder`. Raises NotFoundError when there is nothing to draw."""
    path = folder / "metrics.jsonl"
    try:
        with path.open() as file:
            curves = read(file)
    except OSError:
        raise NotFoundError(f"{path}: there is no such file; no step was trained yet") from None
    if not curves.reward.steps and not curves.accuracy.steps:
        raise NotFoundError(f"{path}: no step with a reward in it yet")
    target = folder / "reward.png"
    _save(curves, title, target)
    return target


def _save(curves: Curves, title: str, target: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150, layout="constrained")  # pyright: ignore[reportUnknownMemberType]
    ax: Any = axes  # matplotlib's methods are only partly typed
    reward, accuracy = curves.reward, curves.accuracy
    if reward.steps:
        width = max(1, round(len(reward.steps) * SMOOTH_SHARE))
        ax.plot(reward.steps, reward.values, color=REWARD, alpha=0.3 if width > 1 else 1.0, linewidth=1)
        ax.plot(reward.steps, smooth(reward.values, width), color=REWARD, linewidth=2, label="training reward, mean of the step")
    if accuracy.steps:
        ax.plot(
            accuracy.steps,
            accuracy.values,
            color=ACCURACY,
            linewidth=2,
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="validation accuracy, held out, sampled",
        )
        _label(ax, accuracy.steps[0], accuracy.values[0], "left")
        _label(ax, accuracy.steps[-1], accuracy.values[-1], "right")
    _dress(ax, title, [*reward.values, *accuracy.values])
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=INK)  # pyright: ignore[reportUnknownMemberType]
    figure.savefig(target)  # pyright: ignore[reportUnknownMemberType]
    plt.close(figure)


def _label(ax: Any, step: int, value: float, side: str) -> None:
    ax.annotate(
        f"{value:.2f}",
        (step, value),
        xytext=(0, 8),
        textcoords="offset points",
        ha="center",
        color=ACCURACY,
        fontsize=10,
        fontweight="bold",
    )


def _dress(ax: Any, title: str, values: list[float]) -> None:
    low, high = min([0.0, *values]), max(values)
    if low >= 0 and high <= 1:  # rewards and accuracies of 0..1 are comparable between runs only on the same axis
        ax.set_ylim(-0.02, 1.08)
    ax.set_xlim(left=-0.01 * ax.get_xlim()[1])
    ax.margins(x=0.03)
    ax.set_title(title, loc="left", color=INK, fontsize=12, fontweight="bold")
    ax.set_xlabel("train step", color=INK)
    ax.grid(axis="y", color=GRID, linewidth=0.8)
    ax.set_axisbelow(True)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(GRID)
    ax.tick_params(colors=INK, length=0)
