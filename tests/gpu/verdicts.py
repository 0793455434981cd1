"""Prints a verdict for every claim, from the results of the GPU check in a folder.

    python tests/gpu/verdicts.py FOLDER

Writes verdicts.txt into the folder. Claims without figures are reported as open.
"""

import json
import pathlib
import re
import sys

# Speed relative to XLA's fastest implementation, and to the plain GEMM.
AGAINST_XLA = {
    ("gemm", "nn"): ("a plain product over XLA's, 8192 cubed", 0.97),
    ("dgrad_add", "nt+add"): ("dgrad_add over XLA's best", 1.0),
    ("wgrad_accumulate", "tn+add"): ("wgrad_accumulate over XLA's best", 1.0),
}
OVER_PLAIN = 0.95
HOST_TIME_US = 10.0
# Steps with figures or without verdicts. All others compare results or accesses.
NOT_OF_RESULTS = (
    "machine",
    "build from source",
    "the engine's parts",
    "a rank in loopback",
    "against XLA",
    "against XLA, tuned",
)


def main(folder):
    lines = [
        *results_are_right(folder),
        *parts(folder),
        *against_xla(folder, "bench"),
        *against_xla(folder, "tuned"),
        *host_time(folder),
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    (folder / "verdicts.txt").write_text(text)


def results_are_right(folder):
    for status, step in re.findall(
        r"^(ok|not run|no time|not finished|FAILED \(\d+\)) +\d+ s  (.+)$",
        log_of(folder),
        re.M,
    ):
        if step not in NOT_OF_RESULTS:
            word = "holds" if status == "ok" else "open"
            word = "MISSED" if status.startswith("FAILED") else word
            yield f"{word:<8}right results: {step}"


def parts(folder):
    found = read(folder / "gpu_bench.json")
    if found is None:
        yield "open    the engine's parts: gpu_bench left no figures"
        return
    for one in found["verdicts"]:
        yield line(one["holds"], f"{one['claim']}: {one['value']:.3f}", one["limit"])


def against_xla(folder, name):
    found = read(folder / f"{name}.json")
    suffix = "" if name == "bench" else f", {name}"
    results = (
        {} if found is None else {(r["op"], r["variant"]): r for r in found["results"]}
    )
    if found is not None and found["fallbacks"]:
        # A ratio of XLA to XLA is not a figure of jax_ub.
        reason = found["fallbacks"][0]["reason"]
        yield f"open    against XLA{suffix}: plain jax.lax: {reason}"
        return
    for key, (claim, limit) in AGAINST_XLA.items():
        result = results.get(key)
        if result is None:
            yield f"open    {claim}{suffix}: the bench left no figure"
            continue
        ratio = result["speedups"]["xla_best"]["median"]
        yield line(ratio >= limit, f"{claim}{suffix}: {ratio:.3f}", limit)
        if "plain_gemm" in result["shares"]:
            share = result["shares"]["plain_gemm"]["median"]
            text = f"{key[0]}{suffix}, share of the plain product: {share:.3f}"
            yield line(share >= OVER_PLAIN, text, OVER_PLAIN)


def host_time(folder):
    times = re.findall(
        r"host time of (.+) in a program of \d+: (-?[\d.]+) us", log_of(folder)
    )
    if not times:
        yield "open    host time of a call: local.py printed none"
    for op, time in times:
        text = f"host time of {op}: {time} us"
        yield line(float(time) < HOST_TIME_US, text, HOST_TIME_US)


def log_of(folder):
    log = folder / "gpu_check.log"
    return log.read_text() if log.exists() else ""


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def line(holds, text, limit):
    return f"{'holds' if holds else 'MISSED':<8}{text} (goal {limit})"


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
