"""The linalg IR of the Triton kernels run on CPU: distances from float64, as JSON. Run with triton-ascend and
torch-mlir on the path.

python execute_worker.py CASE ...    names of tests/kernels/triton_cases.py
"""

import json
import sys
import traceback

import torch

from mindspeed_fx.ascend.execute import executing
from tests.kernels import region_cases
from tests.kernels import triton_cases as cases


def run(case, dtype):
    with executing() as ran:
        found = cases.distances(case, dtype, "cpu")
    return {"distances": found, "kernels": sorted(set(ran))}


if __name__ == "__main__":
    with executing() as ran:
        rows = {"adamw-float32": {"distances": cases.adamw("cpu"), "kernels": ran}} if "adamw" in sys.argv else {}
    for dtype in (torch.float32, torch.bfloat16) if "regions" in sys.argv else ():
        with executing():
            rows[f"regions-{str(dtype)[6:]}"] = region_cases.distances(dtype)
    for case in cases.CASES:
        if case.name in sys.argv[1:]:
            for dtype in (torch.float32, torch.bfloat16):
                try:
                    rows[f"{case.name}-{str(dtype)[6:]}"] = run(case, dtype)
                except Exception as e:  # the others still tell something
                    rows[f"{case.name}-{str(dtype)[6:]}"] = {
                        "error": f"{type(e).__name__}: {e}"[:600],
                        "trace": traceback.format_exc()[-1500:],
                    }
    print(json.dumps(rows))
