"""A client that trains through the SDK of Tinker, in its environment: for each line of input it makes some steps.

Arguments: rows, tokens of a row, steps for each line. Prints the seconds of the fastest step.
"""

from __future__ import annotations

import sys
import time

import tinker
from tinker import types


def main() -> None:
    count, length, steps = map(int, sys.argv[1:])
    service = tinker.ServiceClient()
    base = tinker.RestClient().get_server_capabilities().result().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=base, rank=8, seed=7).result()
    rows = [[(7 * row + 3 * at) % 250 for at in range(length + 1)] for row in range(count)]
    data = [
        types.Datum(
            model_input=types.ModelInput.from_ints(row[:-1]),
            loss_fn_inputs={"target_tokens": row[1:], "weights": [1.0] * length},
        )
        for row in rows
    ]
    for _ in sys.stdin:
        seconds = []
        for _ in range(steps):
            begin = time.perf_counter()
            passed = training.forward_backward(data, "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-4))
            passed.result()
            stepped.result()
            seconds.append(time.perf_counter() - begin)
        print(min(seconds), flush=True)


if __name__ == "__main__":
    main()
