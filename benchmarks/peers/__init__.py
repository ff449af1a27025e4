"""The small-work case of `benchmarks.small_work`, run by other simulators."""
