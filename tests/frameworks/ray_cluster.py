"""A Ray cluster on this machine for several drivers; ends when its standard input is closed.

python ray_cluster.py CPUS      prints the address
"""

import sys

import ray


def main() -> None:
    """One node."""
    context = ray.init(
        num_cpus=int(sys.argv[1]), include_dashboard=False, log_to_driver=False,
        object_store_memory=100 * 2**20,
    )  # fmt: skip
    print("address", context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
