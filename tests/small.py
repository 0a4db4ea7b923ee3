"""The words of a small job, for tests in which real processes run one."""

TINY = (
    "+recipe=sft_demo",
    "algorithm.batch_size=8",
    "data.items=64",
    "data.held_out=8",
    "model.hidden_size=32",
    "model.intermediate_size=32",
    "model.layers=2",
    "tracker=none",
)
UNJUDGED = (*TINY, "evaluation.every=0", "schedule=constant")
JUDGED = (
    *TINY,
    "steps=6",
    "evaluation.every=3",
    "evaluation.max_new_tokens=6",
    "checkpoint.every=2",
    "schedule.warmup_steps=1",
)
