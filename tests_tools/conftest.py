"""Of the tests of gradwire_tools: what ranks that are forked have imported (tests/ends.py)."""

import os

_ranks = "gradwire_tools.bench.train.worker"
_given = os.environ.get("GRADWIRE_TEST_IMPORTS", "")
os.environ["GRADWIRE_TEST_IMPORTS"] = ",".join(filter(None, [_given, _ranks]))
