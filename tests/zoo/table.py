"""Writes MODELS.md, what rotpass does on each model, from the expected sites: ``python tests/zoo/table.py``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from rotated import NO_STATIC_CACHE, NOT_EXPORTED, expected, names

MODELS = Path(__file__).parents[2] / "MODELS.md"

# Attentions, and linears that end an MLP or a stack of experts, counted by hand in the exported graphs (of those that do not
# export, in the module): what there is to find. Not counted: AdaLN, time, position and text embedders, routers, spatial
# convolutions, and what ends a state-space or a linear-attention mixer.
COUNTED = {
    "siglip_vision": (3, 3), "gemma3n_text": (4, 4), "gemma4_text": (4, 4), "diffllama": (4, 2), "lfm2": (1, 2),
    "jamba": (1, 2), "qwen3_next": (1, 4), "llama4_text": (2, 3), "deepseek_v2": (2, 3), "deepseek_v3": (2, 3),
    "t5_encdec": (6, 4), "whisper": (6, 4), "flux": (2, 3), "sd3": (3, 3), "unet2d_cond": (8, 4), "pixart": (4, 2),
    "wan": (4, 2), "z_image": (4, 4), "meta_complex": (1, 1),
}  # fmt: skip
USUAL = (2, 2)

# A stack of experts is one site above, rotated with all of them or not at all: the experts beyond the first of each stack.
MORE_EXPERTS = {
    "qwen3_moe": 6, "qwen3_next": 6, "mixtral": 6, "granitemoe": 6, "gpt_oss": 6, "deepseek_v2": 3, "deepseek_v3": 3,
    "jamba": 1, "llama4_text": 1,
}  # fmt: skip

INTRO = """\
# What rotpass does on your model

One row for each architecture that the tests build (`tests/zoo/architectures.py`: tiny and random, with the structure of
the real one), through `torch.export` where it exports, else through `torch.compile`. R3 and R4: rotated of those there
are. V: how its two halves are done, `v_proj / o_proj`. `tests/zoo/sites.txt` has every site of both doors, and
`tests/zoo/test_zoo.py` checks them and that the outputs stay the same.

| model | R3 | V | R4 | remarks |
|---|---|---|---|---|
"""


def row(name: str) -> tuple[str, tuple[int, ...]]:
    """A model's line, and (rotated, counted) of R3, of R4, and of R4 with each expert counted on its own."""
    door = "compile" if name in NOT_EXPORTED else "export"
    sites = [line.partition(": ") for line in expected()[name, door]]
    words = [(head.split(" "), reason) for head, _, reason in sites]
    attentions, mlps = COUNTED.get(name, USUAL)
    if name in NOT_EXPORTED:  # several graphs, as Dynamo cuts them
        attentions, mlps = (sum(head[0] == kind for head, _ in words) for kind in ("r3", "r4"))
    rotated = {kind: sum(head[0] == kind and head[3] == "rotated" for head, _ in words) for kind in ("r3", "r4")}
    v = Counter(f"{head[4]} / {head[5]}" for head, _ in words if head[0] == "v" and head[3] == "rotated")
    remarks = [
        f"{count}× {kind}: {reason}" for (kind, reason), count in Counter((h[0], r) for h, r in words if r).items()
    ]
    remarks += [f"does not export ({NOT_EXPORTED[name]})"] if name in NOT_EXPORTED else []
    remarks += [f"no exported decode step ({NO_STATIC_CACHE[name]})"] if name in NO_STATIC_CACHE else []
    halves = ", ".join(f"{count}× {how}" if len(v) > 1 else how for how, count in v.items())
    cells = f"{rotated['r3']}/{attentions}", halves, f"{rotated['r4']}/{mlps}", "; ".join(remarks)
    more = MORE_EXPERTS.get(name, 0)
    each = rotated["r4"] + more * (rotated["r4"] == mlps), mlps + more
    return f"| {name} | {' | '.join(cells)} |\n", (rotated["r3"], attentions, rotated["r4"], mlps, *each)


def table() -> str:
    """MODELS.md."""
    rows = [row(name) for name in names()]
    r3, attentions, r4, mlps, experts, all_experts = map(sum, zip(*(counts for _, counts in rows)))
    totals = (
        f"\nR3: {r3} of {attentions} attentions ({r3 / attentions:.1%}). R4: {r4} of {mlps} MLPs and stacks of experts "
        f"({r4 / mlps:.1%});\nwith every expert of a stack counted on its own {experts} of {all_experts} "
        f"({experts / all_experts:.1%}).\n"
    )
    return INTRO + "".join(text for text, _ in rows) + totals


if __name__ == "__main__":
    MODELS.write_text(table(), encoding="utf-8")
