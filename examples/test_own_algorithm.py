"""The conformance suite of cwfed on an own algorithm; in this folder: pytest test_own_algorithm.py

Without pytest: python -c "from cwfed import testing; testing.check('own_algorithm:Ditto')"
"""

from cwfed import testing


class TestDitto(testing.Suite):
    """Two checks of it by name: pytest test_own_algorithm.py -k "same_seed or learns"."""

    algorithm = "own_algorithm:Ditto"
