"""Measures a few shapes of every op: python -m pallas_kernels.benchmark_all [--op OP ...] [--quick] [--output FILE].

At these shapes (`MEASURED` of `pallas_kernels.OP.benchmark`), the bytes do not fit in the second-level cache of a GPU.
"""

import importlib

from pallas_kernels import benchmarking

# In the order of their share of generation.
OPS = ("weighted_decode", "cluster_recall", "k_means", "soft_match", "balanced_walk")


def main() -> None:
    """Measures the ops that the command line names, by default all."""
    parser = benchmarking.make_parser(__doc__)
    parser.add_argument("--op", nargs="+", choices=OPS, default=OPS, help="the ops to measure")
    arguments = parser.parse_args()
    cases = []
    for op in arguments.op:
        module = importlib.import_module(f"pallas_kernels.{op}.benchmark")
        cases += [(op, shape) for shape in (module.QUICK[:1] if arguments.quick else module.MEASURED)]
    benchmarking.run(cases, arguments.output)


if __name__ == "__main__":
    main()
