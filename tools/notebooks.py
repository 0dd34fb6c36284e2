"""docs/notebooks/: executes the notebooks and keeps what they print and draw.

    python tools/notebooks.py

Needs no Jupyter: the code cells are Python and nothing else, so that the suite executes them too. Each notebook runs in a folder of its own.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

NOTEBOOKS = Path(__file__).parent.parent / "docs" / "notebooks"


def execute(notebook: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The notebook with the outputs of its cells; what they write is in `folder`."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    usual, main = sys.modules["__main__"], ModuleType("__main__")
    sys.modules["__main__"] = main  # as in Jupyter: "__main__:name" is something of the notebook
    cells, number = [], 0
    try:
        with chdir(folder):
            for cell in notebook["cells"]:
                if cell["cell_type"] == "code":
                    number += 1
                    printed = io.StringIO()
                    code = compile("".join(cell["source"]), f"cell {number}", "exec", dont_inherit=True)
                    with redirect_stdout(printed):
                        exec(code, vars(main))
                    cell = cell | {
                        "execution_count": number,
                        "outputs": [*_text(printed.getvalue()), *_pictures(pyplot)],
                    }
                cells.append(cell)
    finally:
        sys.modules["__main__"] = usual
        pyplot.close("all")
    return notebook | {"cells": cells}


def _text(printed: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)}] if printed else []


def _pictures(pyplot: Any) -> list[dict[str, Any]]:
    found = []
    for number in pyplot.get_fignums():
        picture = io.BytesIO()
        pyplot.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight")
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": []}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    pyplot.close("all")
    return found


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder:
            done = execute(json.loads(path.read_text(encoding="utf-8")), Path(folder))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
