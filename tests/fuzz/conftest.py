from tests.flower.conftest import in_a_run

__all__ = ["in_a_run"]  # for every case here, too: some are messages
