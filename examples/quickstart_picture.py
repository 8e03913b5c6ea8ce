"""The quickstart's picture: one layer's down_proj input before and after R4, and the perplexities as bars."""

import matplotlib

matplotlib.use("Agg")  # draws to a file, needs no screen

import matplotlib.pyplot as plt
import torch

PLAIN, ROTATED, INK = "#d1495b", "#30638e", "#333333"


def draw(
    where: str, before: torch.Tensor, after: torch.Tensor, float_perplexity: float, results: dict[str, list], path: str
) -> None:
    """Save the picture.

    Args:
        where: module path of the down projection.
        before, after: its input, ``[tokens, width]``, without and with R4.
        float_perplexity: of the model that nothing is quantized in.
        results: ``{name: [(perplexity, kl) plain, (perplexity, kl) rotated]}``.
        path: where to save it.
    """
    style = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "axes.titlesize": 11}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(12, 4.8), layout="constrained")
        left, right = figure.subfigures(1, 2, width_ratios=(1.25, 1))
        _draw_inputs(left, where, before, after)
        _draw_perplexities(right, float_perplexity, results)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_inputs(figure, where: str, before: torch.Tensor, after: torch.Tensor) -> None:
    """Every channel's largest magnitude, each token scaled to rms 1: what a per-token quantizer has to cover."""
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    figure.suptitle(f"input of {where}", fontsize=11)
    for ax, x, name, color in zip(axes, (before, after), ("before R4", "after R4"), (PLAIN, ROTATED)):
        x = (x / x.square().mean(-1, keepdim=True).sqrt()).abs()
        channel = range(x.shape[-1])
        # Lines of a fixed width, so that a single channel of thousands still shows.
        ax.vlines(channel, 0, x.amax(0), color=color, alpha=0.4, lw=1, label=f"largest of {len(x)} tokens")
        ax.vlines(channel, 0, x.quantile(0.9, 0), color=color, lw=1, label="90 % of the tokens")
        ax.set_title(f"{name}: a token's largest value is {x.amax(-1).mean():.1f} × its rms", loc="left", color=INK)
        ax.legend(frameon=False, loc="upper right", ncols=2)
        ax.set_ylabel("|x| / token's rms")
    axes[0].set_ylim(0, 1.25 * axes[0].get_ylim()[1])  # room for the legend
    axes[1].set_xlabel("channel")
    axes[1].set_xlim(-1, before.shape[-1])


def _draw_perplexities(figure, float_perplexity: float, results: dict[str, list]) -> None:
    ax = figure.subplots()
    for side, (name, color) in enumerate((("without rotation", PLAIN), ("with rotation", ROTATED))):
        heights = [row[side][0] for row in results.values()]
        bars = ax.bar([i + 0.4 * (side - 0.5) for i in range(len(heights))], heights, 0.38, color=color, label=name)
        ax.bar_label(bars, fmt="%.2f", padding=2, color=INK)
    ax.axhline(float_perplexity, color=INK, lw=1, ls="--", label=f"float32: {float_perplexity:.2f}")
    ax.set_xticks(range(len(results)), results)
    if max(plain for (plain, _), _ in results.values()) > 20 * float_perplexity:
        ax.set_yscale("log")  # a model that breaks without rotation would flatten every other bar
    ax.set_ylabel("perplexity (lower is better)")
    ax.legend(frameon=False, loc="upper left")
    figure.suptitle("what rotation buys", fontsize=11)
