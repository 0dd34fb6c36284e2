"""Record the golden runs anew."""

import json

from tests.golden import RECORD, record

RECORD.write_text(json.dumps(record(), indent=1) + "\n")
