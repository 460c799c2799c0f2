"""The cost of one part: kernels, aggregators, a bucket beyond both."""
