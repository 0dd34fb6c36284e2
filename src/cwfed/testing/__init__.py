"""For tests of your own code: `conformance`, the suite that every algorithm of cwfed passes."""

from cwfed.testing.conformance import Suite, check

__all__ = ["Suite", "check"]
